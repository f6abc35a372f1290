"""Templates: each step runs in a sandbox, and its changes are kept as a layer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack, overload, runtime_checkable

from ..environments.apply import store_of
from ..errors import FileNotFound, InvalidRequest, Unsupported
from ..images.reference import Reference
from ..images.store import ImageStore
from ..images.unpack import Layer
from ..model.base import checks
from ..model.base.helpful import helpful
from ..model.calls import make_spec
from ..model.image import Image
from . import host_steps, remote, remote_steps
from .sync import Sandbox

if TYPE_CHECKING:
    from ..client import Client
    from ..model.calls import StrPath
    from ..model.parts import SandboxParts
    from ..model.template import TemplateView

_PIECE = 1 << 20
_OF_NO_EFFECT = ("limits", "timeout_s", "ttl_s", "id", "labels", "backend", "server", "tier")

OnOutput = Callable[[bytes], None]


@runtime_checkable
class _SavesLayers(Protocol):
    def save_layer(self, path: str) -> None: ...


@dataclass(frozen=True)
class _Step:
    """A build step; its result depends only on `key`, `options` and the image that it starts from."""

    key: Mapping[str, Any]
    act: Callable[[Sandbox, OnOutput | None], None]
    options: Mapping[str, Any] = field(default_factory=dict)


@helpful
@dataclass(frozen=True)
class Template:
    """Steps on top of the host's files or an image. Each method returns a new template.

    Nothing happens before `build`. A finished step is cached, by what it starts from, its arguments and options
    (but limits and the values of secrets) and, for a copy, every name, mode and byte copied.

    Over the host's files a template has Python packages and what `run` writes, both in the virtual
    environment /opt/venv, and copies; all of it is read-only in sandboxes.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *parts: object, **options: object) -> Template:
            if not parts and not options:
                what = (
                    "Template() is not a constructor: use Template.from_host() or from_image(NAME)"
                )
                raise TypeError(what)
            return object.__new__(cls)

    image: str = ""
    _plan: tuple[_Step | Mapping[str, Any], ...] = ()

    @classmethod
    def from_image(cls, image: str) -> Template:
        """Start from an image that is on this machine when it is built."""
        return cls(checks.text(image, "image", empty=False))

    @classmethod
    def from_host(cls) -> Template:
        """Start from the host's programs, as a sandbox without an image has them."""
        return cls("")

    def pip_install(
        self,
        *requirements: str,
        index_url: str | None = None,
        find_links: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SandboxParts],
    ) -> Template:
        """Install Python packages from wheels, in a sandbox that reaches the index alone.

        Packages without a wheel are refused, because building one runs its code; use `run` for them.

        Args:
            requirements: As pip takes them, such as `pandas` or `numpy<3`.
            index_url: Package index; default: the variable PIP_INDEX_URL, else PyPI.
            find_links: Directory of wheels on this machine, in place of an index.
            options: As of `Sandbox.create`; `network` replaces the hosts that the index needs.

        Raises:
            InvalidRequest: A requirement is empty or an option of pip.
        """
        if find_links is not None:
            find_links = os.path.abspath(find_links)
        key = host_steps.pip_key(requirements, index_url, find_links)
        network: SandboxParts = {"network": host_steps.pip_network(key)}
        options = {**network, **options}
        if not self.image:
            more = {} if timeout_s is None else {"timeout_s": timeout_s}
            whole = self._with(_Step(key, _no_act, {**options, **more}))
            return whole._with(_Step({"fonts": True}, _no_act))
        if find_links is not None:
            mounts = [*host_steps.listed(options.get("mounts")), f"{find_links}:{host_steps.LINKS}"]
            options = {**options, "mounts": mounts}
        return self.run(host_steps.pip_argv(key, "python3"), timeout_s=timeout_s, **options)

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
        if isinstance(command, str):
            command = checks.text(command, "command", empty=False)
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)

        def act(sandbox: Sandbox, on_output: OnOutput | None) -> None:
            result = sandbox.exec(
                argv, timeout_s=timeout_s, on_stdout=on_output, on_stderr=on_output
            )
            if not result.ok:
                raise host_steps.failed(command, result, is_shown=on_output is not None)

        whole: dict[str, Any] = {"network": "none", **options}
        if timeout_s is not None:
            whole["timeout_s"] = timeout_s
        return self._with(_Step({"run": argv}, act, whole))

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
        self._needs_image("workdir")
        return self._with({"WorkingDir": checks.absolute_path(path, "workdir")})

    def user(self, name: str) -> Template:
        """Set the user of later steps and of sandboxes made from the result."""
        self._needs_image("user")
        return self._with({"User": checks.user(name, "user")})

    def command(self, *argv: str) -> Template:
        """Set the command that runs where an exec names none."""
        self._needs_image("command")
        return self._with({"Entrypoint": [], "Cmd": list(argv)})

    @overload
    def build(
        self,
        name: str | None = None,
        *,
        store: ImageStore | None = None,
        on_output: OnOutput | None = None,
        server: None = None,
    ) -> Image: ...

    @overload
    def build(
        self, name: str, *, on_output: OnOutput | None = None, server: str | Client
    ) -> TemplateView: ...

    def build(
        self,
        name: str | None = None,
        *,
        store: ImageStore | None = None,
        on_output: OnOutput | None = None,
        server: str | Client | None = None,
    ) -> Image | TemplateView:
        """Do what is not known yet, and call the result `name`.

        Args:
            name: With an image as base, a name for `Sandbox.create(image=...)`; over the host's files,
                for `template=...`. None gives none: use the `id` of the result.
            on_output: Gets what the steps say.
            server: Address of a server, or its client, that builds it: there, whatever a step writes in
                the sandbox's own files is kept, and the name is this client's for `template=...`.

        Returns:
            The image; of a server its `TemplateView`.

        Raises:
            ImageNotFound: What it starts from is not on this machine.
            ExecError: A step failed; what steps before it made is kept for the next time. The message
                has the end of its output, unless `on_output` got it.
        """
        if server is not None:
            with remote.opened(server) as client:
                return remote_steps.build(self, checks.name(name, "name"), client, on_output)
        if name is not None and self.image:
            Reference.parse(checks.text(name, "name", empty=False))
        elif name is not None and checks.name(name, "name") == "default":
            raise InvalidRequest(
                "'default' means no template", field="name", hint="choose another name"
            )
        store = store or (ImageStore() if self.image else store_of())
        image = store.find(self.image) if self.image else store.scratch(host_steps.base())
        changes = dict[str, Any]()
        for step in self._plan:
            if not isinstance(step, _Step):
                changes = _merged(changes, step)
                continue
            key = _key(image, changes, step)
            with store.building(key) as path:
                done = store.step(key)
                if done is None:
                    start = store.derive(image, changes, []) if changes else image
                    done = _do(step, start, store, on_output, path, is_image=bool(self.image))
                    store.remember_step(key, done)
            image, changes = done, {}
        if changes:
            image = store.derive(image, changes, [], whole=not self.image)
        if name is None:
            store.remember_step(image.id, image)
            return image
        return store.name(image, name)

    def _needs_image(self, what: str) -> None:
        if not self.image:
            raise InvalidRequest(
                f"{what} is a property of images",
                field=what,
                hint=f"give {what} to Sandbox.create, or begin with Template.from_image(...)",
            )

    def _with(self, step: _Step | Mapping[str, Any]) -> Template:
        return replace(self, _plan=(*self._plan, step))


