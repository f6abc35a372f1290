"""Templates by E2B's API: what is refused, and what another owner's id, hash or signature opens."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ringfence.api.access.audit import MOST_REFUSED
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Client, MakeClient
from tests.images.conftest import small

pytestmark = pytest.mark.anyone
_ENV = {"type": "ENV", "args": ["A", "b"]}
_HASH = hashlib.sha256(b"some files").hexdigest()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    """The images of the daemon: none at first."""
    return ImageStore(str(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, images: ImageStore) -> Daemon:
    """A daemon that serves E2B's API, with a store of images of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_IMAGES", images.directory)
        return start_daemon("--e2b", "--listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def bob(make_client: MakeClient) -> Client:
    return make_client("bob")


@pytest.fixture
def made(client: Client) -> Iterator[dict[str, Any]]:
    """A reserved build."""
    found = client.api("POST", "/v3/templates", json={"name": "app", "tags": ["v1"]})
    assert 202 == found.status_code, found.text
    yield found.json()
    client.api("DELETE", f"/templates/{found.json()['templateID']}")


def begin(client: Client, made: dict[str, Any], *steps: Any, **more: Any) -> Any:
    path = f"/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    return client.api("POST", path, json={"steps": steps, "fromImage": "e2bdev/base", **more})


def step(kind: str, *args: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "args": args, **more}


def ended(client: Client, made: dict[str, Any]) -> dict[str, Any]:
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}/status"
    until = time.monotonic() + 60
    while True:
        found: dict[str, Any] = client.api("GET", path).json()
        if found["status"] in ("ready", "error"):
            return found
        assert time.monotonic() < until
        time.sleep(0.05)


def upload_url(client: Client, made: dict[str, Any], name: str = _HASH) -> str:
    found = client.api("GET", f"/templates/{made['templateID']}/files/{name}")
    assert 201 == found.status_code, found.text
    url: str = found.json()["url"]
    return url


def archive(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def test_a_build_with_files_and_its_log(client: Client, made: dict[str, Any]) -> None:
    url = upload_url(client, made)
    assert 200 == client.http.put(url, content=archive("file", b"copied")).status_code
    copy = step("COPY", "file", "/home/user/", "", "", filesHash=_HASH)
    show = step("RUN", "cat file; seq 200", "root")
    assert 202 == begin(client, made, step("WORKDIR", "/home/user"), copy, show).status_code
    assert "ready" == ended(client, made)["status"]
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}/status"
    seen: list[str] = []
    while entries := client.api("GET", f"{path}?logsOffset={len(seen)}").json()["logEntries"]:
        assert len(entries) <= 100
        seen += [each["message"] for each in entries]
    assert {"copied1", "200", "template ready"} <= {*seen}
    for name in ("app", "app:v1", f"ringfence/{made['names'][0]}", made["templateID"]):
        box = client.create(templateID=name)
        assert b"copied" == box.call("GET", "/files?path=/home/user/file").content
        for asked in ("app", "app:v1", made["templateID"]):
            shown = client.api("GET", "/v2/sandboxes", params={"template": asked}).json()
            assert [box.id] == [each["sandboxID"] for each in shown]
        client.api("DELETE", f"/sandboxes/{box.id}")
    assert 404 == client.api("POST", "/sandboxes", json={"templateID": "app:v2"}).status_code


def test_variables_are_those_of_the_build_and_of_its_start_command(
    client: Client, made: dict[str, Any]
) -> None:
    """As E2B has it: `set_envs` is for the build, `envs` of `create` for a sandbox."""
    steps = (
        step("ENV", "COLOR", "red", "HOME", "/home/user"),
        step("RUN", "echo $COLOR > built"),
    )
    start = "echo $COLOR > started"
    assert 202 == begin(client, made, *steps, startCmd=start, readyCmd="test $COLOR").status_code
    assert "ready" == ended(client, made)["status"]
    box = client.create(templateID="app", envVars={"SHAPE": "round"})
    box.run("(cat built started; echo $SHAPE $COLOR $HOME) > said")
    said = box.call("GET", "/files?path=/home/user/said").text
    assert "red\nred\nround /home/user\n" == said
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_step_without_cache_is_done_again(client: Client, made: dict[str, Any]) -> None:
    def lines(**more: Any) -> list[str]:
        assert 202 == begin(client, made, step("RUN", "echo made", **more)).status_code
        found = ended(client, made)
        assert "ready" == found["status"]
        made.update(client.api("POST", "/v3/templates", json={"name": "app"}).json())
        return [each["message"] for each in found["logEntries"]]

    assert "cached" not in lines()
    assert "cached" in lines(), "the control"
    assert "cached" not in lines(force=True)


