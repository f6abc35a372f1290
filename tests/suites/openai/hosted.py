"""A client of ours with workspaces on this host, where OpenAI Agents' own tests look for them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agents.sandbox import Manifest

from ringfence.integrations.openai_agents import RingfenceSandboxClient, workspace
from ringfence.model.mount import Mount
from tests.suites.places import options

_DEFAULT_ROOT = Manifest().root
_PREFIX = "their-local-"


class HostedClient(RingfenceSandboxClient):
    """As their local client: it has that one's name, and the workspace goes with the session."""

    backend_id = "unix_local"

    def __init__(self, *, inherit_host_environment: bool = False, **more: Any) -> None:
        super().__init__(**{**options(python_env=True), **more})
        self._mounts = self._options.get("mounts", ())

    async def create(self, *, manifest: Manifest | None = None, **more: Any) -> Any:
        """With the manifest's root, or a new directory instead of the usual one, shown inside."""
        manifest = manifest or Manifest()
        if manifest.root == _DEFAULT_ROOT:
            root = tempfile.mkdtemp(prefix=_PREFIX)
            manifest = manifest.model_copy(update={"root": root})
        Path(manifest.root).mkdir(exist_ok=True)
        mounts = [*self._mounts, f"{manifest.root}:{manifest.root}:rw"]
        self._options = {**self._options, "mounts": mounts}
        if log := os.environ.get("SANDBOX_INTEGRATION_TOOL_LOG"):
            self._show_their_tools(Path(log))
        return await super().create(manifest=manifest, **more)

    def _show_their_tools(self, log: Path) -> None:
        """What a test puts on the PATH for its entries, such as a git without a network."""
        place = log.parent.parent
        (place / "mock-bin" / "rm").unlink()  # theirs removes by Python, ours by what is inside
        self._options["mounts"].append(f"{place}:{place}:rw")
        self._options["env"] = {
            **self._options.get("env", {}),
            "PATH": os.environ["PATH"],
            "SANDBOX_INTEGRATION_TOOL_LOG": str(log),
        }

    def serialize_session_state(self, state: Any) -> dict[str, object]:
        """With a word that their tests look for: whose the workspace is."""
        ours = Path(state.manifest.root).name.startswith(_PREFIX)
        return {**super().serialize_session_state(state), "workspace_root_owned": ours}

    async def resume(self, state: Any) -> Any:
        """On the same directory, be it a new one."""
        Path(state.manifest.root).mkdir(exist_ok=True)
        return await super().resume(state)

    async def delete(self, session: Any) -> Any:
        """With a workspace that was ours to make."""
        await super().delete(session)
        if Path(session.state.manifest.root).name.startswith(_PREFIX):
            shutil.rmtree(session.state.manifest.root)
        return session


def as_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace of the host is packed, cleared and filled as if it were the sandbox's own."""

    def parse(text: str) -> Mount:
        mount = Mount.parse(text)
        return Mount(mount.target, mount.source, mount.access, protect=())

    monkeypatch.setattr(workspace, "parse_mount", parse)
    monkeypatch.setattr(workspace, "from_outside", lambda _mounts, _root: set())
