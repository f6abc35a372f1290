"""Passwords for registries: a line's end is none of theirs, whichever system wrote it."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import pytest

from ringfence.cli.image import _credentials
from ringfence.errors import InvalidRequest
from ringfence.images.credentials import configured
from ringfence.images.reference import Reference

GIVEN = {"user": "me", "password-stdin": True}


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_from_standard_input(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f" pass word{end}", newline="\n"))

    assert ("me", " pass word") == _credentials(GIVEN)


@pytest.mark.parametrize("said", ["", "\n", "\r\n"])
def test_none_on_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said, newline="\n"))

    with pytest.raises(InvalidRequest) as refused:
        _credentials(GIVEN)

    assert "--password-stdin" == refused.value.field


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str) -> None:
    auth = base64.b64encode(f"me:pass:word{end}".encode()).decode()
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {"registry.example": {"auth": auth}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))

    assert ("me", "pass:word") == configured(Reference.parse("registry.example/some/image"))


@pytest.mark.parametrize("key", ["docker.io", "https://docker.io", "https://index.docker.io/v1/"])
def test_docker_hub_is_found_by_each_of_its_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "auth.json"
    auth = base64.b64encode(b"me:password").decode()
    path.write_text(json.dumps({"auths": {key: {"auth": auth}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))

    assert ("me", "password") == configured(Reference.parse("python:3.12"))
    assert configured(Reference.parse("registry.example/python:3.12")) is None


@pytest.mark.parametrize("text", ["nocolon", "", "\n"])
def test_what_has_no_colon_is_no_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    for given, wanted in ((text, None), ("me:", ("me", "")), (":x", ("", "x"))):
        auth = base64.b64encode(given.encode()).decode()
        (tmp_path / "config.json").write_text(
            json.dumps({"auths": {"registry.example": {"auth": auth}}})
        )
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", "")
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        assert wanted == configured(Reference.parse("registry.example/x"))


def test_what_is_not_base64_is_no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is sent that nobody wrote: what is left of a damaged one may be another."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    good = base64.b64encode(b"me:password").decode()
    for auth, wanted in ((good, ("me", "password")), (f"{good[:4]}*{good[4:]}", None), (7, None)):
        form = {"auths": {"registry.example": {"auth": auth}}}
        (tmp_path / "config.json").write_text(json.dumps(form))
        assert wanted == configured(Reference.parse("registry.example/x")), auth


def test_the_first_file_that_has_a_password_for_the_registry_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of the variable, Podman's, Docker's own, and of each its entry for exactly this registry."""

    def write(path: Path, name: str, *keys: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"auth": base64.b64encode(f"{name}:x".encode()).decode()}
        path.write_text(json.dumps({"auths": dict.fromkeys(keys, entry)}))

    def found(image: str = "registry.example:5000/some/image") -> str | None:
        credentials = configured(Reference.parse(image))
        return credentials and credentials[0]

    key = "registry.example:5000"
    named, docker, home = tmp_path / "named.json", tmp_path / "docker", tmp_path / "home"
    podman = tmp_path / "run" / "containers" / "auth.json"
    monkeypatch.setenv("HOME", str(home))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert found() is None
    write(home / ".docker" / "config.json", "of home", f"https://{key}")
    assert "of home" == found()
    write(docker / "config.json", "of docker", key)
    assert "of home" == found(), "the control: nothing names that directory"
    monkeypatch.setenv("DOCKER_CONFIG", str(docker))
    assert "of docker" == found()
    write(podman, "of podman", key)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert "of podman" == found()
    write(named, "named", key)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(named))
    assert "named" == found()
    for image in ("registry.example/x", "registry.example:5001/x", "x.registry.example:5000/x"):
        assert found(image) is None
    write(named, "another", "other.example")
    assert "of podman" == found(), "a file without an entry is passed over"
    for broken in ("{", "[]", '{"auths": []}', '{"auths": {"registry.example:5000": "me:x"}}'):
        podman.write_text(broken)
        assert "of docker" == found()