def test_another_owner_gets_at_nothing(client: Client, bob: Client, made: dict[str, Any]) -> None:
    url = upload_url(client, made)
    assert 202 == begin(client, made, step("RUN", "echo secret > ~/file")).status_code
    assert "ready" == ended(client, made)["status"]
    template, build = f"/templates/{made['templateID']}", made["buildID"]
    for method, path, form in (
        ("GET", template, None),
        ("DELETE", template, None),
        ("PATCH", template, {"public": True}),
        ("GET", f"{template}/builds/{build}/status", None),
        ("GET", f"{template}/builds/{build}/logs", None),
        ("POST", f"/v2{template}/builds/{build}", {"steps": []}),
        ("GET", f"{template}/files/{_HASH}", None),
        ("GET", f"{template}/tags", None),
        ("GET", "/templates/aliases/app", None),
        ("POST", "/templates/tags", {"target": "app:v1", "tags": ["x"]}),
        ("DELETE", "/templates/tags", {"name": "app", "tags": ["v1"]}),
        ("POST", "/sandboxes", {"templateID": "app"}),
        ("POST", "/sandboxes", {"templateID": build}),
    ):
        more: dict[str, Any] = {} if form is None else {"json": form}
        assert 404 == bob.api(method, path, **more).status_code, (method, path)
    assert made["templateID"] not in bob.api("GET", "/templates").text
    # A signature is good for one template and one name, for an hour.
    own = bob.api("POST", "/v3/templates", json={"name": "bobs"}).json()
    for forged in (
        url.replace(made["templateID"], own["templateID"]),
        url.replace(_HASH, "0" * 64),
        url.replace("until=", "until=9"),
        url.partition("?")[0],
        url[:-1],
    ):
        assert 401 == bob.http.put(forged, content=b"x").status_code
    assert 200 == client.http.put(url, content=archive("file", b"ann's")).status_code
    files = bob.api("GET", f"/templates/{own['templateID']}/files/{_HASH}").json()
    assert not files["present"]
    copy = step("COPY", "file", "/home/user/", filesHash=_HASH)
    assert 202 == begin(bob, own, copy).status_code
    assert "not uploaded" in ended(bob, own)["reason"]["message"]
    bob.api("DELETE", f"/templates/{own['templateID']}")


def test_a_signature_is_good_until_its_time_and_not_after_it(
    client: Client, made: dict[str, Any], daemon: Daemon
) -> None:
    secret = (daemon.state_dir / "e2b.secret").read_bytes()

    def put(ends_in_s: int) -> tuple[int, str]:
        until = int(time.time()) + ends_in_s
        text = f"upload:{made['templateID']}:{_HASH}:{until}".encode()
        query = f"until={until}&signature={hmac.new(secret, text, 'sha256').hexdigest()}"
        url = f"/templates/{made['templateID']}/files/{_HASH}?{query}"
        answer = client.http.put(url, content=archive("file", b"copied"))
        return answer.status_code, answer.text

    assert 200 == put(60)[0]
    status, text = put(-1)
    assert 401 == status
    assert "the signature has expired" in text


def test_a_key_that_reads_gets_no_url_to_upload_to(
    client: Client, make_client: MakeClient, made: dict[str, Any]
) -> None:
    """The URL needs no key, so it would allow writing the files that the owner's builds copy."""
    path = f"/templates/{made['templateID']}/files/{_HASH}"
    reader = make_client("ann", "read_only")

    assert 200 == reader.api("GET", f"/templates/{made['templateID']}").status_code
    assert 403 == reader.api("GET", path).status_code
    assert 201 == client.api("GET", path).status_code


