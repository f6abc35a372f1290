"""E2B's API byte by byte: what its SDKs send, and what they look for in the answers."""

from __future__ import annotations

import base64
import gzip
import socket
import threading
import time
from datetime import datetime, timedelta, timezone

import httpx
import pytest

from tests.api.conftest import Daemon
from tests.e2b.conftest import Box, Client

pytestmark = pytest.mark.anyone


def _text(messages: list[dict[str, object]], name: str = "stdout") -> str:
    pieces = [each["event"].get("data", {}).get(name) for each in messages if "event" in each]  # type: ignore[attr-defined]
    return b"".join(base64.b64decode(each) for each in pieces if each).decode()


@pytest.mark.full
def test_both_apis_show_the_same_sandbox(client: Client, box: Box, daemon: Daemon) -> None:
    shown = client.api("GET", f"/sandboxes/{box.id}").json()
    with daemon.client() as ours:
        view = ours.get(f"/v1/sandboxes/{box.id}").json()

    assert ("running", "base") == (shown["state"], shown["templateID"])
    assert {"a": "b c", "x": "1"} == shown["metadata"]
    assert "b c" == view["metadata"]["a"]
    assert ("kill", False) == (shown["lifecycle"]["onTimeout"], shown["lifecycle"]["autoResume"])


def test_lists_are_filtered_and_come_in_pages(client: Client, box: Box) -> None:
    others = [client.create(metadata={"n": str(i)}) for i in range(3)]
    first = client.api("GET", "/v2/sandboxes?limit=2")
    token = first.headers["x-next-token"]
    second = client.api("GET", f"/v2/sandboxes?limit=2&nextToken={token}")
    found = [each["sandboxID"] for each in first.json() + second.json()]

    assert [each.id for each in reversed(others)] == found[:3]
    assert box.id == found[3]
    assert "x-next-token" not in second.headers
    ours = client.api("GET", "/v2/sandboxes?metadata=a%3Db%252520c").json()
    assert [box.id] == [each["sandboxID"] for each in ours], "quoted twice, as by the SDKs"
    assert [] == client.api("GET", "/v2/sandboxes?state=paused").json()
    for limit, status in (("100", 200), ("000100", 200), ("101", 400), ("0", 400), ("x", 400)):
        assert status == client.api("GET", f"/v2/sandboxes?limit={limit}").status_code, limit
    padded = client.api("GET", "/v2/sandboxes?limit=0000015000")
    assert 400 == padded.status_code, "all of its digits count"
    for each in others:
        assert 204 == client.api("DELETE", f"/sandboxes/{each.id}").status_code
        assert 404 == client.api("GET", f"/sandboxes/{each.id}").status_code
        assert 404 == client.api("DELETE", f"/sandboxes/{each.id}").status_code


def test_lists_are_filtered_by_start_and_template(client: Client, box: Box) -> None:
    started = client.api("GET", f"/sandboxes/{box.id}").json()["startedAt"]
    read = datetime.fromisoformat(started)

    def listed(**query: str) -> list[str]:
        answer = client.api("GET", "/v2/sandboxes", params=query)
        assert 200 == answer.status_code, answer.text
        return [each["sandboxID"] for each in answer.json()]

    for hours in (0, 5, -7):
        there = read.astimezone(timezone(timedelta(hours=hours)))
        assert box.id in listed(startedAfter=there.isoformat()), "as the SDKs write what they read"
        assert box.id not in listed(startedAfter=(there + timedelta(seconds=1)).isoformat())
    assert 400 == client.api("GET", "/v2/sandboxes?startedAfter=soon").status_code
    assert box.id in listed(template="base")
    assert [] == listed(template="unknown-template")


def test_a_command_tells_start_output_and_end(box: Box) -> None:
    messages = box.run("echo $GREETING; echo no >&2; pwd; exit 3")

    assert messages[0]["event"]["start"]["pid"] > 0
    assert "hi\n/home/user\n" == _text(messages)
    assert "no\n" == _text(messages, "stderr")
    end = messages[-2]["event"]["end"]
    assert (3, True, "exit status 3") == (end["exitCode"], end["exited"], end["status"])
    assert {} == messages[-1]


