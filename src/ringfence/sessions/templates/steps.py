"""Run the steps of a build in their sandboxes."""

from __future__ import annotations

import os
from dataclasses import replace
from urllib.parse import urlsplit

from ...backends.local.mounts import template
from ...errors import ExecError, InvalidRequest
from ...model.mount import Mount
from ...model.net.network import NetworkPolicy
from ...model.template import TemplateStep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...model.execs.exec import ExecResult
    from ...model.spec import SandboxSpec
    from ...model.template import TemplateRequest
    from ...sandbox.sync import Sandbox
    from .places import Log

PYPI = "https://pypi.org/simple"
READY_S = 60.0
_PIP_CACHE = "/mnt/pip-cache"
_SHOWN = 400  # characters of a failed step's output
FONTS = TemplateStep(
    run=("python3", "-c", "import matplotlib.font_manager"), network=NetworkPolicy(), timeout_s=120
)
"""The step after the last one where matplotlib is installed: each sandbox would list the fonts anew."""
_HAS_FONTS = """
[ -z "$MPLCONFIGDIR" ] && [ ! -e "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib" ] || exit 1
for place in "$HOME"/.local /usr/local /usr /opt/venv; do
  for package in "$place"/lib/python3*/*-packages/matplotlib/font_manager.py; do
    [ ! -e "$package" ] || exit 0
  done
done
exit 1
"""
_COPY = r"""
set -e
archive=$1 source=$2 target=$3 mode=$4 unpack=$5
case $target in /*) ;; *) target=$PWD/$target ;; esac
stage=$(mktemp -d /tmp/.copy.XXXXXX)
tar "$unpack" "$archive" -C "$stage" -o
rm -f "$archive"
put() {
  if [ -d "$1" ] && [ ! -L "$1" ]; then
    mkdir -p "$target"; cp -a "$1/." "$target/"
  elif [ -d "$target" ] || [ "${target%/}" != "$target" ]; then
    mkdir -p "$target"; cp -a "$1" "$target/"
  else
    mkdir -p "$(dirname "$target")"; cp -a "$1" "$target"
  fi
}
cd "$stage"
[ -z "$mode" ] || chmod -R "$mode" "./${source:-.}" 2>/dev/null || find . -type f -exec chmod "$mode" {} +
if [ -z "$source" ] || [ "$source" = . ]; then put "$stage"
elif [ -e "$source" ] || [ -L "$source" ]; then put "$source"
else
  case $target in */) ;; *) target=$target/ ;; esac
  IFS=
  mkdir -p "$target"
  set -- $source
  [ -e "$1" ] || [ -L "$1" ] || { echo "the upload has no $source" >&2; exit 1; }
  for each do
    [ ! -d "$each" ] || [ -L "$each" ] || put "$each"
  done
  # Files at once: two programs for each of thousands take seconds.
  for each do
    [ -d "$each" ] && [ ! -L "$each" ] || printf './%s\0' "$each"
  done | xargs -0 sh -c '[ $# = 0 ] || cp -a "$@" "$0"' "$target"
fi
cd /
chmod -R u+rwX "$stage" 2>/dev/null || true
rm -rf "$stage"
"""
# Not a child of the exec's shell: it goes on when that has ended.
_START = r"""
rm -f /tmp/.start.code
setsid sh -c 'sh -c "$1"; echo $? >/tmp/.start.code' start "$1" >/tmp/.start.log 2>&1 </dev/null &
"""
_CODE = "grep -vx 0 /tmp/.start.code 2>/dev/null"
_READY = f"""
until sh -c "$1"; do
  {_CODE} && exit 1
  sleep 0.1
done
! {_CODE}
"""


def spec_of(step: TemplateStep, spec: SandboxSpec, index: str, cache: str) -> SandboxSpec:
    """The spec of a step's sandbox.

    Args:
        cache: Directory of this owner's downloads; empty where other programs than the host's own
            pip may run in the sandbox, which could change them.
    """
    network = step.network or spec.network
    if step.pip_install:
        network = step.network or index_policy(step.index_url or index)
        if cache:
            mount = Mount(_PIP_CACHE, cache, "rw", protect=())
            return replace(spec, network=network, mounts=(*spec.mounts, mount))
    if step.copy:
        # Where a sandbox starts is made, and its user's, even directly below the root.
        target = os.path.join(spec.workdir or "/tmp", step.to)
        place = target.rstrip("/") if step.to.endswith("/") else os.path.dirname(target)
        if is_hidden(spec, place) or not (step.to.startswith("/") or spec.workdir):
            place = spec.workdir or ""  # the script makes it
        return replace(spec, network=NetworkPolicy(), workdir=place or None)
    return replace(spec, network=network)


def is_hidden(spec: SandboxSpec, place: str) -> bool:
    """Return whether a mount lies over a place, so that it cannot be made before a sandbox starts."""
    return any(f"{place}/".startswith(f"{each.target}/") for each in spec.mounts)


