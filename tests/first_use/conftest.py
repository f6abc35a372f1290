"""Where mistakes are made."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.features import require


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a script, a sub-directory and configurations with mistakes."""
    require("user namespaces")
    (tmp_path / "src").mkdir()
    for name, text in (
        ("hello.py", "print(1)\n"),
        ("plain.txt", "x\n"),
        ("empty.txt", ""),
        ("broken.json", "{listen:"),
        ("misspelt.json", '{"listne": "127.0.0.1:0"}'),
        ("twice.json", '{"listen": "127.0.0.1:0", "listen": "127.0.0.1:1"}'),
        ("shards.json", '{"shards": 4}'),
        ("none.json", '{"backends": []}'),
        ("tables.json", '{"backends_file": "/nope.toml"}'),
        ("same.json", '{"backends": ["native", "native"]}'),
        ("store.json", '{"snapshot_store": "/x"}'),
        ("most.json", '{"most": {"memory": "1g"}}'),
        ("roots.json", '{"host_roots": ["srv"]}'),
        ("pool.json", '{"manager": {"pool": {"profiles": {"x": {"imagee": "y"}}}}}'),
        ("nets.json", '{"host_networks": ["10.0.0.0/33"]}'),
        ("open.json", '{"mode": "unrestricted", "rules": [{"host": "x.com"}]}'),
        ("allow.json", '{"mode": "limited", "allow": ["x.com"]}'),
        ("path.json", '{"mode": "limited", "rules": [{"host": "x.com", "path": "/a"}]}'),
        ("action.json", '{"mode": "limited", "rules": [{"host": "x.com", "action": "alow"}]}'),
        ("types.json", '{"manager": {"max_sandboxes": "10"}}'),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0{")
    return tmp_path


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