def test_pids_are_those_inside(box: Box) -> None:
    (started, *_rest) = messages = box.run("echo $$; cut -d' ' -f4 /proc/self/stat; sleep 0.2")
    pid = started["event"]["start"]["pid"]

    assert f"{pid}\n{pid}\n" == _text(messages)


@pytest.mark.parametrize("before", ["", "cd /tmp; ", "cd /tmp && exec ", "true | "])
def test_setsid_keeps_the_exit_code_and_the_output(box: Box, before: str) -> None:
    messages = box.run(f"{before}setsid sh -c 'sleep 0.1; echo said; exit 3'")

    assert (3, "said\n") == (messages[-2]["event"]["end"]["exitCode"], _text(messages))


def test_a_script_may_be_longer_than_an_argument(box: Box) -> None:
    words = " ".join(["x" * 65_536] * 8)

    assert 8 * 65_536 == len(_text(box.run(f"printf %s {words}")))
    process = {"cmd": "/bin/echo", "args": ["x" * 200_000]}
    error = box.stream("/process.Process/Start", {"process": process})[-1]["error"]
    assert "reached its end of life" not in error["message"], "the sandbox is there"


def test_the_deadline_is_the_servers(box: Box) -> None:
    messages = box.run("sleep 60", headers={"connect-timeout-ms": "300"})

    assert "deadline_exceeded" == messages[-1]["error"]["code"]
    assert {"processes": []} == box.rpc("/process.Process/List", {}).json()


@pytest.mark.parametrize(
    ("form", "code", "text"),
    [
        ({"process": {"cmd": "/bin/true", "cwd": "/nowhere"}}, "invalid_argument", "'/nowhere'"),
        ({"process": {"cmd": 5}}, "invalid_argument", "cmd"),
    ],
)
def test_a_start_that_fails_says_why(
    box: Box, form: dict[str, object], code: str, text: str
) -> None:
    (last,) = box.stream("/process.Process/Start", form)

    assert code == last["error"]["code"]
    assert text in last["error"]["message"]


def test_input_reaches_the_process_and_ends(box: Box) -> None:
    messages: list[dict[str, object]] = []
    process = {"cmd": "cat", "args": []}
    form = {"process": process, "tag": "reader"}
    thread = threading.Thread(
        target=lambda: messages.extend(box.stream("/process.Process/Start", form))
    )
    thread.start()
    selector = {"process": {"tag": "reader"}}
    given = {"input": {"stdin": base64.b64encode(b"line\n").decode()}, **selector}
    until = time.monotonic() + 20
    while box.rpc("/process.Process/SendInput", given).status_code != 200:
        assert time.monotonic() < until
    (listed,) = box.rpc("/process.Process/List", {}).json()["processes"]
    assert ("cat", "reader") == (listed["config"]["cmd"], listed["tag"])
    assert 200 == box.rpc("/process.Process/CloseStdin", selector).status_code
    thread.join(20)

    assert "line\n" == _text(messages)
    gone = box.rpc("/process.Process/SendInput", given)
    assert (404, "not_found") == (gone.status_code, gone.json()["code"])


def test_a_killed_process_is_not_found_again(box: Box) -> None:
    selector = {"process": {"tag": "doomed"}}
    form = {"process": {"cmd": "sleep", "args": ["60"]}, "tag": "doomed"}
    for _ in range(10):
        thread = threading.Thread(target=lambda: box.stream("/process.Process/Start", form))
        thread.start()
        killed = {"signal": "SIGNAL_SIGKILL", **selector}
        until = time.monotonic() + 20
        while box.rpc("/process.Process/SendSignal", killed).status_code != 200:
            assert time.monotonic() < until
        assert 404 == box.rpc("/process.Process/SendSignal", killed).status_code
        thread.join(20)


