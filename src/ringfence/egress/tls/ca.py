"""A certificate authority of one sandbox: signs for the hosts whose TLS is ended here, and no others.

The only module that needs `cryptography` (the extra `egress`). Keys live in this process and, so that
a restarted one can go on, in the host process; never in a sandbox.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..refused import Refused
from .roots import strict_context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

AUTHORITY_LIFE = datetime.timedelta(days=365)
LEAF_LIFE = datetime.timedelta(days=1)
_BACKDATED = datetime.timedelta(hours=1)  # a clock inside may be set back by a test's tool
_MOST_LEAVES = 256  # a rule for *.name lets the client choose names
_NO_NAME = "none.invalid"  # stands for no name at all; RFC 6761, 6.4: it never resolves
_EVERY_ADDRESS = ("0.0.0.0/0", "::/0")


class Authority:
    """The authority of one sandbox.

    Attributes:
        certificate: PEM; what the sandbox is to trust.
    """

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: dict[str, tuple[datetime.datetime, ssl.SSLContext]] = {}
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    @classmethod
    def create(cls, hosts: Iterable[str]) -> Authority:
        """A new one.

        Args:
            hosts: The hosts of rules that end TLS, names and `*.names`. Name constraints, marked
                critical, keep the authority to these (and, as RFC 5280 defines them, to the names
                below a name), should its key ever get out.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        # Told apart by name, too: two authorities of one name confuse who looks issuers up by it.
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"Ringfence sandbox {secrets.token_hex(8)}")]
        )
        public = key.public_key()
        certificate = (
            _certificate(name, name, public, AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(_constraints(hosts), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate: str, key: str) -> Authority:
        """The one that `certificate` and `private_key` described, both PEM."""
        loaded = serialization.load_pem_private_key(key.encode("ascii"), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise TypeError("the key of an authority is an elliptic curve's")
        return cls(x509.load_pem_x509_certificate(certificate.encode("ascii")), loaded)

    def private_key(self) -> str:
        """The key, PEM: for the host process, and nobody else."""
        return _key_pem(self._key).decode("ascii")

    def __repr__(self) -> str:
        return f"Authority({self._certificate.subject.rfc4514_string()})"

    def context(self, host: str) -> ssl.SSLContext:
        """TLS as `host`, a name; made once, and anew before its certificate ends.

        Raises:
            Refused: The authority was not made for this host.
        """
        now = _now()
        until, context = self._contexts.pop(host, (now, None))
        if context is None or until - now < LEAF_LIFE / 2:
            until, context = now + LEAF_LIFE, self._new_context(host)
        while len(self._contexts) >= _MOST_LEAVES:
            del self._contexts[next(iter(self._contexts))]  # the one not asked for the longest
        self._contexts[host] = until, context
        return context

    def _new_context(self, host: str) -> ssl.SSLContext:
        context = strict_context(ssl.PROTOCOL_TLS_SERVER)
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        _load(context, self.leaf(host) + _key_pem(self._leaf_key))
        return context

    def leaf(self, host: str) -> bytes:
        """A certificate for `host`, PEM.

        Raises:
            Refused: The authority was not made for this host.
        """
        if not _permits(self._certificate, host):
            raise Refused(
                f"the sandbox's certificate authority does not cover {host}: it was made"
                " before the rule that ends this host's TLS; create a new sandbox for that rule"
            )
        public, issuer = self._leaf_key.public_key(), self._key.public_key()
        certificate = (
            _certificate(_subject(host), self._certificate.subject, public, LEAF_LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _BACKDATED)
        .not_valid_after(_now() + life)
    )


def _subject(host: str) -> x509.Name:
    """Never empty; with a common name where the host fits into one, for readers of old."""
    if len(host) <= 64:  # X.520's upper bound
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Ringfence")])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _constraints(hosts: Iterable[str]) -> x509.NameConstraints:
    names = [x509.DNSName(host) for host in dict.fromkeys(h.removeprefix("*.") for h in hosts)]
    every = [x509.IPAddress(ipaddress.ip_network(network)) for network in _EVERY_ADDRESS]
    return x509.NameConstraints(
        permitted_subtrees=names or [x509.DNSName(_NO_NAME)], excluded_subtrees=every
    )


def _permits(certificate: x509.Certificate, host: str) -> bool:
    """Return whether the authority's constraints cover a name. Source: RFC 5280, 4.2.1.10."""
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    below = [f".{name.value}" for name in constraints.permitted_subtrees or ()]
    return f".{host}".endswith(tuple(below))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load certificate and key from memory; `ssl` reads them from files alone."""
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
