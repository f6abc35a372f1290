"""Options of `ringfence serve`: what they make of a configuration, and which have no effect together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import serve
from ringfence.cli.options import parse
from ringfence.cli.server.hosting import SERVE
from ringfence.daemon.config import DaemonConfig
from ringfence.errors import InvalidRequest
from tests.cli.command import environment

pytestmark = pytest.mark.anyone


def config(*argv: str) -> DaemonConfig:
    given, rest = parse(SERVE, argv)
    assert [] == rest
    serve._check_together(given)
    return serve._config(given)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration with a word on everything that options name as well."""
    path = tmp_path / "config.json"
    form = {
        "listen": "127.0.0.1:1",
        "log_level": "debug",
        "outlive_s": 5.0,
        "manager": {"max_sandboxes": 7, "cleanup_interval_s": 3.0},
        "e2b": {"domain": "file.test", "templates": {"mine": {}}},
    }
    path.write_text(json.dumps(form))
    return path


def test_options_win_over_the_file_and_leave_the_rest_of_it(file: Path) -> None:
    plain = config("--config", str(file))
    assert ("127.0.0.1:1", "debug", 5.0) == (plain.listen, plain.log_level, plain.outlive_s)
    assert 7 == plain.manager.max_sandboxes
    assert plain.e2b is not None
    assert "file.test" == plain.e2b.domain

    found = config(
        *("--config", str(file), "--listen", "127.0.0.1:2", "--log-level", "error"),
        *("--outlive", "2m", "--max-sandboxes", "9", "--domain", "option.test"),
        *("--internet", "example.com", "--allow-host", "a", "--allow-host", "b"),
        *("--allow-origin", "https://x.test", "--state-dir", "/s", "--allow-public"),
        *("--tls-certificate", "/c", "--tls-key", "/k"),
    )
    assert ("127.0.0.1:2", "error", 120.0) == (found.listen, found.log_level, found.outlive_s)
    assert (9, plain.manager.cleanup_interval_s) == (
        found.manager.max_sandboxes,
        found.manager.cleanup_interval_s,
    )
    assert found.e2b is not None
    assert ("option.test", {"mine"}) == (found.e2b.domain, {*found.e2b.templates})
    assert ("example.com",) == found.e2b.internet.allowed_hosts
    assert (("a", "b"), ("https://x.test",)) == (found.allowed_hosts, found.allowed_origins)
    assert ("/s", True, "/c", "/k") == (
        found.state_dir,
        found.allow_public,
        found.tls_certificate,
        found.tls_key,
    )


def test_e2bs_api_is_served_where_it_is_asked_for() -> None:
    assert config().e2b is None
    bare = config("--e2b").e2b
    assert bare is not None
    assert ("", True) == (bare.domain, bare.internet.is_none)
    whole = config("--e2b", "--domain", "a.test", "--internet", "public").e2b
    assert whole is not None
    assert ("a.test", False) == (whole.domain, whole.internet.is_none)


@pytest.mark.parametrize(
    ("argv", "field", "said"),
    [
        (["--domain", "a.test"], "domain", "without --e2b"),
        (["--internet", "public"], "internet", "without --e2b"),
        (["--e2b", "--domain", ""], "--domain", "must not be empty"),
        (["--state-dir", ""], "--state-dir", "must not be empty"),
        (["--e2b", "--internet", "localhost"], "--internet", ""),
        (["--e2b", "--internet", "a b"], "--internet", ""),
        (["--stop", "--detach"], "--stop", "it starts none"),
        (["--stop", "--take-over"], "--stop", "it starts none"),
        (["--cluster-name", "x"], "--cluster-name", "without --cluster"),
        (["--allow-public"], "--allow-public", "without --listen"),
        (["--max-sandboxes", "many"], "--max-sandboxes", ""),
        (["--outlive", "soon"], "outlive_s", ""),
        (["--tls-key", "/k"], "tls_certificate", "is missing"),
        (["--log-level", "loud"], "log_level", ""),
        (["--config", "/nowhere/at/all"], "--config", "No such file"),
    ],
)
def test_options_that_have_no_effect_or_no_sense_are_refused(
    argv: list[str], field: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        config(*argv)
    assert field == refused.value.field
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("text", "argv", "field", "said"),
    [
        ("{", [], "--config", "config.json: "),
        ("[]", [], "--config", "config.json: "),
        ('{"listen": "a", "listen": "b"}', [], "--config", "listen"),
        ('{"log_level": "loud"}', [], "--config", "config.json: log_level: "),
        ('{"log_level": "loud"}', ["--log-level", "louder"], "log_level", "louder"),
        ('{"e2b": null}', ["--domain", "a.test"], "domain", "without --e2b"),
    ],
)
def test_an_error_names_the_file_or_the_option_that_has_it(
    tmp_path: Path, text: str, argv: list[str], field: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        config("--config", str(tmp_path / "config.json"), *argv)
    assert field == refused.value.field
    assert said in refused.value.message


def test_shards_need_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"shards": 2, "state_dir": str(tmp_path / "state")}))
    with pytest.raises(InvalidRequest) as refused:
        serve.main(["--config", str(path)])
    assert "shards" == refused.value.field
    assert ["config.json"] == os.listdir(tmp_path)
    path.write_text(json.dumps({"shards": 0, "state_dir": str(tmp_path / "state")}))
    assert 0 == serve.main(["--config", str(path), "--stop"]), "the control"


def test_a_server_in_the_background_is_told_all_options_but_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as many lines as it has addresses."""
    asked: list[Any] = []

    def detach(*args: Any) -> int:
        asked.append(args)
        return 7

    monkeypatch.setattr(serve, "_detach", detach)
    state = str(tmp_path / "state")
    listen = ["--listen", "127.0.0.1:0"]
    for argv, lines in (([], 1), (listen, 2), ([*listen, "--json"], 1)):
        given = ["--state-dir", state, "--detach", *argv]
        assert 7 == serve.main(given)
        assert ([each for each in given if each != "--detach"], state, lines) == asked.pop()


_DETACH = """
import sys
from ringfence.cli import serve
state, *programs = sys.argv[1:]
for sys.executable in programs:
    print("code", serve._detach([], state, 2), flush=True)
    print(file=sys.stderr, flush=True)
"""


def test_what_a_server_that_failed_has_written_is_shown_and_nothing_of_another(
    tmp_path: Path,
) -> None:
    state, programs = tmp_path / "state", []
    for number, script in enumerate(
        (
            "echo more >&2; echo one; echo two",
            'echo one; echo "why $*" >&2; exit 3',
            "echo last >&2",
        )
    ):
        programs.append(tmp_path / f"program-{number}")
        programs[-1].write_text(f"#!/bin/sh\n{script}\n")
        programs[-1].chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DETACH, state, *programs],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "one\ntwo\ncode 0\ncode 3\ncode 1\n" == done.stdout
    said = "why -P -m ringfence serve"  # -P: nothing of the current directory is imported
    assert f"\n{said}\n\nlast\n\n" == done.stderr
    log = state / "serve.log"
    assert ["last", "more", said] == sorted(log.read_text().splitlines()), "it is added to"
    assert 0o600 == log.stat().st_mode & 0o777
    log.unlink()
    log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"serve\.log"):
        serve._detach([], str(state), 1)
    assert not (tmp_path / "elsewhere").exists()