def test_input_for_what_takes_none_says_what_to_do(box: Box) -> None:
    process = {"cmd": "sleep", "args": ["60"]}
    form = {"process": process, "tag": "deaf", "stdin": False}
    thread = threading.Thread(target=lambda: box.stream("/process.Process/Start", form))
    thread.start()
    selector = {"process": {"tag": "deaf"}}
    given = {"input": {"stdin": ""}, **selector}
    until = time.monotonic() + 20
    while (refused := box.rpc("/process.Process/SendInput", given)).json()["code"] == "not_found":
        assert time.monotonic() < until
    killed = {"signal": "SIGNAL_SIGKILL", **selector}
    assert 200 == box.rpc("/process.Process/SendSignal", killed).status_code
    thread.join(20)

    assert "failed_precondition" == refused.json()["code"]
    assert "start the command with stdin=True" in refused.json()["message"]


@pytest.mark.parametrize(
    "name", ["new\nline", "\r\nX-A: b", 'a"b\\c', "\u00fc \u6f22", "\x7f\x01", "~x"]
)
def test_a_file_may_have_any_name(box: Box, name: str) -> None:
    written = box.call("POST", "/files", params={"path": name}, files={"file": ("n", b"1")})
    assert [name] == [each["name"] for each in written.json()]

    read = box.call("GET", "/files", params={"path": name})
    assert (200, b"1") == (read.status_code, read.content)
    assert "x-a" not in read.headers


@pytest.mark.parametrize("timeout", [-1, 10**9, 366 * 86_400 + 1])
def test_a_timeout_out_of_bounds_is_refused_by_its_name(
    client: Client, box: Box, timeout: int
) -> None:
    form = {"timeout": timeout}
    answers = [
        client.api("POST", "/v2/sandboxes", json=form),
        client.api("POST", f"/sandboxes/{box.id}/timeout", json=form),
        client.api("POST", f"/v2/sandboxes/{box.id}/connect", json=form),
        client.api("POST", f"/sandboxes/{box.id}/fork", json=form),
    ]

    for answer in answers:
        assert 400 == answer.status_code, answer.text
        assert f"timeout: {timeout} seconds; give 0 to" in answer.json()["message"]


def test_no_size_is_zero(client: Client, box: Box) -> None:
    shown = client.api("GET", f"/sandboxes/{box.id}").json()

    assert all(shown[each] > 0 for each in ("cpuCount", "memoryMB", "diskSizeMB"))


def test_files_are_written_read_and_described(box: Box) -> None:
    form = {"file": ("deep/er/a.txt", b"first"), "other": ("/home/user/b", b"x" * 300_000)}
    written = box.call("POST", "/files", files=form).json()
    assert ["/home/user/deep/er/a.txt", "/home/user/b"] == [each["path"] for each in written]

    assert b"first" == box.call("GET", "/files", params={"path": "deep/er/a.txt"}).content
    assert b"x" * 300_000 == box.call("GET", "/files?path=/home/user/b").content
    gone = box.call("GET", "/files?path=/nowhere")
    assert (404, "path '/nowhere' does not exist") == (gone.status_code, gone.json()["message"])
    assert 400 == box.call("GET", "/files?path=/home/user").status_code
    entry = box.rpc("/filesystem.Filesystem/Stat", {"path": "deep/er/a.txt"}).json()["entry"]
    assert ("a.txt", "5", "-rw-r--r--") == (entry["name"], entry["size"], entry["permissions"])
    found = box.rpc("/filesystem.Filesystem/ListDir", {"path": "deep", "depth": 2}).json()
    assert ["er", "a.txt"] == [each["name"] for each in found["entries"]]
    again = box.rpc("/filesystem.Filesystem/MakeDir", {"path": "deep"})
    assert (409, "already_exists") == (again.status_code, again.json()["code"])
    for _ in range(2):
        assert 200 == box.rpc("/filesystem.Filesystem/Remove", {"path": "deep"}).status_code


