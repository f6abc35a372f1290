"""TLS between machines: one certificate that the cluster makes, which its gateways alone trust.

Nodes know gateways by the seal on each request (`api.access.gateways`); TLS keeps both from others' eyes.
"""

from __future__ import annotations

import datetime
import json
import secrets
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .directory import Directory

_LIFE = datetime.timedelta(days=3650)  # the cluster's; it is made anew with each
_BACKDATED = datetime.timedelta(days=1)  # clocks of machines differ


def identity(directory: Directory) -> tuple[str, str]:
    """Certificate and private key of the cluster, PEM; made by the first that asks."""
    found = directory.get("tls") or directory.put_first("tls", _make())
    certificate, key = json.loads(found)
    return certificate, key


def client_context(certificate: str) -> ssl.SSLContext:
    """TLS to nodes: this one certificate is trusted, whatever the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # nodes come and go; the certificate is the cluster's own
    context.load_verify_locations(cadata=certificate)
    return context


def _make() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    common = f"Ringfence cluster {secrets.token_hex(8)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return json.dumps([certificate.public_bytes(pem).decode(), private.decode()]).encode()
