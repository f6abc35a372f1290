"""The first message of real programs: what is installed here, as it comes over a socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.egress.tls.hello import Hello, client_hello
from tests.features import require

pytestmark = pytest.mark.anyone

PYTHON = """
import socket, ssl
connection = socket.create_connection(("127.0.0.1", {port}))
ssl.create_default_context().wrap_socket(connection, server_hostname="a.test")
"""
NODE = """
const options = {{host: "127.0.0.1", port: {port}, servername: "a.test"}};
require("tls").connect(options).on("error", () => {{}});
"""
JAVA = """
import java.net.Socket;
import javax.net.ssl.*;
public class Hello {{
  public static void main(String[] args) throws Exception {{
    SSLSocketFactory all = (SSLSocketFactory) SSLSocketFactory.getDefault();
    SSLSocket one = (SSLSocket) all.createSocket(new Socket("127.0.0.1", {port}), "a.test", {port}, true);
    one.startHandshake();
  }}
}}
"""
CURL = ["curl", "-s", "--resolve", "a.test:{port}:127.0.0.1", "https://a.test:{port}/"]
S_CLIENT = ["openssl", "s_client", "-connect", "127.0.0.1:{port}"]
TO_A = [*S_CLIENT, "-servername", "a.test"]
BOTH = ("h2", "http/1.1")

# The program that must be there, its command, and what its hello says.
CLIENTS: dict[str, tuple[str, list[str], str | None, tuple[str, ...]]] = {
    "python": ("linux", [sys.executable, "-c", PYTHON], "a.test", ()),
    "curl": ("curl", CURL, "a.test", BOTH),
    "curl over HTTP/1.1": ("curl", [*CURL, "--http1.1"], "a.test", ("http/1.1",)),
    "curl in TLS 1.2": ("curl", [*CURL, "--tls-max", "1.2", "--no-alpn"], "a.test", ()),
    "curl by address": ("curl", ["curl", "-s", "https://127.0.0.1:{port}/"], None, BOTH),
    "openssl": ("openssl", [*S_CLIENT, "-servername", "A.Test"], "a.test", ()),
    "openssl in TLS 1.2": ("openssl", [*TO_A, "-tls1_2"], "a.test", ()),
    "openssl in TLS 1.3": ("openssl", [*TO_A, "-tls1_3"], "a.test", ()),
    "openssl with protocols": ("openssl", [*TO_A, "-alpn", "h2,x/1"], "a.test", ("h2", "x/1")),
    "openssl without a name": ("openssl", [*S_CLIENT, "-noservername"], None, ()),
    "node": ("node", ["node", "-e", NODE], "a.test", ()),
    "java": ("java", ["java", "{directory}/Hello.java"], "a.test", ()),
}


@pytest.mark.full
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS.keys())
def test_the_hello_of_a_program(
    client: tuple[str, list[str], str | None, tuple[str, ...]], tmp_path: Path
) -> None:
    needed, command, name, protocols = client
    require(needed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (tmp_path / "Hello.java").write_text(JAVA.format(port=port))
        argv = [part.format(port=port, directory=tmp_path) for part in command]
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                hello, data = _first_message(listener)
            finally:
                process.kill()

    assert Hello(name, protocols, False, len(data)) == hello
    # The same in any two pieces.
    for cut in range(len(data)):
        assert client_hello(data[:cut]) is None


def _first_message(listener: socket.socket) -> tuple[Hello | None, bytes]:
    listener.settimeout(60)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        data, hello = b"", None
        while hello is None:
            piece = connection.recv(65536)
            assert piece, "the client sent no hello"
            data += piece
            hello = client_hello(data)
    return hello, data