def test_an_upload_that_breaks_off_leaves_no_half_file(box: Box) -> None:
    path = "/home/user/broken"
    box.call("POST", f"/files?path={path}", content=b"before")
    for size in (1000, 3 << 20):
        with socket.create_connection(
            (box.http.base_url.host, box.http.base_url.port or 0)
        ) as sock:
            head = [
                f"POST /files?path={path} HTTP/1.1",
                "Host: 127.0.0.1",
                "Content-Length: 9999999",
            ]
            head += [f"{name}: {value}" for name, value in box.headers.items()]
            sock.sendall("\r\n".join([*head, "", ""]).encode() + bytes(size))
            until = time.monotonic() + 20
            while size > 1 << 20 and _content_or_cut(box, path) == b"before":
                assert time.monotonic() < until
        until = time.monotonic() + 20
        while _content_or_cut(box, path) not in (b"before", b"", _GONE):
            assert time.monotonic() < until, "a part of the upload is there"
    assert 404 == box.call("GET", f"/files?path={path}").status_code


_GONE, _CUT = b"(no such file)", b"(cut off)"


def _content_or_cut(box: Box, path: str) -> bytes:
    """Read a file that another request empties: after its size was sent, the server can only cut off."""
    try:
        answer = box.call("GET", f"/files?path={path}")
    except httpx.RemoteProtocolError:
        return _CUT
    return _GONE if answer.status_code == 404 else answer.content


def test_bodies_are_compressed_both_ways(box: Box) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/octet-stream"}
    data = b"zip" * 100_000
    sent = box.call("POST", "/files?path=z", content=gzip.compress(data), headers=headers)
    assert 200 == sent.status_code, sent.text

    came = box.call("GET", "/files?path=z", headers={"accept-encoding": "gzip"})
    assert "gzip" == came.headers["content-encoding"]
    assert data == came.content
    half = gzip.compress(data)[:100]
    assert 400 == box.call("POST", "/files?path=h", content=half, headers=headers).status_code


def test_metadata_is_kept_replaced_and_bounded(box: Box) -> None:
    path = "/files?path=noted"
    form = box.call("POST", path, content=b"1", headers={"X-Metadata-Kind": "a b"}).json()
    assert {"kind": "a b"} == form[0]["metadata"]
    stat = box.rpc("/filesystem.Filesystem/Stat", {"path": "noted"}).json()["entry"]
    assert {"kind": "a b"} == stat["metadata"]
    box.call("POST", path, content=b"1", headers={"X-Metadata-Other": "c"})
    stat = box.rpc("/filesystem.Filesystem/Stat", {"path": "noted"}).json()["entry"]
    assert {"other": "c"} == stat["metadata"]
    for bad in ({"X-Metadata-A": "x" * 5000}, {"X-Metadata-" + "n" * 300: "v"}):
        assert 400 == box.call("POST", path, content=b"1", headers=bad).status_code


def test_metrics_are_points_in_a_range(client: Client, box: Box) -> None:
    now = int(time.time())
    box.run("setsid sleep 60 >/dev/null 2>&1 &")  # an idle sandbox without a cgroup uses none
    until = time.monotonic() + 30
    while not (point := client.api("GET", f"/sandboxes/{box.id}/metrics").json()[-1])["memUsed"]:
        assert time.monotonic() < until
        time.sleep(0.1)  # a sample younger than a second is not taken anew
    assert abs(point["timestampUnix"] - now) < 3600
    path = f"/sandboxes/{box.id}/metrics"
    assert [] == client.api("GET", f"{path}?start={now - 900}&end={now - 800}").json()
    assert 400 == client.api("GET", f"{path}?start=now").status_code


