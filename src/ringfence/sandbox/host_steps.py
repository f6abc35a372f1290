"""Steps of a template over the host's files: each runs in a sandbox, whose changes are a layer.

What packages run can write to the sandbox's own memory only. It leaves as a tar stream of bounded
length, which the confined unpacker of images reads.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import textwrap
from urllib.parse import urlsplit

from ..backends.local.mounts import template
from ..environments.apply import COPIES, FONTS, VENV
from ..errors import ExecError, InvalidRequest, StorageFull, Unsupported
from ..images import config
from ..model.base import checks
from ..model.limits import Limits
from ..model.mount import READ_WRITE, Mount, check_target
from .sync import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ..images.store import ImageStore
    from ..model.calls import Mounts, StrPath
    from ..model.execs.exec import ExecResult
    from ..model.image import Image

    OnOutput = Callable[[bytes], None]

_PARENT, _CACHE, LINKS = "/mnt/parent", "/mnt/pip-cache", "/mnt/find-links"
_INDEX = "https://pypi.org/simple"
_GIB = 1 << 30
_LIMITS = Limits(memory_bytes=8 * _GIB, disk_bytes=4 * _GIB, inodes=400_000)
_MOST_CACHE = 5 * _GIB
_SHOWN = 400  # characters of a failed step's output
_FONTS_S = 120.0
_FONT_LIST = re.compile(r"fontlist-[\w.+-]{1,40}\.json")
_MOST_FONTS = 16 << 20
_ENV = {"VIRTUAL_ENV": VENV, "PATH": f"{template.HOME}/.local/bin:{VENV}/bin:{template.PATH}"}
_BEGIN = f"""set -e
if [ -d {_PARENT} ]; then cp -a {_PARENT}/. {VENV}/; else python3 -m venv {VENV}; fi
"""
# The system's packages, and those that `pip install` puts into the home directory of a sandbox, are
# visible in sandboxes; a build sees neither, so that a layer is complete.
_CLOSED = f"sed -i 's/^\\(include-system-site-packages = \\).*/\\1false/' {VENV}/pyvenv.cfg\n"
_OPEN = _CLOSED.replace("false", "true")
_EXPORT = f"""
import os, sys, tarfile
new, old = {VENV!r}, {_PARENT!r}
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
def same(a, b):
    return os.path.lexists(b) and (lambda x, y: (x.st_mode, x.st_size, x.st_mtime_ns) == (
        y.st_mode, y.st_size, y.st_mtime_ns))(os.lstat(a), os.lstat(b))
out.add(new, new, recursive=False)
for here, directories, files in os.walk(new):
    there = old + here[len(new):]
    for name in directories + files:
        path = here + "/" + name
        if os.path.isdir(path) and not os.path.islink(path) or not same(path, there + "/" + name):
            out.add(path, path, recursive=False)
    if os.path.isdir(there):
        for name in set(os.listdir(there)) - set(directories + files):
            out.addfile(tarfile.TarInfo(here + "/.wh." + name))