@pytest.mark.full
def test_strangers_who_try_signatures_are_refused_as_those_who_try_keys(
    start_daemon: StartDaemon,
) -> None:
    """Refusals without a key are counted by address: few lines in the log, and 429 in the end."""
    daemon = start_daemon("--e2b", "--listen", "127.0.0.1:0")
    path = f"/templates/tpl-1/files/{_HASH}?until=9999999999&signature={'0' * 64}"
    with httpx.Client(base_url=daemon.tcp, timeout=60) as stranger:
        told = {stranger.put(path, content=b"x").status_code for _ in range(3 * MOST_REFUSED)}
    lines = (daemon.state_dir / "refused.log").read_text().splitlines()

    assert {401, 429} == told
    assert {None} == {json.loads(line).get("client") for line in lines}
    assert len(lines) < MOST_REFUSED / 2


def test_equal_builds_of_two_owners_at_once_share_nothing(client: Client, bob: Client) -> None:
    """The same name, steps and hash of files, but other files: each owner gets what its own were."""

    def built(owner: Client, content: bytes) -> tuple[dict[str, Any], bytes]:
        made = owner.api("POST", "/v3/templates", json={"name": "equal"}).json()
        url = upload_url(owner, made)
        assert 200 == owner.http.put(url, content=archive("file", content)).status_code
        copy = step("COPY", "file", "/home/user/", "", "", filesHash=_HASH)
        show = step("RUN", "cat ~/file ~/file > ~/twice; sleep 0.3")
        assert 202 == begin(owner, made, copy, show).status_code
        assert "ready" == ended(owner, made)["status"]
        box = owner.create(templateID="equal")
        found = box.call("GET", "/files?path=/home/user/twice").content
        owner.api("DELETE", f"/sandboxes/{box.id}")
        return made, found

    with ThreadPoolExecutor(4) as pool:
        who = [(client, b"ann"), (bob, b"bob")]
        running = [pool.submit(built, *each) for each in who for _ in range(2)]
        found = [each.result() for each in running]
    assert [b"annann", b"annann", b"bobbob", b"bobbob"] == [each for _, each in found]
    ids = [made["templateID"] for made, _ in found]
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert ids[0] != ids[2]
    for owner, template in ((client, ids[2]), (bob, ids[0])):
        refused = owner.api("POST", "/sandboxes", json={"templateID": template})
        assert 404 == refused.status_code, "the other owner's, by its id"
    for owner, template in ((client, ids[0]), (bob, ids[2])):
        owner.api("DELETE", f"/templates/{template}")


@pytest.mark.parametrize(
    ("more", "number", "said"),
    [
        ({"fromImage": "debian:stable"}, 0, "image 'debian:stable' is not on this server"),
        ({"fromImage": "python:3.99"}, 0, "is not on this server"),
        ({"fromImage": "", "fromTemplate": "nowhere"}, 0, "template 'nowhere' not found"),
        ({"fromImageRegistry": {"type": "registry"}}, 0, "pull --user NAME:PASSWORD e2bdev/base"),
        ({"steps": [step("VOLUME", "/x")]}, 1, "step VOLUME is not supported"),
        ({"steps": [_ENV, step("COPY", "../x", "/y", filesHash="0" * 64)]}, 2, "not uploaded"),
        ({"steps": [_ENV, _ENV, step("ENV", "A")]}, 3, "not pairs"),
        ({"steps": [_ENV, step("USER", "; exit 1")]}, 2, "'; exit 1' is neither a user name"),
        ({"steps": [_ENV, step("RUN", "exit 3"), _ENV]}, 2, "exit code 3"),
    ],
)
def test_a_build_fails_at_the_step_that_is_to_blame(
    client: Client, made: dict[str, Any], more: dict[str, Any], number: int, said: str
) -> None:
    """The SDKs raise an error that leads to the line of that step, also where it cannot be had."""
    assert 202 == begin(client, made, **more).status_code
    found = ended(client, made)

    assert ("error", str(number)) == (found["status"], found["reason"]["step"])
    assert said in found["reason"]["message"]
    assert said in found["logEntries"][-1]["message"]
    again = begin(client, made)
    assert (409, True) == (again.status_code, "started already" in again.json()["message"])


