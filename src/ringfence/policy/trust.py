"""Environment and files that make programs inside trust the sandbox's CA. Pure: text in, files out.

Every runtime looks for roots in its own place. So the sandbox gets one bundle (the host's roots and
its own authority), the variables that name a bundle to programs, and the same bundle over the
system's own files, for programs that read only those.
"""

from __future__ import annotations

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.net.network import NetworkPolicy

DIRECTORY = "/etc/ringfence"
AUTHORITY = f"{DIRECTORY}/ca.pem"
BUNDLE = f"{DIRECTORY}/ca-bundle.pem"
JAVA_STORE = f"{DIRECTORY}/cacerts"

# Where systems keep the roots as one PEM file: Debian, Alpine and Arch; Fedora; openSUSE; BSD's.
SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# Where every JVM of the system's finds them.
JAVA_STORES = ("/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts")

# Each names a whole bundle. Down to cargo they were tried; the rest is as their manuals say.
_WANT_ALL = (
    "SSL_CERT_FILE",  # OpenSSL, and with it Python's ssl, httpx, aiohttp, Ruby, PHP; Go; rustls; uv
    "CURL_CA_BUNDLE",  # curl, R; requests where the next is not set
    "REQUESTS_CA_BUNDLE",  # requests (its own bundle, certifi, otherwise), conda
    "PIP_CERT",  # pip (its own copy of certifi otherwise)
    "GIT_SSL_CAINFO",  # git: with GnuTLS it reads none of the above
    "NPM_CONFIG_CAFILE",  # npm, pnpm: where a configuration names a bundle, node's is not enough
    "CARGO_HTTP_CAINFO",  # cargo
    "YARN_HTTPS_CA_FILE_PATH",  # yarn from version 2 on
    "AWS_CA_BUNDLE",  # boto, the AWS command line
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",  # gcloud
    "HEX_CACERTS_PATH",  # Elixir's hex
    "JULIA_SSL_CA_ROOTS_PATH",  # Julia
    "NIX_SSL_CERT_FILE",  # Nix
    "PERL_LWP_SSL_CA_FILE",  # Perl's LWP
)
# These add to roots that the program brings along.
_WANT_ONE = (
    "NODE_EXTRA_CA_CERTS",  # node, bun
    "DENO_CERT",  # deno
)

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
# The format that every JVM reads, without a password too. Source: sun.security.provider.JavaKeyStore
_JKS_MAGIC, _JKS_VERSION, _JKS_TRUSTED = 0xFEEDFEED, 2, 2
_JKS_PASSWORD, _JKS_WORDS = "changeit", b"Mighty Aphrodite"


class Trust:
    """Additions to a sandbox whose TLS is terminated.

    Attributes:
        env: Variables for every exec; the user's own win over them.
        files: Path to content; readable by all, writable by nobody.
        over: System file to the entry of `files` that is bind-mounted over it.
    """

    def __init__(self, env: dict[str, str], files: dict[str, bytes], over: dict[str, str]) -> None:
        self.env, self.files, self.over = env, files, over


def plan_trust(authority: str, host_bundle: str, present: Iterable[str] = ()) -> Trust:
    """How programs inside come to trust `authority` beside the roots of `host_bundle`.

    Args:
        authority: One certificate, PEM.
        host_bundle: The roots that the host trusts, PEM, comments and all; may be empty.
        present: Those of `SYSTEM_BUNDLES` and `JAVA_STORES` that are files inside, and no links.
    """
    roots, entries, count = _of_the_host(host_bundle)
    bundle = roots + "".join(certificates(authority)).encode("ascii")
    files = {AUTHORITY: authority.encode("ascii"), BUNDLE: bundle}
    over = {}
    for path in present:
        if path in SYSTEM_BUNDLES:
            over[path] = BUNDLE
        elif path in JAVA_STORES:
            over[path] = JAVA_STORE
    if JAVA_STORE in over.values():
        files[JAVA_STORE] = _java_store(entries + _java_entry(count, authority), count + 1)
    env = {**dict.fromkeys(_WANT_ALL, BUNDLE), **dict.fromkeys(_WANT_ONE, AUTHORITY)}
    return Trust(env, files, over)


def ended_hosts(policy: NetworkPolicy) -> tuple[str, ...]:
    """The hosts that an authority must speak for: those whose requests are judged one by one."""
    hosts = {rule.host for rule in policy.all_rules if rule.needs_tls_termination}
    return tuple(sorted(hosts))


def not_covered(hosts: Iterable[str], made_for: Iterable[str]) -> tuple[str, ...]:
    """Return the `hosts` that an authority made for `made_for` cannot certify.

    Its name constraints decide: a name covers itself and all names below it.
    """
    domains = tuple(f".{host.removeprefix('*.')}" for host in made_for)
    return tuple(host for host in hosts if not f".{host.removeprefix('*.')}".endswith(domains))


def certificates(text: str) -> list[str]:
    """Each certificate of a PEM file, without what is written between them."""
    found = []
    for part in text.split(_BEGIN)[1:]:
        body, closed, _ = part.partition(_END)
        if closed:
            found.append(f"{_BEGIN}{body}{_END}\n")
    return found


@functools.lru_cache(maxsize=2)
def _of_the_host(bundle: str) -> tuple[bytes, bytes, int]:
    """Of the host's roots: all as PEM, their entries in a Java store, and how many they are."""
    roots = certificates(bundle)
    entries = b"".join(_java_entry(number, root) for number, root in enumerate(roots))
    return "".join(roots).encode("ascii"), entries, len(roots)


def java_store(roots: Iterable[str]) -> bytes:
    """A Java key store (JKS) of trusted certificates, each PEM."""
    entries = [_java_entry(number, root) for number, root in enumerate(roots)]
    return _java_store(b"".join(entries), len(entries))


def _java_entry(number: int, root: str) -> bytes:
    import binascii

    content = binascii.a2b_base64(root.partition(_BEGIN)[2].partition(_END)[0])
    return (
        _JKS_TRUSTED.to_bytes(4, "big")
        + _java_text(f"root-{number}")
        + bytes(8)  # when it was added: always the same, so that the file is
        + _java_text("X.509")
        + len(content).to_bytes(4, "big")
        + content
    )


def _java_store(entries: bytes, count: int) -> bytes:
    import hashlib

    numbers = (_JKS_MAGIC, _JKS_VERSION, count)
    store = b"".join(number.to_bytes(4, "big") for number in numbers) + entries
    # A checksum, as the password is known to all.
    salted = _JKS_PASSWORD.encode("utf-16-be") + _JKS_WORDS + store
    return store + hashlib.sha1(salted, usedforsecurity=False).digest()


def _java_text(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode("ascii")