def test_network_options_are_a_policy(client: Client, daemon: Daemon) -> None:
    network = {"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}
    box = client.create(network=network)
    assert ["example.com"] == client.api("GET", f"/sandboxes/{box.id}").json()["network"][
        "allowOut"
    ]
    with daemon.client() as ours:
        assert ["example.com"] == ours.get(f"/v1/sandboxes/{box.id}/network").json()[
            "allowed_hosts"
        ]
        assert 204 == client.api("PUT", f"/sandboxes/{box.id}/network", json={}).status_code
        assert [] == ours.get(f"/v1/sandboxes/{box.id}/network").json()["allowed_hosts"]
    refused = client.api("PUT", f"/sandboxes/{box.id}/network", json={"rules": {"a": []}})
    assert 501 == refused.status_code
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_watch_tells_events_between_two_polls(box: Box) -> None:
    box.rpc("/filesystem.Filesystem/MakeDir", {"path": "watched"})
    made = box.rpc("/filesystem.Filesystem/CreateWatcher", {"path": "watched"}).json()
    box.call("POST", "/files?path=watched/new", content=b"1")
    poll = "/filesystem.Filesystem/GetWatcherEvents"
    found = box.rpc(poll, made).json()["events"]

    assert [("new", f"EVENT_TYPE_{kind}") for kind in ("CREATE", "CHMOD", "WRITE")] == [
        (each["name"], each["type"]) for each in found
    ]
    box.rpc("/filesystem.Filesystem/Remove", {"path": "watched/new"})
    assert [{"name": "new", "type": "EVENT_TYPE_REMOVE"}] == box.rpc(poll, made).json()["events"]
    assert 200 == box.rpc("/filesystem.Filesystem/RemoveWatcher", made).status_code
    assert 404 == box.rpc("/filesystem.Filesystem/GetWatcherEvents", made).status_code


@pytest.mark.full
def test_a_watch_describes_entries_where_that_is_asked_for(box: Box) -> None:
    box.rpc("/filesystem.Filesystem/MakeDir", {"path": "told"})
    asked = {"path": "told", "includeEntry": True}
    made = box.rpc("/filesystem.Filesystem/CreateWatcher", asked).json()
    box.call("POST", "/files?path=told/kept", content=b"12", headers={"X-Metadata-By": "ann"})
    wanted = box.rpc("/filesystem.Filesystem/Stat", {"path": "told/kept"}).json()["entry"]
    found: list[dict[str, object]] = []
    # The event of the write may be looked at before the metadata are there: theirs comes next.
    deadline = time.monotonic() + 30
    while wanted not in [each["entry"] for each in found]:
        assert time.monotonic() < deadline, found
        found += box.rpc("/filesystem.Filesystem/GetWatcherEvents", made).json()["events"]
    assert "EVENT_TYPE_WRITE" in {each["type"] for each in found}
    box.rpc("/filesystem.Filesystem/Remove", {"path": "told/kept"})
    *_, last = box.rpc("/filesystem.Filesystem/GetWatcherEvents", made).json()["events"]
    assert {"name": "kept", "type": "EVENT_TYPE_REMOVE"} == last
    # A stream tells the same: here of what goes on all the time.
    more = "end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do echo 1 > told/more; done"
    writer = threading.Thread(target=box.run, args=(more,))
    writer.start()
    ends = {"connect-timeout-ms": "1000"}
    streamed = box.stream("/filesystem.Filesystem/WatchDir", asked, headers=ends)
    writer.join(20)
    told = [each["filesystem"] for each in streamed if "filesystem" in each]
    assert told
    assert {"/home/user/told/more"} == {each["entry"]["path"] for each in told}


def test_a_watch_tells_what_a_new_directory_holds_and_ends_in_time(box: Box) -> None:
    box.rpc("/filesystem.Filesystem/MakeDir", {"path": "grown"})
    asked = {"path": "grown", "recursive": True}
    made = box.rpc("/filesystem.Filesystem/CreateWatcher", asked).json()
    box.run("mkdir grown/in && echo 1 > grown/in/file")
    found = box.rpc("/filesystem.Filesystem/GetWatcherEvents", made).json()["events"]

    assert {("in", "EVENT_TYPE_CREATE"), ("in/file", "EVENT_TYPE_WRITE")} <= {
        (each["name"], each["type"]) for each in found
    }
    ends = {"connect-timeout-ms": "200"}
    *_, last = box.stream("/filesystem.Filesystem/WatchDir", asked, headers=ends)
    assert "deadline_exceeded" == last["error"]["code"]


def test_the_end_of_a_sandbox_is_named_by_whom_it_cuts_off(client: Client) -> None:
    made, ended = client.create(), threading.Event()
    messages: list[dict[str, object]] = []

    def follow() -> None:
        messages.extend(made.run("echo begun > /tmp/begun; sleep 60"))
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    until = time.monotonic() + 20
    while made.call("GET", "/files?path=/tmp/begun").status_code != 200:
        assert time.monotonic() < until
    client.api("DELETE", f"/sandboxes/{made.id}")

    assert ended.wait(20)
    error = messages[-1]["error"]
    assert "unavailable" == error["code"]  # type: ignore[index]
    assert "sandbox was killed or reached its end of life" in error["message"]  # type: ignore[index]


def test_the_deadline_of_a_sandbox_reads_the_same_each_time(client: Client, box: Box) -> None:
    ends = {client.api("GET", f"/sandboxes/{box.id}").json()["endAt"] for _ in range(20)}

    assert 1 == len(ends)


def test_a_sandbox_without_a_timeout_lives_for_five_minutes(client: Client) -> None:
    made = client.api("POST", "/v2/sandboxes", json={"templateID": "base"})
    assert 201 == made.status_code, made.text
    at = f"/sandboxes/{made.json()['sandboxID']}"
    found = client.api("GET", at).json()
    begun, end = (
        datetime.fromisoformat(found[name].replace("Z", "+00:00"))
        for name in ("startedAt", "endAt")
    )
    assert 299 <= (end - begun).total_seconds() <= 301
    assert 204 == client.api("DELETE", at).status_code


def test_sudo_gives_no_rights(box: Box) -> None:
    assert "sandbox set\n" == _text(
        box.run("echo $(sudo -n -u root whoami) $(A=1 sudo A=set printenv A)")
    )


def _boot_id(box: Box) -> str:
    answer = box.call("GET", "/files?path=/proc/sys/kernel/random/boot_id")
    assert 200 == answer.status_code, answer.text
    return answer.text


@pytest.mark.parametrize("by", ["pause", "deadline", "connect", "resume"])
def test_a_sandbox_paused_without_memory_starts_anew(client: Client, by: str) -> None:
    box = client.create(timeout=60, autoPause=True, autoPauseMemory=by != "deadline")
    before = _boot_id(box)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        assert file.read() != before
    box.run("echo kept > kept; setsid sleep 1000 >/dev/null 2>&1 &")
    if by != "deadline":
        memory = {"memory": by != "pause"}
        pausing = client.api("POST", f"/sandboxes/{box.id}/pause", json=memory)
        assert 204 == pausing.status_code
    else:
        client.api("POST", f"/sandboxes/{box.id}/timeout", json={"timeout": 0})
        until = time.monotonic() + 20
        while "paused" != client.api("GET", f"/sandboxes/{box.id}").json()["state"]:
            assert time.monotonic() < until
            time.sleep(0.05)
    waking = f"/sandboxes/{box.id}/{'resume' if by == 'resume' else 'connect'}"
    form = {"timeout": 60, "memory": by in ("pause", "deadline")}
    assert 201 == client.api("POST", waking, json=form).status_code

    assert "kept\n" == _text(box.run("cat kept"))
    assert "" == _text(box.run("pgrep sleep"))
    assert before != _boot_id(box)
    middle = _boot_id(box)
    client.api("POST", f"/sandboxes/{box.id}/pause", json={})
    client.api("POST", f"/v2/sandboxes/{box.id}/connect", json={"timeout": 60})
    assert middle == _boot_id(box), "with its memory it is the same boot"
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_paused_sandbox_keeps_its_id_and_processes(client: Client) -> None:
    box = client.create()
    box.run("echo kept > /tmp/kept")
    assert 204 == client.api("POST", f"/sandboxes/{box.id}/pause", json={}).status_code
    assert 409 == client.api("POST", f"/sandboxes/{box.id}/pause", json={}).status_code
    assert "paused" == client.api("GET", f"/sandboxes/{box.id}").json()["state"]
    assert 502 == box.call("GET", "/health").status_code
    gone = box.rpc("/process.Process/List", {})
    assert (502, "The sandbox was not found") == (gone.status_code, gone.json()["message"])

    opened = client.api("POST", f"/v2/sandboxes/{box.id}/connect", json={"timeout": 60})
    assert 201 == opened.status_code
    assert box.made["envdAccessToken"] == opened.json()["envdAccessToken"]
    assert "kept\n" == _text(box.run("cat /tmp/kept"))
    again = client.api("POST", f"/v2/sandboxes/{box.id}/connect", json={"timeout": 1})
    assert 200 == again.status_code
    client.api("DELETE", f"/sandboxes/{box.id}")


@pytest.mark.parametrize("wakes", [False, True])
def test_a_signed_url_finds_a_sandbox_paused_with_its_id_and_without(
    client: Client, wakes: bool
) -> None:
    box = client.create(autoResume={"enabled": wakes})
    box.call("POST", "/files?path=kept", content=b"yes")
    query = box.signed("/home/user/kept")
    for headers in ({}, {"E2b-Sandbox-Id": box.id}):
        assert 204 == client.api("POST", f"/sandboxes/{box.id}/pause", json={}).status_code
        found = client.http.get("/files", params=query, headers=headers)
        state = client.api("GET", f"/sandboxes/{box.id}").json()["state"]
        if wakes:
            assert (200, b"yes", "running") == (found.status_code, found.content, state)
        else:
            assert (502, "paused") == (found.status_code, state)
            client.api("POST", f"/sandboxes/{box.id}/connect", json={"timeout": 60})
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_the_end_of_its_time_pauses_and_a_request_wakes(client: Client) -> None:
    box = client.create(timeout=1, autoPause=True, autoResume={"enabled": True})
    until = time.monotonic() + 20
    while "paused" != client.api("GET", f"/sandboxes/{box.id}").json()["state"]:
        assert time.monotonic() < until
        time.sleep(0.05)

    assert "back\n" == _text(box.run("echo back"))
    assert "running" == client.api("GET", f"/sandboxes/{box.id}").json()["state"]
    client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_snapshot_has_a_name_and_is_a_template(client: Client, box: Box) -> None:
    box.call("POST", "/files?path=saved", content=b"yes")
    made = client.api("POST", f"/sandboxes/{box.id}/snapshots", json={"name": "base2"}).json()
    assert (["base2:default"], "ringfence/base2:default") == (made["names"], made["snapshotID"])

    restored = client.create(templateID=made["snapshotID"])
    assert b"yes" == restored.call("GET", "/files?path=saved").content
    (fork,) = client.api("POST", f"/sandboxes/{restored.id}/fork", json={"count": 1}).json()
    assert Box(client.http, fork["sandbox"]).call("GET", "/files?path=saved").content == b"yes"
    for each in (restored.id, fork["sandbox"]["sandboxID"]):
        client.api("DELETE", f"/sandboxes/{each}")
    path = f"/templates/{made['snapshotID']}"
    assert [204, 404] == [client.api("DELETE", path).status_code for _ in range(2)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/volumes"), ("POST", "/secrets"), ("POST", "/access-tokens"), ("GET", "/nodes")],
)
def test_a_refusal_says_so(client: Client, method: str, path: str) -> None:
    answer = client.api(method, path, **({"json": {}} if method == "POST" else {}))

    assert 501 == answer.status_code
    assert "not" in answer.json()["message"]
    refused = client.api("POST", "/v2/sandboxes", json={"volumeMounts": [{"name": "v"}]})
    assert (501, 501) == (refused.status_code, refused.json()["code"])


def test_a_command_that_begins_a_session_is_waited_for(box: Box) -> None:
    """An exec leads a session: where bash replaced itself by setsid, that would fork and not wait."""
    begun, *data, last = box.run("setsid sh -c 'echo in; exit 3'")[:-1]
    assert begun["event"]["start"]["pid"] > 0
    text = b"".join(base64.b64decode(each["event"]["data"]["stdout"]) for each in data)
    assert (b"in\n", 3) == (text, last["event"]["end"]["exitCode"])


def test_a_directory_below_a_file_is_refused_as_linux_does(box: Box) -> None:
    box.run("echo > ~/a-file")
    refused = box.rpc("/filesystem.Filesystem/MakeDir", {"path": "/home/user/a-file/child"})
    assert (500, True) == (refused.status_code, "not a directory" in refused.json()["message"])
    control = box.rpc("/filesystem.Filesystem/MakeDir", {"path": "/home/user/a-file"})
    assert "it is not a directory" in control.json()["message"]


def test_templates_of_the_server_are_listed_in_full(client: Client) -> None:
    """E2B's command line shows all of it, and fails on dates that are missing."""
    listed = {each["templateID"]: each for each in client.api("GET", "/templates").json()}
    found = listed["code-interpreter-v1"]

    assert ["code-interpreter-v1"] == found["names"]
    assert min(found["cpuCount"], found["memoryMB"], found["diskSizeMB"]) > 0
    assert abs(datetime.fromisoformat(found["createdAt"]).timestamp() - time.time()) < 3600
    assert found["createdAt"] == found["updatedAt"]


def test_a_sandbox_has_no_log(client: Client, box: Box) -> None:
    for version in ("", "/v2"):
        found = client.api("GET", f"{version}/sandboxes/{box.id}/logs?limit=1000")
        assert (200, []) == (found.status_code, found.json()["logs"])
        assert 404 == client.api("GET", f"{version}/sandboxes/nothing/logs").status_code


def test_a_part_of_a_file(box: Box) -> None:
    """As E2B's newer SDKs read one, and as browsers play a video from a signed URL."""
    url = "/files?path=part"
    box.call("POST", url, content=b"Hello, world!")

    def part(asked: str, **more: str) -> httpx.Response:
        return box.call("GET", url, headers={"Range": asked, **more})

    middle = part("bytes=7-11", **{"Accept-Encoding": "gzip"})
    assert (206, b"world") == (middle.status_code, middle.content)
    assert "bytes 7-11/13" == middle.headers["content-range"]
    assert [b"world!", b"ld!"] == [part(each).content for each in ("bytes=7-", "bytes=-3")]
    assert 416 == part("bytes=13-").status_code
    tag = box.call("GET", url).headers["etag"]
    assert 206 == part("bytes=0-1", **{"If-Range": tag}).status_code
    box.call("POST", url, content=b"changed")
    assert b"changed" == part("bytes=0-1", **{"If-Range": tag}).content
    assert 404 == box.call("GET", "/files?path=nothing", headers={"Range": "bytes=0-1"}).status_code


def test_programs_learn_which_sandbox_they_are_in(client: Client, box: Box) -> None:
    """By variables, and by files where the variables are of another: in a copy."""
    names = ("E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEAM_ID", "E2B_TEMPLATE_ID")
    script = "".join(f'echo "${each}" "$(cat /run/e2b/.{each})";' for each in names)

    def told(where: Box) -> str:
        return _text(where.run(script))

    assert told(box) == f"true true\n{box.id} {box.id}\nringfence ringfence\nbase base\n"
    copied = client.api("POST", f"/sandboxes/{box.id}/fork", json={"count": 1, "timeout": 60})
    copy = Box(client.http, copied.json()[0]["sandbox"])
    assert copy.id != box.id
    assert f"{copy.id} {copy.id}\n" in told(copy)
    client.api("DELETE", f"/sandboxes/{copy.id}")