@pytest.mark.full
def test_a_start_command_fails_after_the_last_step(client: Client, made: dict[str, Any]) -> None:
    assert 202 == begin(client, made, _ENV, startCmd="./nowhere", readyCmd="sleep 9").status_code
    found = ended(client, made)

    assert ("error", "finalize") == (found["status"], found["reason"]["step"])
    assert "exit code 127" in found["reason"]["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [({"steps": ["x"]}, "list of objects"), ({"fromImageRegistry": "x"}, "fromImageRegistry")],
)
def test_what_is_no_request_is_refused(
    client: Client, made: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    refused = begin(client, made, **more)
    assert (400, True) == (refused.status_code, said in refused.json()["message"])


def test_names_of_the_server_are_not_taken(client: Client, bob: Client) -> None:
    for name in ("base", "code-interpreter-v1", "../x", "", "a b"):
        refused = client.api("POST", "/v3/templates", json={"name": name})
        assert refused.status_code in (400, 403), name
    refused = client.api("POST", "/v3/templates", json={"name": "big", "memoryMB": -1})
    assert refused.status_code == 400


def test_files_are_copied_over_an_image_of_busybox(
    client: Client, made: dict[str, Any], images: ImageStore, tmp_path: Path
) -> None:
    """SDKs send packed archives, and some builds of busybox do not see for themselves that they are."""
    load(small().as_layout(tmp_path / "layout"), "small:1", store=images)
    url = upload_url(client, made)
    assert 200 == client.http.put(url, content=archive("file", b"copied")).status_code
    copy = step("COPY", "file", "kept/", "", "", filesHash=_HASH)
    show = step("RUN", "cat kept/file", "root")
    assert 202 == begin(client, made, copy, show, fromImage="small:1").status_code
    found = ended(client, made)
    assert "ready" == found["status"], found
    assert "copied" in [each["message"] for each in found["logEntries"]]


def test_a_step_of_an_unknown_user_fails_in_the_words_of_e2b(
    client: Client, made: dict[str, Any]
) -> None:
    steps = (step("RUN", "true"), step("RUN", "whoami", "root123"), step("RUN", "false"))
    assert 202 == begin(client, made, *steps).status_code
    reason = ended(client, made)["reason"]
    refused = "command failed: unauthenticated: invalid username: 'root123'"
    assert reason["message"].startswith(f"failed to run command 'whoami': {refused} (")
    assert "2" == reason["step"]


def test_a_client_may_have_as_many_templates_as_a_run_of_the_tests_of_e2b_builds(
    client: Client,
) -> None:
    """They build under a new name each time, some eighty in all, and remove none."""
    ids = []
    for i in range(100):
        made = client.api("POST", "/v3/templates", json={"name": f"many-{i}"})
        assert 202 == made.status_code, made.text
        ids.append(made.json()["templateID"])
    for each in ids:
        client.api("DELETE", f"/templates/{each}")


def test_a_build_is_begun_also_before_its_turn(client: Client) -> None:
    """As E2B's own test of builds in the background asks, beside other builds of the same client."""
    made = []
    for i in range(3):  # more than a client has at once
        each = client.api("POST", "/v3/templates", json={"name": f"turn-{i}"}).json()
        assert "waiting" == _status(client, each)
        assert 202 == begin(client, each, step("RUN", f"sleep 2; echo {i}")).status_code
        made.append(each)
    assert ["building"] * 3 == [_status(client, each) for each in made]
    for each in made:
        client.api("DELETE", f"/templates/{each['templateID']}")


def _status(client: Client, made: dict[str, Any]) -> str:
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}/status"
    found: str = client.api("GET", path).json()["status"]
    return found