def environment(step: TemplateStep, spec: SandboxSpec) -> SandboxSpec:
    """The spec with the scripts of installed packages on PATH."""
    if not step.pip_install or spec.image is not None or "PATH" in spec.env:
        return spec
    home = spec.env.get("HOME", template.HOME)
    return replace(spec, env={**spec.env, "PATH": f"{home}/.local/bin:{template.PATH}"})


def index_policy(url: str) -> NetworkPolicy:
    """Return the policy that reaches a package index, and nothing else.

    Raises:
        InvalidRequest: That is no URL of an index.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not a URL", field="index_url", hint=f"as {PYPI}")
    host, port = parts.hostname, f":{parts.port}" if parts.port else ""
    more = ("files.pythonhosted.org",) if host == "pypi.org" else ()
    return NetworkPolicy(allowed_hosts=(f"[{host}]{port}" if ":" in host else host + port, *more))


def run(
    step: TemplateStep,
    sandbox: Sandbox,
    log: Log,
    left_s: float,
    *,
    cwd: str | None,
    index: str,
    upload: Callable[[str], str],
    has_cache: bool,
) -> None:
    """Do a step.

    Raises:
        ExecError: It failed.
    """
    timeout_s = min(left_s, step.timeout_s or left_s)
    argv, place = list(step.run), None
    if step.copy:
        archive = "/tmp/.copy.tar"
        given = upload(step.copy)
        sandbox.files.upload(given, archive)
        argv = ["sh", "-c", _COPY, "copy", archive, step.source, step.to, step.mode]
        argv.append(_unpack(given))
        place = None if step.to.startswith("/") else cwd
    elif step.pip_install:
        argv = ["python3", "-m", "pip", "install", "--only-binary", ":all:", "--no-input"]
        argv += [
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            "--root-user-action=ignore",
        ]
        argv += ["--cache-dir", _PIP_CACHE] if has_cache else ["--no-cache-dir"]
        argv += ["--index-url", step.index_url or index, *step.pip_install]
    result = sandbox.exec(
        argv,
        user=step.user or None,
        timeout_s=timeout_s,
        on_stdout=log.output(0),
        on_stderr=log.output(1),
        max_output_bytes=_SHOWN * 4,
        cwd=place,
    )
    log.end_lines()
    if not result.ok:
        raise failed(step, result, timeout_s)


def needs_fonts(sandbox: Sandbox) -> bool:
    """Return whether matplotlib is there, and was never imported. Runs no code of packages."""
    try:
        path = {"PATH": template.PATH}
        return sandbox.exec(["/bin/sh", "-c", _HAS_FONTS], env=path, timeout_s=10).ok
    except ExecError:
        return False  # no shell


def failed(step: TemplateStep, result: ExecResult, timeout_s: float) -> ExecError:
    """The error of a step: what it was and the end of what it printed."""
    how = f"ended with exit code {result.exit_code}"
    if result.timed_out:
        how = f"took longer than {timeout_s:g} s"
    elif result.signal:
        how = f"was killed by signal {result.signal}"
    said = (result.stderr_text.strip() or result.stdout_text.strip())[-_SHOWN:]
    hint = "the template was not changed; change the step and build again"
    if "apt-get" in step.title and "image" not in said:
        hint = (
            "the host's programs cannot be added to: apt-get needs an image as base, and root in it"
        )
    what = f"step `{step.title[: _SHOWN // 2]}` {how}"
    return ExecError(what + (f": {said}" if said else ", and printed nothing"), hint=hint)


def _unpack(path: str) -> str:
    """Options of tar for an archive: some builds of busybox do not see for themselves that it is packed."""
    with open(path, "rb") as file:
        return "-xzf" if file.read(2) == b"\x1f\x8b" else "-xf"


def start(sandbox: Sandbox, request: TemplateRequest, timeout_s: float) -> None:
    """Start what a template starts in each sandbox, and wait until it is ready.

    Raises:
        ExecError: It is not ready in time, or failed before it was.
    """
    env = {} if request.keep_env else request.variables
    if request.start:
        argv = ["sh", "-c", _START, "start", request.start]
        sandbox.exec(argv, env=env, timeout_s=timeout_s)
    if not request.ready:
        return
    result = sandbox.exec(
        ["sh", "-c", _READY, "ready", request.ready],
        env=env,
        timeout_s=timeout_s,
        max_output_bytes=_SHOWN,
    )
    if not result.ok:
        said = sandbox.exec(["tail", "-c", str(_SHOWN), "/tmp/.start.log"]).stdout_text.strip()
        what = f"the start command was not ready within {timeout_s:g} s"
        if code := sandbox.exec(["sh", "-c", _CODE]).stdout_text.strip():
            what = f"the start command ended with exit code {code} before it was ready"
        raise ExecError(f"{what}; it printed: {said}" if said else what)
