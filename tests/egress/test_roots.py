"""Whom this host trusts."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from ringfence.egress.tls import roots
from ringfence.egress.tls.ca import Authority
from ringfence.policy import trust
from ringfence.policy.trust import certificates
from tests.egress.test_ca import handshake
from tests.features import require

THIS_HOSTS = roots.read_bundle()


def test_this_host_has_roots() -> None:
    assert certificates(roots.read_bundle())


def test_the_usual_variable_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, other = Authority.create(["a.test"]), Authority.create(["a.test"])
    (tmp_path / "roots.pem").write_text(f"# Wurzeln, älter\n{server.certificate}", "utf-8")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))

    assert [server.certificate] == certificates(roots.read_bundle())
    assert handshake(server.context("a.test"), roots.client_context(), "a.test").getpeercert()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other.context("a.test"), roots.client_context(), "a.test")
    with pytest.raises(ssl.SSLCertVerificationError, match="ostname"):
        handshake(server.context("a.test"), roots.client_context(), "b.test")


def test_roots_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")

    with pytest.raises(OSError, match="No such file"):
        roots.client_context()


def test_another_python_finds_the_system_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose OpenSSL was built for another prefix."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    (tmp_path / "bundle").write_text("")
    paths = ssl.get_default_verify_paths()._replace(openssl_cafile="/nowhere")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.setattr(roots, "SYSTEM_BUNDLES", ("/nowhere/either", str(tmp_path / "bundle")))
    assert str(tmp_path / "bundle") == roots.bundle_path()

    monkeypatch.setattr(roots, "SYSTEM_BUNDLES", ())
    assert "" == roots.bundle_path()
    assert "" == roots.read_bundle()
    assert roots.client_context().verify_mode is ssl.CERT_REQUIRED


def test_what_a_sandbox_shows_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown").mkdir()
    bundle, link, hidden = (
        tmp_path / "shown" / "bundle",
        tmp_path / "shown" / "link",
        tmp_path / "x",
    )
    for file in (bundle, hidden):
        file.write_text("")
    link.symlink_to(bundle)
    monkeypatch.setattr(roots, "SYSTEM_BUNDLES", (str(bundle), str(link), str(hidden)))
    monkeypatch.setattr(trust, "SYSTEM_BUNDLES", (str(bundle), str(link), str(hidden)))

    planned = roots.trust(Authority.create([]).certificate, [str(tmp_path / "shown")])

    assert {str(bundle): trust.BUNDLE} == planned.over


@pytest.mark.parametrize("side", [ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER])
def test_nothing_is_negotiated_twice_and_a_cut_is_no_end(side: int) -> None:
    context = roots.strict_context(side)

    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert not context.options & getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    assert ssl.TLSVersion.TLSv1_2 == context.minimum_version


def test_a_directory_beside_a_shown_one_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shown", "shown-not"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle").write_text("")
    both = tuple(str(tmp_path / name / "bundle") for name in ("shown", "shown-not"))
    monkeypatch.setattr(roots, "SYSTEM_BUNDLES", both)
    monkeypatch.setattr(trust, "SYSTEM_BUNDLES", both)

    planned = roots.trust(Authority.create([]).certificate, [str(tmp_path / "shown")])

    assert {both[0]: trust.BUNDLE} == planned.over


def test_what_this_python_was_built_with_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for name in ("built-in", "usual"):
        (tmp_path / name).write_text("")
    paths = ssl.get_default_verify_paths()._replace(openssl_cafile=str(tmp_path / "built-in"))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.setattr(roots, "SYSTEM_BUNDLES", (str(tmp_path / "usual"),))

    assert str(tmp_path / "built-in") == roots.bundle_path()


def test_without_a_file_of_roots_a_directory_of_them_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("openssl")
    server = Authority.create(["a.test"])
    (tmp_path / "root.pem").write_text(server.certificate)
    named = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", str(tmp_path / "root.pem")],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (tmp_path / "root.pem").rename(tmp_path / f"{named}.0")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setattr(roots, "bundle_path", lambda: "")

    assert handshake(server.context("a.test"), roots.client_context(), "a.test").getpeercert()
