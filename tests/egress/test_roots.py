"""Whom this host trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from ringfence.egress.tls import roots
from ringfence.egress.tls.ca import Authority
from ringfence.policy import trust
from ringfence.policy.trust import certificates
from tests.egress.test_ca import handshake

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
