"""The certificate authority of a sandbox: what it may sign for, and who believes it."""

from __future__ import annotations

import datetime
import os
import ssl
import subprocess
from pathlib import Path
from typing import TypeVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringfence.egress.refused import Refused
from ringfence.egress.tls import ca
from ringfence.egress.tls.ca import Authority
from tests.features import require

pytestmark = pytest.mark.anyone

Extension = TypeVar("Extension", bound=x509.ExtensionType)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """Both ends in memory; returns the client's. Raises what the client says."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for end in (theirs, ours):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return theirs


def trusting(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.certificate)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    return context


HOSTS = ["a.test", "*.wild.test"]


@pytest.mark.parametrize("name", ["a.test", "x.wild.test", "x.y.wild.test"])
def test_who_trusts_it_believes_its_leaves(name: str) -> None:
    authority = Authority.create(HOSTS)

    client = handshake(authority.context(name), trusting(authority), name)

    certificate = client.getpeercert()
    assert certificate
    assert (("DNS", name),) == certificate["subjectAltName"]


def test_a_long_name_has_a_certificate_too() -> None:
    name = ".".join(["a" * 60, "b" * 60, "test"])  # more than a common name may have
    authority = Authority.create([name])

    assert handshake(authority.context(name), trusting(authority), name).getpeercert()


def test_another_sandbox_does_not_believe_it() -> None:
    mine, other = Authority.create(["a.test"]), Authority.create(["a.test"])

    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(mine.context("a.test"), trusting(other), "a.test")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(mine.context("a.test"), ssl.create_default_context(), "a.test")


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        (["a.test"], "b.test"),
        (["a.test"], "nota.test"),
        (["a.test"], "test"),
        (["*.wild.test"], "wilder.test"),
        ([], "a.test"),
    ],
)
def test_it_signs_for_its_hosts_alone(
    hosts: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(hosts)
    with pytest.raises(Refused, match="create a new sandbox"):
        authority.context(name)

    # And if it did: nobody who trusts it would believe that.
    monkeypatch.setattr(ca, "_permits", lambda _certificate, _name: True)
    with pytest.raises(ssl.SSLCertVerificationError, match="subtree"):
        handshake(authority.context(name), trusting(authority), name)


def test_it_survives_its_process() -> None:
    first = Authority.create(["a.test"])
    second = Authority.load(first.certificate, first.private_key())

    assert handshake(second.context("a.test"), trusting(first), "a.test").getpeercert()


def test_the_key_is_not_shown() -> None:
    authority = Authority.create(["a.test"])

    assert "PRIVATE" in authority.private_key()
    assert "PRIVATE" not in f"{authority!r} {authority.certificate}"


def test_contexts_are_kept_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.create(["*.test"])
    first = authority.context("a.test")
    assert first is authority.context("a.test")

    now = datetime.datetime.now(datetime.UTC)
    monkeypatch.setattr(ca, "_now", lambda: now + ca.LEAF_LIFE * 0.6)
    assert first is not authority.context("a.test")


def test_names_that_the_client_invents_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ca, "_MOST_LEAVES", 3)
    authority = Authority.create(["*.test"])
    often = authority.context("often.test")

    for i in range(10):
        authority.context(f"{i}.test")
        assert often is authority.context("often.test")
    assert 3 == len(authority._contexts)


def test_a_leaf_lives_a_day() -> None:
    leaf = x509.load_pem_x509_certificate(Authority.create(["a.test"]).leaf("a.test"))

    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc <= datetime.timedelta(
        days=1, hours=1
    )


def test_the_certificate_is_as_rfc_5280_has_it(tmp_path: Path) -> None:
    """openssl's own checks, in its strictest mode."""
    require("openssl")
    authority = Authority.create(HOSTS)
    (tmp_path / "ca").write_text(authority.certificate)
    (tmp_path / "leaf").write_bytes(authority.leaf("a.test"))

    said = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-verify_hostname", "a.test", "-purpose", "sslserver",
         "-CAfile", str(tmp_path / "ca"), str(tmp_path / "leaf")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert 0 == said.returncode, said.stderr