def _merged(changes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**changes, **more}
    if "Env" in changes and "Env" in more:
        merged["Env"] = {**changes["Env"], **more["Env"]}
    return merged


def _key(image: Image, changes: Mapping[str, Any], step: _Step) -> str:
    told: list[Any] = [image.id, changes, step.key, _seen(step.options)]
    if source := step.key.get("copy") or step.key.get("find_links"):
        told.append(_digest_of(source))
    text = json.dumps(told, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _seen(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options let a step see: its network, mounts, user, variables and so on."""
    parts = {name: value for name, value in options.items() if name not in _OF_NO_EFFECT}
    mounts, network = parts.pop("mounts", None) or (), parts.pop("network", None) or "none"
    return make_spec(None, mounts, network, None, parts).to_json()


def _no_act(_sandbox: Sandbox, _on_output: OnOutput | None) -> None:
    """Stand for a step that `host_steps` runs."""


def _do(
    step: _Step,
    start: Image,
    store: ImageStore,
    on_output: OnOutput | None,
    path: str,
    *,
    is_image: bool,
) -> Image:
    """Run a step in a sandbox of its own; its changes are a layer of the new image."""
    store.remember_step(start.id, start)
    changes: Mapping[str, Any] = {}
    with closing(os.fdopen(store.hold(start))):
        if is_image:
            _save_layer(step, start, on_output, path)
        elif "copy" in step.key:
            changes = host_steps.copy_step(step.key["copy"], step.key["to"], start, path)
        elif "fonts" in step.key:
            fonts = host_steps.fonts_step(start, store, on_output, path)
            if fonts is None:
                return start
            changes = fonts
        else:
            host_steps.run_step(step.key, step.options, start, store, on_output, path)
        layer = Layer(path, host_steps.digest_of_file(path))
        return store.derive(start, changes, [layer], whole=not is_image)


def _save_layer(step: _Step, start: Image, on_output: OnOutput | None, path: str) -> None:
    options = {name: value for name, value in step.options.items() if name != "timeout_s"}
    with Sandbox.create(image=start.id, **options) as sandbox:
        step.act(sandbox, on_output)
        inner = sandbox._inner
        if not isinstance(inner, _SavesLayers):
            raise Unsupported(backend=sandbox.session.backend, operation="template")
        inner.save_layer(path)


def _digest_of(path: str) -> str:
    """Of every name, mode and byte at and below `path`.

    Raises:
        FileNotFound: There is nothing.
    """
    if not os.path.lexists(path):
        hint = "give a path on this host; a relative path starts at the current directory"
        what = f"{path}: no such file or directory on this host"
        raise FileNotFound(what, path=path, hint=hint)
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
