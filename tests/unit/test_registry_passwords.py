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