def test_only_http_1_is_offered() -> None:
    authority = Authority.create(["a.test"])
    client = trusting(authority)
    client.set_alpn_protocols(["h2", "http/1.1"])

    ours = handshake(authority.context("a.test"), client, "a.test")

    assert "http/1.1" == ours.selected_alpn_protocol()


def test_old_versions_are_refused() -> None:
    authority = Authority.create(["a.test"])
    client = trusting(authority)
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1

    with pytest.raises(ssl.SSLError):
        handshake(authority.context("a.test"), client, "a.test")


def extension(certificate: x509.Certificate, kind: type[Extension]) -> x509.Extension[Extension]:
    return certificate.extensions.get_extension_for_class(kind)


def test_the_authority_signs_no_other_authority_and_for_no_address() -> None:
    made = x509.load_pem_x509_certificate(
        Authority.create(["*.a.test", "b.test"]).certificate.encode()
    )

    basic = extension(made, x509.BasicConstraints)
    assert (True, True, 0) == (basic.critical, basic.value.ca, basic.value.path_length)
    names = extension(made, x509.NameConstraints)
    assert names.critical
    assert ["a.test", "b.test"] == [each.value for each in names.value.permitted_subtrees or ()]
    assert ["0.0.0.0/0", "::/0"] == [str(e.value) for e in names.value.excluded_subtrees or ()]
    usage = extension(made, x509.KeyUsage)
    assert usage.critical
    assert (True, False, False) == (
        usage.value.key_cert_sign,
        usage.value.crl_sign,
        usage.value.digital_signature,
    )
    assert datetime.timedelta(days=300) < made.not_valid_after_utc - made.not_valid_before_utc


def test_a_leaf_is_for_a_server_alone_and_has_another_key() -> None:
    authority = Authority.create(["a.test"])
    made = x509.load_pem_x509_certificate(authority.certificate.encode())
    leaf = x509.load_pem_x509_certificate(authority.leaf("a.test"))

    basic = extension(leaf, x509.BasicConstraints)
    assert (True, False) == (basic.critical, basic.value.ca)
    assert [ExtendedKeyUsageOID.SERVER_AUTH] == list(extension(leaf, x509.ExtendedKeyUsage).value)
    usage = extension(leaf, x509.KeyUsage).value
    assert (True, False) == (usage.digital_signature, usage.key_cert_sign)
    assert made.public_key() != leaf.public_key()
    assert made.serial_number != leaf.serial_number


def test_a_clock_inside_may_be_a_little_behind() -> None:
    authority = Authority.create(["a.test"])
    earlier = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=50)

    for made in (authority.certificate.encode(), authority.leaf("a.test")):
        assert x509.load_pem_x509_certificate(made).not_valid_before_utc < earlier


def test_two_authorities_are_told_apart_by_name() -> None:
    one, other = (Authority.create(["a.test"]) for _ in range(2))

    assert repr(one) != repr(other)


@pytest.mark.parametrize("length", [64, 65])
def test_a_name_that_fits_is_the_common_name_too(length: int) -> None:
    host = ("a" * 59 + ".test").rjust(length, "b")
    leaf = x509.load_pem_x509_certificate(Authority.create([host]).leaf(host))

    names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert ([host] if length <= 64 else []) == [each.value for each in names]
    assert leaf.subject.rdns


def test_no_session_is_kept_for_a_client() -> None:
    context = Authority.create(["a.test"]).context("a.test")

    assert 0 == context.num_tickets
    assert context.options & ssl.OP_NO_TICKET


def test_who_is_asked_again_costs_nobody_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ca, "_MOST_LEAVES", 3)
    authority = Authority.create(["*.test"])
    made = [authority.context(f"{name}.test") for name in "abc"]

    authority.context("a.test")
    assert made == [authority.context(f"{name}.test") for name in "abc"]
    authority.context("d.test")
    assert made[1:] == [authority.context(f"{name}.test") for name in "bc"]


def test_no_descriptor_is_left_of_a_certificate() -> None:
    authority = Authority.create(["*.test"])
    before = os.listdir("/proc/self/fd")
    authority.context("a.test")

    assert before == os.listdir("/proc/self/fd")


def test_a_key_of_another_kind_is_refused() -> None:
    key = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(TypeError, match="elliptic"):
        Authority.load(Authority.create(["a.test"]).certificate, key.decode())
