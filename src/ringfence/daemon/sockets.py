"""The sockets that the daemon listens on."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat

from ..errors import InvalidRequest, IoError

_BACKLOG = 2048
_PATH_MAX = 107  # struct sockaddr_un, less the closing NUL: unix(7)


def listen_unix(path: str) -> socket.socket:
    """A unix socket that only this user can connect to; what an earlier daemon left is replaced.

    Preconditions: the directory is ours, and no other daemon holds it.
    """
    if len(os.fsencode(path)) > _PATH_MAX:
        raise InvalidRequest(
            f"{path} is too long for a unix socket",
            field="state_dir",
            hint="choose a state directory with a shorter path",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_socket(path)
        # bind(2) gives the socket file the mode of the socket: set before, no other user can
        # connect in between.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise IoError(f"cannot listen at {path}: {exc.strerror}", field="state_dir") from exc
    return listener


def _remove_socket(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


def listen_tcp(where: str, *, public: bool) -> socket.socket:
    """A TCP socket at `HOST:PORT`; HOST is an address or `localhost`.

    Args:
        public: Whether an address may be one that others can reach.

    Raises:
        InvalidRequest: It is malformed, taken, or public without leave.
    """
    address, port = check_address(where, public=public)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(address), port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        hint = "choose another port, or 0 for a free one; `ss -ltnp` shows which process has it"
        raise InvalidRequest(f"{where}: {exc.strerror}", field="listen", hint=hint) from exc
    return listener


def check_certificate(certificate: str, key: str) -> None:
    """Load both files once, before anybody is told that the server listens.

    Raises:
        InvalidRequest: One cannot be read, or they are no pair.
    """
    import ssl

    for field, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as exc:
            hint = "give the path of a PEM file that this user can read"
            raise InvalidRequest(f"{path}: {exc.strerror}", field=field, hint=hint) from exc
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as exc:
        what = f"{certificate} and {key} are not a certificate and its private key in PEM"
        hint = "put the certificate chain in one file and its private key, without a password, in the other"
        raise InvalidRequest(what, field="tls_certificate", hint=hint) from exc


def check_address(
    where: str, *, public: bool
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """The address and port of `HOST:PORT`.

    Raises:
        InvalidRequest: It is malformed, or can be reached by others without leave.
    """
    host, port = read_address(where)
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    if not address.is_loopback and not public:
        raise InvalidRequest(
            f"other machines can reach {host}",
            field="listen",
            hint="add --tls-certificate and --tls-key, or --allow-public to serve without TLS",
        )
    return address, port


def read_address(where: str) -> tuple[str, int]:
    """`HOST:PORT`, HOST an address (`[v6]`) or `localhost`.

    Raises:
        InvalidRequest: It is something else.
    """
    host, _, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if host != "localhost":
            ipaddress.ip_address(host)
        number = int(port)
        if not 0 <= number <= 65535 or not port.isascii() or not port.isdigit():
            raise ValueError
    except ValueError:
        hint = f"as {host or '127.0.0.1'}:7878" if where == host else "as 127.0.0.1:7878"
        if host in ("", "*") and where != host:
            hint = "as 127.0.0.1:7878; for every address of this host 0.0.0.0:7878"
        if where.startswith(("unix:", "/", "fd:")):
            hint = "TCP only; the unix socket is always there, in --state-dir"
        what = f"{where!r} is not ADDRESS:PORT"
        digits = port.removeprefix("-")
        is_number = digits.isascii() and digits.isdigit()
        if is_number and (port != digits or len(digits) > 5 or int(digits) > 65535):
            what = f"{port!r} is not a port: 0 to 65535"
        raise InvalidRequest(what, field="listen", hint=hint) from None
    return host, number
