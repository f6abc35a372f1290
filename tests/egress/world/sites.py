"""The sites that programs want: a package index for pip, one for npm, git repositories."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from urllib.parse import unquote

from .http import Answer, Request, Site

WHEEL = "lab_wheel-1.0-py3-none-any.whl"
PACKAGE = "lab-package"
REPOSITORY = "lab.git"
_HTML = "text/html"


def python_index() -> Site:
    """`/simple/lab-wheel/` and its one wheel, whose module says `VALUE = "from the index"`."""
    wheel = _wheel()
    digest = hashlib.sha256(wheel).hexdigest()

    async def site(request: Request) -> Answer:
        if request.path == "/simple/lab-wheel/":
            link = f'<a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a>'
            return Answer(
                body=f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), kind=_HTML
            )
        if request.path == f"/files/{WHEEL}":
            return Answer(body=wheel, kind="application/octet-stream")
        return Answer(404)

    return site


def _wheel() -> bytes:
    files = {
        "lab_wheel.py": 'VALUE = "from the index"\n',
        "lab_wheel-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lab-wheel\nVersion: 1.0\n",
        "lab_wheel-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: world\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, "lab_wheel-1.0.dist-info/RECORD"])
    files["lab_wheel-1.0.dist-info/RECORD"] = record
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def npm_registry() -> Site:
    """One package, whose module is the string "from the registry"."""
    tarball = _tarball()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    file = f"{PACKAGE}-1.0.0.tgz"

    async def site(request: Request) -> Answer:
        path = unquote(request.path)
        if path == f"/{PACKAGE}":
            scheme = "https" if request.facts["tls"] else "http"
            url = f"{scheme}://{request.header('host')}/{PACKAGE}/-/{file}"
            version = {
                "name": PACKAGE,
                "version": "1.0.0",
                "main": "index.js",
                "dist": {
                    "tarball": url,
                    "integrity": integrity,
                    "shasum": hashlib.sha1(tarball).hexdigest(),
                },
            }
            document = {
                "name": PACKAGE,
                "dist-tags": {"latest": "1.0.0"},
                "versions": {"1.0.0": version},
            }
            return Answer(body=json.dumps(document).encode())
        if path == f"/{PACKAGE}/-/{file}":
            return Answer(body=tarball, kind="application/octet-stream")
        return Answer(404, b'{"error":"not found"}')

    return site


def _tarball() -> bytes:
    files = {
        "package/package.json": json.dumps(
            {"name": PACKAGE, "version": "1.0.0", "main": "index.js"}
        ),
        "package/index.js": 'module.exports = "from the registry";\n',
    }
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def make_repository(root: Path) -> None:
    """A bare repository of one commit with one file, `README`: "from the repository"."""
    bare, work = root / REPOSITORY, root / "work"
    bare.mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_NAME": "world" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "world@a.test" for who in ("AUTHOR", "COMMITTER")},
    }

    def git(*words: str, where: Path) -> None:
        command = ["git", "-c", "safe.directory=*", *words]
        subprocess.run(command, cwd=where, env=environment, check=True, capture_output=True)

    git("init", "-q", "--bare", "-b", "main", ".", where=bare)
    work.mkdir()
    git("init", "-q", "-b", "main", ".", where=work)
    (work / "README").write_text("from the repository\n")
    git("add", "README", where=work)
    git("commit", "-q", "-m", "one", where=work)
    git("push", "-q", str(bare), "main", where=work)
    git("config", "http.receivepack", "true", where=bare)
    git("update-server-info", where=bare)


def repositories(root: Path) -> Site:
    """`git http-backend` over what `make_repository` made; pushes are taken."""
    program = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True)
    backend = f"{program.stdout.strip()}/git-http-backend"

    async def site(request: Request) -> Answer:
        path, _, query = request.target.partition("?")
        process = await asyncio.create_subprocess_exec(
            backend,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(root),
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "REQUEST_METHOD": request.method,
                "PATH_INFO": unquote(path),
                "QUERY_STRING": query,
                "CONTENT_TYPE": request.header("content-type"),
                "CONTENT_LENGTH": str(len(request.body)),
                "HTTP_CONTENT_ENCODING": request.header("content-encoding"),
                "HTTP_GIT_PROTOCOL": request.header("git-protocol"),
                "GIT_PROTOCOL": request.header("git-protocol"),
                "REMOTE_ADDR": request.facts["peer"],
                "REMOTE_USER": "world",
            },
        )
        output, _ = await process.communicate(request.body)
        head, _, body = output.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n") if line)
        status = int(fields.pop("Status", "200 OK").split()[0])
        return Answer(status, body, fields.pop("Content-Type", "text/plain"), fields)

    return site
