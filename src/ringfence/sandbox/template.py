"""Images built from images: each step runs in a sandbox, and its changes are kept as a layer."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack, runtime_checkable

from ..errors import ExecError, FileNotFound, Unsupported
from ..images.store import ImageStore
from ..images.unpack import Layer
from ..model.base import checks
from ..model.image import Image
from .sync import Sandbox

if TYPE_CHECKING:
    from ..model.calls import StrPath
    from ..model.parts import SandboxParts

_PIECE = 1 << 20
_SHOWN = 2000  # characters of a failed step's output

OnOutput = Callable[[bytes], None]


@runtime_checkable
class _SavesLayers(Protocol):
    def save_layer(self, path: str) -> None: ...


@dataclass(frozen=True)
class _Step:
    """A build step; its result depends only on `key` and on the image that it starts from."""

    key: Mapping[str, Any]
    act: Callable[[Sandbox, OnOutput | None], None]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """Steps on top of an image. Each method returns a new template; nothing happens before `build`.

    A finished step is cached, by its starting image, its arguments and, for a copy, every name,
    mode and byte copied.
    """

    image: str
    _plan: tuple[_Step | Mapping[str, Any], ...] = ()

    @classmethod
    def from_image(cls, image: str) -> Template:
        """Start from an image that is on this machine when it is built."""
        return cls(checks.text(image, "image", empty=False))

    def run(
        self,
        command: str | Sequence[StrPath],
        *,
        timeout_s: float | None = None,
        **options: Unpack[SandboxParts],
    ) -> Template:
        """Run a command, or a script for `sh`; it must exit with 0.

        Args:
            options: As of `Sandbox.create`, such as `network`, `limits` or `secrets`.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)

        def act(sandbox: Sandbox, on_output: OnOutput | None) -> None:
            result = sandbox.exec(
                argv, timeout_s=timeout_s, on_stdout=on_output, on_stderr=on_output
            )
            if not result.ok:
                said = (result.stdout_text + result.stderr_text)[-_SHOWN:]
                how = "took too long" if result.timed_out else f"ended with {result.exit_code}"
                raise ExecError(f"step {argv!r} {how}: {said}", hint="the template was not saved")

        return self._with(_Step({"run": argv}, act, {"network": "none", **options}))

    def copy(self, source: str, target: str) -> Template:
        """Copy a file or directory of this machine to `target`, absolute inside.

        With a slash at its end `target` is the directory that it comes into.
        """
        source = os.path.abspath(source)
        if str(target).endswith("/"):
            target = os.path.join(target, os.path.basename(source))
        target = checks.absolute_path(target, "target")

        def act(sandbox: Sandbox, _on_output: OnOutput | None) -> None:
            sandbox.files.upload(source, target)

        # It is where the sandbox starts, so it is made, even directly below the root.
        place = {"workdir": os.path.dirname(target)}
        return self._with(_Step({"copy": source, "to": target}, act, place))

    def env(self, variables: Mapping[str, str]) -> Template:
        """Add to the environment of every later step, and of sandboxes made from the result."""
        return self._with({"Env": dict(checks.env_map(variables, "env"))})

    def workdir(self, path: str) -> Template:
        """Where later steps, and commands of sandboxes made from the result, start."""
        return self._with({"WorkingDir": checks.absolute_path(path, "workdir")})

    def user(self, name: str) -> Template:
        """Set the user of later steps and of sandboxes made from the result."""
        return self._with({"User": checks.user(name, "user")})

    def command(self, *argv: str) -> Template:
        """Set the command that runs where an exec names none."""
        return self._with({"Entrypoint": [], "Cmd": list(argv)})

    def build(
        self, name: str, *, store: ImageStore | None = None, on_output: OnOutput | None = None
    ) -> Image:
        """Do what is not known yet, and call the result `name`.

        Args:
            on_output: Gets what the steps say.

        Raises:
            ImageNotFound: What it starts from is not on this machine.
            ExecError: A step failed; what steps before it made is kept for the next time.
        """
        store = store or ImageStore()
        image, changes = store.find(self.image), dict[str, Any]()
        for step in self._plan:
            if not isinstance(step, _Step):
                changes = _merged(changes, step)
                continue
            key = _key(image, changes, step)
            done = store.step(key)
            if done is None:
                done = _do(step, image, changes, store, on_output)
                store.remember_step(key, done)
            image, changes = done, {}
        if changes:
            image = store.derive(image, changes, [])
        return store.name(image, name)

    def _with(self, step: _Step | Mapping[str, Any]) -> Template:
        return replace(self, _plan=(*self._plan, step))


def _merged(changes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**changes, **more}
    if "Env" in changes and "Env" in more:
        merged["Env"] = {**changes["Env"], **more["Env"]}
    return merged


def _key(image: Image, changes: Mapping[str, Any], step: _Step) -> str:
    told: list[Any] = [image.id, changes, step.key]
    if "copy" in step.key:
        told.append(_digest_of(step.key["copy"]))
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _do(
    step: _Step,
    image: Image,
    changes: Mapping[str, Any],
    store: ImageStore,
    on_output: OnOutput | None,
) -> Image:
    """Run a step in a sandbox of its own; its changes are a layer of the new image."""
    start = store.derive(image, changes, []) if changes else image
    store.remember_step(start.id, start)
    with (
        tempfile.TemporaryDirectory(prefix="ringfence-template-") as scratch,
        Sandbox.create(image=start.id, **step.options) as sandbox,
    ):
        step.act(sandbox, on_output)
        inner = sandbox._inner
        if not isinstance(inner, _SavesLayers):
            raise Unsupported(backend=sandbox.session.backend, operation="template")
        path = os.path.join(scratch, "layer.tar")
        inner.save_layer(path)
        with open(path, "rb") as file:
            diff_id = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        return store.derive(start, {}, [Layer(path, diff_id)])


def _digest_of(path: str) -> str:
    """Of every name, mode and byte at and below `path`.

    Raises:
        FileNotFound: There is nothing.
    """
    if not os.path.lexists(path):
        raise FileNotFound(f"{path}: no such file or directory on this host", path=path)
    digest = hashlib.sha256()
    _add_to(digest, path, "")
    return digest.hexdigest()


def _add_to(digest: Any, path: str, name: str) -> None:
    info = os.lstat(path)
    digest.update(os.fsencode(f"{name}\0{info.st_mode}\0"))
    if os.path.islink(path):
        digest.update(os.fsencode(os.readlink(path)))
    elif os.path.isdir(path):
        for entry in sorted(os.listdir(path)):
            _add_to(digest, os.path.join(path, entry), f"{name}/{entry}")
    elif os.path.isfile(path):
        digest.update(b"%d\0" % info.st_size)
        with open(path, "rb") as file:
            while data := file.read(_PIECE):
                digest.update(data)
