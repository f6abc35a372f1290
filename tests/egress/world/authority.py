"""A certificate authority of the world's own, made with the `openssl` program."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from . import places

BUNDLE = "/etc/ssl/certs"
"""Where Debian and most others keep what they trust; bound over inside the world."""


def make(where: Path) -> None:
    """Write `ca.pem`, `server.pem`, `untrusted.pem`, `wrongname.pem` (each with its key), `certs/`.

    `certs/` is the host's own directory of trusted certificates, with the world's authority added.
    """
    _root(where / "ca.pem", "World")
    names = [name for name in places.ZONE if name != "wrongname.test"] + ["filed.test"]
    names += ["*.a.test", "*.deep.wild.test"]
    addresses = [places.WEB_V4, places.WEB_V6, places.METADATA_V4, "127.0.0.1", "::1"]
    _leaf(where / "server.pem", where / "ca.pem", names, addresses)
    _leaf(where / "wrongname.pem", where / "ca.pem", ["elsewhere.test"], [])
    _root(where / "untrusted.pem", "Nobody", names=["untrusted.test"])
    _trust(where / "ca.pem", where / "certs")


def _openssl(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["openssl", *words], input=stdin, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, f"openssl {words[0]}: {done.stderr}"
    return done.stdout


def _root(at: Path, common_name: str, names: list[str] | None = None) -> None:
    """A self-signed certificate and its key in one file."""
    extra = ["-addext", f"subjectAltName={','.join(f'DNS:{n}' for n in names)}"] if names else []
    certificate = _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "30", "-subj", f"/CN={common_name}", "-keyout", f"{at}.key", *extra),
    )
    _join(at, certificate)


def _leaf(at: Path, authority: Path, names: list[str], addresses: list[str]) -> None:
    request = _openssl(
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=server", "-keyout", f"{at}.key"),
    )
    alternatives = [f"DNS:{name}" for name in names] + [f"IP:{each}" for each in addresses]
    extensions = at.with_suffix(".ext")
    extensions.write_text(
        "basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n"
        f"subjectAltName={','.join(alternatives)}\n"
    )
    certificate = _openssl(
        *("x509", "-req", "-days", "30", "-CA", str(authority), "-CAkey", str(authority)),
        *("-CAcreateserial", "-extfile", str(extensions)),
        stdin=request,
    )
    extensions.unlink()
    _join(at, certificate)


def _join(at: Path, certificate: str) -> None:
    key = Path(f"{at}.key")
    at.write_text(certificate + key.read_text())
    key.unlink()


def _trust(authority: Path, directory: Path) -> None:
    """A copy of the host's trusted certificates that also holds `authority`."""
    directory.mkdir()
    for entry in os.scandir(BUNDLE) if os.path.isdir(BUNDLE) else ():
        if entry.is_file():  # links followed: what they lead to may be hidden inside
            shutil.copyfile(entry.path, directory / entry.name)
    if os.path.isdir(f"{BUNDLE}/java"):  # without it a JVM trusts nobody, and says so oddly
        shutil.copytree(f"{BUNDLE}/java", directory / "java")
    certificate = _openssl("x509", "-in", str(authority))
    bundle = directory / "ca-certificates.crt"
    with bundle.open("a", encoding="ascii") as file:
        file.write(certificate)
    # What looks certificates up by the hash of their subject finds it too.
    name = _openssl("x509", "-in", str(authority), "-noout", "-subject_hash").strip()
    (directory / f"{name}.0").write_text(certificate)
    (directory / "world-ca.pem").write_text(certificate)
    directory.chmod(0o755)