out.close()
"""


def base() -> bytes:
    """Return the configuration of an empty template; it differs where the host's Python does.

    Raises:
        Unsupported: The host has no Python that a sandbox can see.
    """
    python = shutil.which("python3", path=template.PATH)
    if python is None:
        raise Unsupported(
            "a template over the host's files needs /usr/bin/python3",
            operation="template",
            hint="install python3 and python3-venv, or begin with Template.from_image(...)",
        )
    told = {
        "architecture": config.architecture(),
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in _ENV.items()],
            "Labels": {"ringfence.python": os.path.realpath(python)},
        },
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return json.dumps(told, sort_keys=True).encode()


def pip_key(
    requirements: Sequence[str], index_url: str | None, find_links: str | None
) -> dict[str, Any]:
    """Return what identifies a pip step.

    Raises:
        InvalidRequest: A requirement is empty or an option of pip.
    """
    for i, each in enumerate(requirements):
        if not checks.text(each, f"pip_install[{i}]", empty=False).strip() or each.startswith("-"):
            raise InvalidRequest(
                f"{each!r} is not a requirement", field=f"pip_install[{i}]", hint="as pandas>=2"
            )
        if each.startswith(("./", "../", "/", "~")) or "+" in each.partition("://")[0]:
            what = f"{each!r} is no package of an index, and packages are built in no template"
            hint = "find_links=DIRECTORY takes its wheel from this machine"
            raise InvalidRequest(what, field=f"pip_install[{i}]", hint=hint)
        if each.endswith(_OF_FILES) and "@" not in each:
            hint = "name each package of the file, as pandas>=2"
            what = f"{each!r} is the name of a file, not of a package"
            raise InvalidRequest(what, field=f"pip_install[{i}]", hint=hint)
        if len(names := each.split()) > 1 and all(map(_PLAIN.fullmatch, names)):
            hint = f"give each alone: {names[0]}, then {names[1]}"
            what = f"{each!r} is several packages"
            raise InvalidRequest(what, field=f"pip_install[{i}]", hint=hint)
    if not requirements:
        raise InvalidRequest("no requirement given", field="pip_install", hint="as pandas>=2")
    if index_url is not None and find_links is not None:
        raise InvalidRequest("give an index or a directory, not both", field="find_links")
    if index_url is not None:
        url = urlsplit(checks.text(index_url, "index_url"))
        if url.scheme not in ("http", "https") or not url.hostname:
            hint = "as https://pypi.org/simple"
            raise InvalidRequest(f"{index_url!r} is not a URL", field="index_url", hint=hint)
    index = None if find_links else index_url or os.environ.get("PIP_INDEX_URL") or _INDEX
    return {
        "pip": list(requirements),
        "index": index,
        "find_links": find_links,
        "given_index": index_url,
    }


def pip_argv(key: Mapping[str, Any], python: str) -> list[str]:
    """Return the command line of a pip step. Wheels only: building a package would run its code."""
    source = ["--no-index", "--find-links", LINKS]
    if key["index"]:
        source = ["--index-url", key["index"]]
    options = ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    return [python, "-m", "pip", "install", *options, *source, *key["pip"]]


def pip_network(key: Mapping[str, Any]) -> list[str] | str:
    """Return the hosts that a pip step may reach."""
    if not key["index"]:
        return "none"
    host = urlsplit(key["index"]).hostname or ""
    return [host, "files.pythonhosted.org"] if host == "pypi.org" else [host]


def run_step(
    key: Mapping[str, Any],
    options: Mapping[str, Any],
    parent: Image,
    store: ImageStore,
    on_output: OnOutput | None,
    path: str,
) -> None:
    """Run a pip or run step on top of `parent`, and write its changes to the tar file `path`.

    Raises:
        ExecError: The step failed.
        StorageFull: The result is larger than the limits of a build.
    """
    options = {**options}
    timeout_s = options.pop("timeout_s", None)
    root = os.path.realpath(store.root(parent))
    before = root + VENV
    mounts = [
        Mount(target, root + target) for target in json.loads(parent.labels.get(COPIES, "[]"))
    ]
    if os.path.isdir(root + FONTS):
        mounts.append(Mount(FONTS, "", READ_WRITE, protect=()))
    is_first = not os.path.isdir(before)
    mounts += [] if is_first else [Mount(_PARENT, before)]
    if "run" in key:
        argv, prepare, finish = list(key["run"]), _OPEN, ""
    else:
        argv, prepare, finish = pip_argv(key, f"{VENV}/bin/python"), _CLOSED, _OPEN
        if key["find_links"]:
            mounts.append(Mount(LINKS, os.path.abspath(key["find_links"])))
        if is_first:
            # Nothing but the host's pip runs in this sandbox, so nothing else writes to the cache.
            # Later steps start a Python that reads .pth files of packages.
            mounts.append(Mount(_CACHE, _cache_of(store), "rw", protect=()))
            argv[4:4] = ["--cache-dir", _CACHE]
        else:
            argv[4:4] = ["--no-cache-dir"]
    options = {"limits": _LIMITS, **options}
    options["mounts"] = [*listed(options.get("mounts")), *mounts]
    options["env"] = {**parent.env, **(options.get("env") or {})}
    with Sandbox.create(workdir=VENV, **options) as sandbox:
        plain = {"PATH": template.PATH}
        _do(sandbox, ["sh", "-c", _BEGIN + prepare], on_output, None, env=plain)
        name = "" if "run" in key else f"pip install {shlex.join(key['pip'])}"
        _do(sandbox, argv, on_output, timeout_s, name)
        _do(sandbox, ["sh", "-c", f"set -e\n{finish}"], on_output, None, env=plain)
        _export(sandbox, path, (sandbox.spec.limits.disk_bytes or _GIB) * 2)


def listed(mounts: Mounts | None) -> list[Mount | str]:
    """Return the mounts that `Sandbox.create` takes as a list."""
    return [mounts] if isinstance(mounts, str | Mount) else [*(mounts or ())]


def _do(
    sandbox: Sandbox,
    argv: Sequence[str],
    on_output: OnOutput | None,
    timeout_s: float | None,
    name: str = "",
    **more: Any,
) -> None:
    result = sandbox.exec(
        argv, timeout_s=timeout_s, on_stdout=on_output, on_stderr=on_output, **more
    )
    if not result.ok:
        raise failed(name or argv, result, is_shown=on_output is not None)


_OF_FILES = (
    ".txt",
    ".toml",
    ".lock",
    ".whl",
    ".tar.gz",
)  # packages are called discord.py, ruamel.yaml
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNREACHABLE = re.compile(r"WARNING: Retrying|not a trusted or secure host")


def failed(command: str | Sequence[StrPath], result: ExecResult, *, is_shown: bool) -> ExecError:
    """Return the error of a step: the command and, unless `on_output` got it, the end of its output."""
    line = command if isinstance(command, str) else shlex.join(os.fspath(each) for each in command)
    how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
    said = (result.stderr_text.strip() or result.stdout_text.strip())[-_SHOWN:]
    what = f"step `{textwrap.shorten(line, _SHOWN // 2, placeholder=' ...')}` {how}"
    if not said:
        what += ", and printed nothing"
    elif not is_shown:
        what += f": {said}"
    hint = "change the step and build again"
    if "No matching distribution" in said:
        hint = (
            "check index_url, which did not answer"
            if _UNREACHABLE.search(result.stderr_text)
            else "check its name and version; the index may have its source only: wheels are"
            " installed, and run('pip install NAME', network=HOSTS) builds one"
        )
    return ExecError(what, hint=f"the template was not saved; {hint}")


def _export(sandbox: Sandbox, path: str, most_bytes: int) -> None:
    with open(path, "wb") as file:

        def write(data: bytes) -> None:
            # A sparse file is as long in the stream as it says.
            if file.tell() + len(data) > most_bytes:
                raise StorageFull(f"the template is larger than {most_bytes} bytes")
            file.write(data)

        # -I -S: no package of the environment runs here.
        argv = ["/usr/bin/env", f"PATH={template.PATH}", "python3", "-I", "-S", "-c", _EXPORT]
        result = sandbox.exec(argv, on_stdout=write, max_output_bytes=_SHOWN)
    if not result.ok:
        raise ExecError(f"reading the template failed: {result.stderr_text[-_SHOWN:]}")


def _cache_of(store: ImageStore) -> str:
    """Return the directory of pip's downloads of this owner, emptied where it has grown large."""
    path = os.path.join(store.directory, "pip")
    os.makedirs(path, mode=0o700, exist_ok=True)
    size = sum(
        os.lstat(os.path.join(here, name)).st_size
        for here, _, names in os.walk(path)
        for name in names
    )
    if size > _MOST_CACHE:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def copy_step(source: str, target: str, parent: Image, path: str) -> dict[str, Any]:
    """Write the files at `source` to the tar file `path`; return the changed label of the template.

    Raises:
        InvalidRequest: The target cannot be a mount, or overlaps with another part of the template.
    """
    target = check_target(target, "target")
    copies = json.loads(parent.labels.get(COPIES, "[]"))
    for other in (VENV, *copies):
        if f"{target}/".startswith(f"{other}/") or f"{other}/".startswith(f"{target}/"):
            raise InvalidRequest(
                f"{target} overlaps with {other} of the template",
                field="target",
                hint="copy everything to one directory first, or choose another target",
            )
    with tarfile.open(path, "w") as tar:
        tar.add(os.path.realpath(source), target)
    return {"Labels": {**parent.labels, COPIES: json.dumps([*copies, target])}}


def fonts_step(
    parent: Image, store: ImageStore, on_output: OnOutput | None, path: str
) -> dict[str, Any] | None:
    """Write matplotlib's list of fonts to the tar file `path`; return the changed variables.

    Its first import in each sandbox would make that list, in 0.1 to 3 seconds. None: there is no
    matplotlib, or it made none. This sandbox has no downloads of pip: the package's code runs.
    """
    venv = os.path.realpath(store.root(parent)) + VENV
    if not glob.glob(f"{venv}/lib/python3*/site-packages/matplotlib/font_manager.py"):
        return None
    env = {**parent.env, "MPLCONFIGDIR": FONTS}
    mounts = [Mount(VENV, venv), Mount(FONTS, "", READ_WRITE, protect=())]
    with Sandbox.create(mounts=mounts, env=env, limits=_LIMITS) as sandbox:
        argv = [f"{VENV}/bin/python", "-c", "import matplotlib.font_manager"]
        sandbox.exec(argv, timeout_s=_FONTS_S, on_stdout=on_output, on_stderr=on_output)
        found = [each for each in sandbox.files.list(FONTS) if _FONT_LIST.fullmatch(each.name)]
        if len(found) != 1 or found[0].kind != "file" or found[0].size_bytes > _MOST_FONTS:
            return None
        name = f"{FONTS}/{found[0].name}"
        content = sandbox.files.read(name, max_bytes=_MOST_FONTS)
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return {"Env": {"MPLCONFIGDIR": FONTS}}


def digest_of_file(path: str) -> str:
    """Return the `sha256:` digest of a layer's file."""
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
