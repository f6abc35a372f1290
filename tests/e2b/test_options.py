"""E2B's options as ours: network policies, settings, notes, pages of lists, names and metadata of files."""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from ringfence import Limits, Mount, NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.e2b import entries, lists, metering, network
from ringfence.e2b.call import ApiError
from ringfence.e2b.notes import Notes, client_metadata, notes_of, own_metadata, variables
from ringfence.e2b.settings import E2BSettings, variables_of_root
from ringfence.e2b.tokens import Tokens
from ringfence.errors import FileNotFound, InvalidRequest
from ringfence.store.directory import StateDirectory

pytestmark = pytest.mark.anyone

NONE, PUBLIC = NetworkPolicy(), NetworkPolicy.parse("public")
SPEC = SandboxSpec()


def status_of(action: Any, *args: Any) -> int:
    with pytest.raises(ApiError) as refused:
        action(*args)
    return refused.value.status


# -- network -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "internet", "allowed", "own", "found"),
    [
        ({}, None, NONE, None, ()),
        ({}, None, PUBLIC, None, ("public",)),
        ({}, True, PUBLIC, None, ("public",)),
        ({}, False, PUBLIC, None, ()),
        ({}, None, PUBLIC, "own.test", ("own.test",)),
        ({}, False, PUBLIC, "own.test", ()),
        ({"allowOut": ["a.test"]}, None, NONE, None, ("a.test",)),
        ({"allow_out": ["a.test"]}, False, PUBLIC, None, ("a.test",)),
        ({"allowOut": ["a.test"]}, None, PUBLIC, "own.test", ("own.test", "a.test")),
        ({"denyOut": ["1.2.3.4"]}, None, PUBLIC, None, ("public", "!1.2.3.4")),
        ({"denyOut": ["1.2.3.4"]}, None, NONE, None, ()),
        ({"denyOut": ["0.0.0.0/0"]}, None, PUBLIC, None, ()),
        ({"denyOut": ["::/0"]}, True, PUBLIC, "own.test", ()),
        ({"denyOut": ["0.0.0.0/0", "1.2.3.4"], "allowOut": ["a.test"]}, None, PUBLIC, None, ("a.test",)),
        ({"denyOut": ["a.test", "b.test"], "allowOut": ["a.test"]}, None, PUBLIC, None,
         ("public", "a.test", "!b.test")),
        ({"allowOut": ["0.0.0.0/0", "a.test"]}, None, PUBLIC, None, ("public",)),
        ({"allowOut": ["::/0"]}, False, PUBLIC, None, ()),
        ({"allowOut": ["A.Test."]}, None, NONE, None, ("a.test",)),
    ],
)  # fmt: skip
def test_network_options_are_a_policy(
    form: dict[str, Any],
    internet: bool | None,
    allowed: NetworkPolicy,
    own: str | None,
    found: tuple[str, ...],
) -> None:
    spec = SandboxSpec(network=NetworkPolicy.parse(own)) if own else SPEC
    policy = network.policy_of(form, internet, allowed, spec)
    assert {*NetworkPolicy(allowed_hosts=found).allowed_hosts} == {*policy.allowed_hosts}
    assert not policy.is_unrestricted


def test_what_is_denied_is_so_also_where_a_policy_has_rules_or_learns() -> None:
    """There, rules that only deny take something away: without them all would be open, or denied."""
    ruled = SandboxSpec(network=NetworkPolicy(rules=(NetworkRule("a.test"),)))
    learns = SandboxSpec(network=NetworkPolicy(learn=True))
    for spec in (ruled, learns):
        found = network.policy_of({"denyOut": ["b.test"]}, None, NONE, spec)
        assert ("!b.test",) == found.allowed_hosts
        assert (spec.network.rules, spec.network.learn) == (found.rules, found.learn)


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"rules": [{}]}, 501),
        ({"egressProxy": "x"}, 501),
        ({"dnsServers": ["x"]}, 501),
        ({"allowOut": [1]}, 400),
        ({"denyOut": [None]}, 400),
        ({"allowOut": ["a b"]}, 400),
        ({"allowOut": ["127.1"]}, 400),
    ],
)
def test_network_options_that_cannot_be_kept_are_refused(form: dict[str, Any], status: int) -> None:
    assert status == status_of(network.policy_of, form, None, NONE, SPEC)
    emptied: dict[str, Any] = {name: [] for name in form}
    assert NONE == network.policy_of(emptied, None, NONE, SPEC), "the control"


def test_options_need_a_policy_that_is_limited() -> None:
    everything = NetworkPolicy.parse("unrestricted")
    for form in ({"allowOut": ["a.test"]}, {"denyOut": ["a.test"]}):
        assert 501 == status_of(network.policy_of, form, None, everything, SPEC)
    assert everything == network.policy_of({}, None, everything, SPEC)
    assert NONE == network.policy_of({}, False, everything, SPEC)


@pytest.mark.parametrize(
    ("mask", "is_one"),
    [
        ("", True),
        ("localhost", True),
        ("a.test:8080", True),
        ("localhost:${PORT}", True),
        ("${PORT}.a.test", True),
        ("a b", False),
        ("a\r\nX: y", False),
        ("a/b", False),
        ("a:123456", False),
        ("user@a", False),
        (":80", False),
        ("a" * 254, False),
    ],
)
def test_a_mask_is_a_host_name(mask: str, is_one: bool) -> None:
    form = {"maskRequestHost": mask}
    if is_one:
        assert mask == network.host_mask(form)
    else:
        assert 400 == status_of(network.host_mask, form)


@pytest.mark.parametrize(
    ("ports", "are_some"),
    [
        ([], True),
        ([1, 65535], True),
        (list(range(1, 101)), True),
        (list(range(1, 102)), False),
        ([0], False),
        ([65536], False),
        (["80"], False),
        ([True], False),
        ([80.0], False),
    ],
)
def test_https_ports_are_ports(ports: list[Any], are_some: bool) -> None:
    form = {"httpsPorts": ports}
    if are_some:
        assert tuple(ports) == network.https_ports(form)
    else:
        assert 400 == status_of(network.https_ports, form)


def test_the_policy_in_force_is_shown_as_e2b_shows_one() -> None:
    policy = NetworkPolicy.parse("public,a.test,!b.test")
    live: Any = SimpleNamespace(inner=SimpleNamespace(spec=SandboxSpec(network=policy)))
    shown = network.shown(live, Notes(is_public=False))
    assert {"allowOut": ["a.test"], "denyOut": ["b.test"], "allowPublicTraffic": False} == shown
    more = network.shown(live, Notes(host_mask="h", https_ports=(1, 2)))
    assert ("h", [1, 2], True) == tuple(
        more[name] for name in ("maskRequestHost", "httpsPorts", "allowPublicTraffic")
    )


# -- settings and notes --------------------------------------------------------------------------


def test_a_template_name_stands_for_its_spec_with_a_home() -> None:
    own = SandboxSpec(
        env={"A": "b", "HOME": "/x"}, workdir="/w", mounts=(Mount("/home/user", "/srv"),)
    )
    found = E2BSettings(templates={"own": own, "plain": SandboxSpec()})
    spec = found.spec_of("own:tag")
    assert spec is not None
    assert ("/w", "/x", "user", "b") == (
        spec.workdir,
        *(spec.env[n] for n in ("HOME", "USER", "A")),
    )
    assert ["/home/user", "/run/e2b"] == [each.target for each in spec.mounts], "its own home stays"
    for name in ("base", "code-interpreter-v1", "base:v2", "plain"):
        spec = found.spec_of(name)
        assert spec is not None, name
        assert "/home/user" == spec.workdir == spec.env["HOME"]
        assert {"/home/user", "/run/e2b"} <= {each.target for each in spec.mounts}
        assert all(each.source == "" for each in spec.mounts), "nothing of the host"
    for name in ("other", "", "own2", ":own"):
        assert found.spec_of(name) is None, name
    replaced = E2BSettings(templates={"base": own}).spec_of("base")
    assert replaced is not None
    assert "b" == replaced.env["A"]


@pytest.mark.parametrize("domain", ["a.test", "A.TEST", ".a.test.", "localhost", ""])
def test_a_domain_is_one(domain: str) -> None:
    assert domain.strip(".").lower() == E2BSettings(domain=domain).domain


@pytest.mark.parametrize("domain", ["a b", "-a.test", "a..test", "a.test:80", "*.a.test", "é.test"])
def test_what_is_no_domain_is_refused(domain: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        E2BSettings(domain=domain)
    assert "domain" == refused.value.field


def test_settings_are_read_as_they_are_written() -> None:
    made = E2BSettings(
        templates={"own": SandboxSpec(profile="debug")}, internet=PUBLIC, domain="a.test"
    )
    again = E2BSettings.from_json(json.loads(json.dumps(made.to_json())))
    assert made == again
    assert ("debug", PUBLIC, "a.test") == (
        again.templates["own"].profile,
        again.internet,
        again.domain,
    )
    with pytest.raises(InvalidRequest) as refused:
        E2BSettings.from_json({"templates": {"own": {"profile": 5}}})
    assert "own.profile" in (refused.value.field or "")


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, {"HOME": "/root", "USER": "root", "LOGNAME": "root"}),
        ({"HOME": "/home/user", "USER": "user"}, {"HOME": "/root", "USER": "root", "LOGNAME": "root"}),
        ({"HOME": "/x"}, {"USER": "root", "LOGNAME": "root"}),
        ({"USER": "x", "LOGNAME": "y", "HOME": "/z"}, {}),
    ],
)  # fmt: skip
def test_variables_of_root_give_way_to_those_that_somebody_set(
    env: dict[str, str], found: dict[str, str]
) -> None:
    assert found == variables_of_root(env)


EVERY = Notes(
    template="t",
    key="k",
    auto_resume=True,
    keeps_memory=False,
    is_public=False,
    host_mask="h:${PORT}",
    https_ports=[1, 2],
    internet=False,
    boots=3,
)


@pytest.mark.parametrize("notes", [Notes(), EVERY])
def test_notes_are_read_as_they_are_written(notes: Notes) -> None:
    metadata = notes.written({"mine": "x", "name": "y"})
    found = notes_of(metadata)
    assert notes.__dict__ | {"https_ports": [*notes.https_ports]} == found.__dict__ | {
        "https_ports": [*found.https_ports]
    }
    assert {"mine": "x", "name": "y"} == client_metadata(metadata)
    assert {"mine": "x"} == own_metadata(metadata)
    with pytest.raises(InvalidRequest, match="reserved"):
        notes.written({"e2b": "x"})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", '"x"', "[" * 5000])
def test_notes_that_cannot_be_read_open_nothing(text: str) -> None:
    for metadata in ({"e2b": text}, {}):
        found = notes_of(metadata)
        assert (False, False, "") == (found.is_public, found.auto_resume, found.key)


def test_notes_of_a_later_version_are_read_but_for_what_is_unknown() -> None:
    found = notes_of(
        {"e2b": json.dumps({"template": 5, "key": ["x"], "later": 1, "is_public": False})}
    )
    assert ("5", "['x']", False) == (found.template, found.key, found.is_public)


def test_each_command_learns_which_sandbox_it_is_in() -> None:
    live: Any = SimpleNamespace(sandbox_id="sbx-1", metadata=EVERY.written({}))
    assert {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": "sbx-1",
        "E2B_TEAM_ID": "ringfence",
        "E2B_TEMPLATE_ID": "t",
    } == variables(live)


# -- tokens --------------------------------------------------------------------------------------


def test_the_secret_of_tokens_outlives_the_server_and_is_its_users_alone(tmp_path: Path) -> None:
    live: Any = SimpleNamespace(id="ses-1", sandbox_id="sbx-1")
    directory = StateDirectory(str(tmp_path / "state"))
    file = Path(directory.file("e2b.secret"))
    first = Tokens(directory).of(live)
    assert (32, 0o600) == (file.stat().st_size, stat.S_IMODE(file.stat().st_mode))
    assert not Path(f"{file}.new").exists()
    assert first == Tokens(directory).of(live)
    for cut in (b"", b"x" * 31, b"x" * 33):
        file.write_bytes(cut)
        made = Tokens(directory).of(live)
        assert made != first, "a file that was cut short would be easy to guess"
        assert (32, made) == (file.stat().st_size, Tokens(directory).of(live))
    directory.close()


def test_a_signature_is_for_each_of_its_parts() -> None:
    tokens = Tokens(None)
    parts = ("tmpl-1", "hash", 100)
    signed = tokens.upload(*parts)
    assert signed == tokens.upload(*parts)
    for other in (("tmpl-2", "hash", 100), ("tmpl-1", "other", 100), ("tmpl-1", "hash", 101)):
        assert signed != tokens.upload(*other)


def signature(tokens: Tokens, live: Any, *parts: str) -> str:
    import hashlib

    *front, until = parts
    text = ":".join([*front, tokens.of(live), *([until] if until else [])])
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.mark.parametrize("seconds", [-2, 5])
def test_a_signed_url_ends_in_time(seconds: int) -> None:
    tokens, live = Tokens(None), SimpleNamespace(id="ses-1", sandbox_id="sbx-1")
    until = str(int(time.time()) + seconds)
    query = {
        "path": "/a",
        "username": "u",
        "signature_expiration": until,
        "signature": signature(tokens, live, "/a", "read", "u", until),
    }
    said = tokens.signs(live, "read", query)  # type: ignore[arg-type]
    assert ("" if seconds > 0 else "signature is already expired") == said
    for change in (
        {"path": "/b"},
        {"username": "v"},
        {"signature_expiration": str(int(until) + 1)},
        {"signature_expiration": ""},
        {"signature_expiration": f"+{until}"},
        {"signature_expiration": "9" * 19},
        {"signature": query["signature"] + "="},
        {"signature": ""},
        {"username": "u:"},
    ):
        assert "invalid signature" == tokens.signs(live, "read", {**query, **change})  # type: ignore[arg-type]
    assert "invalid signature" == tokens.signs(live, "write", query)  # type: ignore[arg-type]


def test_no_part_of_a_signed_text_passes_for_another() -> None:
    """With a colon in a name, one text would be signed for two things."""
    tokens, live = Tokens(None), SimpleNamespace(id="ses-1", sandbox_id="sbx-1")
    signed = signature(tokens, live, "/a", "read", "write", "u", "")
    ways = {
        ("/a:read", "write", "u"): "",
        ("/a", "read", "write:u"): "invalid signature",
    }
    found = {
        (path, operation, user): tokens.signs(
            live,  # type: ignore[arg-type]
            operation,
            {"path": path, "username": user, "signature": signed},
        )
        for path, operation, user in ways
    }
    assert ways == found


@pytest.mark.parametrize(("length", "is_one"), [(4096, True), (4097, False)])
def test_a_path_that_no_file_can_have_is_not_signed(length: int, is_one: bool) -> None:
    tokens, live = Tokens(None), SimpleNamespace(id="ses-1", sandbox_id="sbx-1")
    path = "/" + "x" * (length - 1)
    query = {"path": path, "signature": signature(tokens, live, path, "read", "", "")}
    assert is_one == ("" == tokens.signs(live, "read", query))  # type: ignore[arg-type]
    longer = {**query, "path": f"{path}x"}
    assert "invalid signature" == tokens.signs(live, "read", longer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("until", "is_one"), [("9" * 18, True), ("9" * 19, False), ("9" * 25, False)]
)
def test_a_time_that_no_clock_will_have_is_not_signed(until: str, is_one: bool) -> None:
    tokens, live = Tokens(None), SimpleNamespace(id="ses-1", sandbox_id="sbx-1")
    signed = signature(tokens, live, "/a", "read", "", until)
    query = {"path": "/a", "signature": signed, "signature_expiration": until}
    assert is_one == ("" == tokens.signs(live, "read", query))  # type: ignore[arg-type]


def test_the_secret_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash it would otherwise be empty, or zeros that everybody can guess."""
    directory, done = StateDirectory(str(tmp_path / "state")), list[str]()
    fsync, replace = os.fsync, os.replace

    def syncing(fd: int) -> None:
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
        assert 32 == os.fstat(fd).st_size
        fsync(fd)

    def replacing(source: str, target: str) -> None:
        done.append(f"rename {os.path.basename(source)}")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", syncing)
        patch.setattr(os, "replace", replacing)
        Tokens(directory)
    directory.close()
    assert ["sync e2b.secret.new", "rename e2b.secret.new"] == done


# -- lists ---------------------------------------------------------------------------------------


def listing(**query: str) -> Any:
    of_gateway = query.pop("of_gateway", "")
    request = SimpleNamespace(
        query_params=query, scope={"state": {"is_of_gateway": bool(of_gateway)}}
    )
    return SimpleNamespace(request=request)


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 100])
def test_pages_have_each_item_once(newest_first: bool, limit: int) -> None:
    items = [(f"id-{number}", number) for number in range(5)]
    ordered = items[::-1] if newest_first else items
    found: list[int] = []
    query: dict[str, str] = {"limit": str(limit)}
    for _ in range(6):
        page, headers = lists.page(listing(**query), ordered, newest_first)
        assert len(page) <= limit
        found += page
        if "x-next-token" not in headers:
            break
        query["nextToken"] = headers["x-next-token"]
    assert [number for _, number in ordered] == found


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "", "0000001"])
def test_a_page_is_of_so_many(limit: str) -> None:
    assert 400 == status_of(lists.page, listing(limit=limit), [], True)
    assert ([], {}) == lists.page(listing(), [], True)
    assert 100 == len(lists.page(listing(), [(str(n), n) for n in range(101)], False)[0])


def test_a_token_of_a_page_is_one() -> None:
    assert 400 == status_of(lists.page, listing(nextToken="A"), [("a", 1)], True)


def test_a_gateway_is_told_the_order() -> None:
    items = [("b", 1), ("a", 2)]
    assert {lists.ORDER: "b,a"} == lists.page(listing(of_gateway="yes"), items, True)[1]
    assert {} == lists.page(listing(), items, True)[1]


def test_sandboxes_since_a_time_are_those_from_that_very_moment_on() -> None:
    lives: list[Any] = [SimpleNamespace(created_at=at) for at in (999.0, 1000.0, 1000.5)]
    for text, count in (
        ("1970-01-01T00:16:40Z", 2),
        ("1970-01-01T00:16:40.000000000Z", 2),
        ("1970-01-01T00:16:40.000001Z", 1),
        ("1970-01-01T02:16:40 02:00", 2),
        ("1970-01-01T00:16:39Z", 3),
    ):
        assert count == len(lists.started_after(text, lives)), text
    for bad in ("", "soon", "1970-13-01T00:00:00Z", "9999-12-31T23:59:59-23:59"):
        assert 400 == status_of(lists.started_after, bad, lives), bad


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", "/h/a"), ("", "/h"), ("~", "/h"), ("~/a", "/h/a"), ("~a", "/h/~a"), ("/a", "/a"),
        ("/a/../b", "/b"), ("../b", "/b"), ("a/./b/", "/h/a/b"), ("/", "/"), ("../../..", "/"),
    ],
)  # fmt: skip
def test_paths_begin_at_home(path: str, found: str) -> None:
    assert found == entries.absolute(path, "/h")


def test_metadata_of_a_file_is_bounded_and_printable() -> None:
    given = entries.given
    assert {"a-b": "x y"} == given({"X-Metadata-A-B": "x y", "Content-Type": "z"})
    for good in ({"x-metadata-" + "n" * 246: ""}, {"x-metadata-a": "v" * (4096 - 10)}):
        assert 1 == len(given(good))
    for bad in (
        {"x-metadata-": "v"},
        {"x-metadata-" + "n" * 247: "v"},
        {"x-metadata-é": "v"},
        {"x-metadata-a\t": "v"},
        {"x-metadata-a": "é"},
        {"x-metadata-a": "a\nb"},
        {"x-metadata-a": "v" * (4096 - 9)},
        {"x-metadata-a": "v" * 2038, "x-metadata-b": "v" * 2039},
    ):
        assert 400 == status_of(given, bad), bad


class HostFiles:
    """Files of the host's: what `entries` needs of a backend's."""

    @staticmethod
    def open_read(path: str) -> BinaryIO:
        try:
            return open(path, "rb")
        except OSError as exc:
            raise FileNotFound(path) from exc


def test_metadata_replaces_what_was_there_and_is_told_of_those_that_have_some(
    tmp_path: Path,
) -> None:
    files: Any = HostFiles()
    paths = [str(tmp_path / name) for name in ("a", "b", "gone")]
    for path in paths[:2]:
        Path(path).touch()
    try:
        os.setxattr(paths[0], "user.other", b"stays")
    except OSError:
        pytest.skip("no extended attributes here")
    for notes in ({"k": "v", "l": "w"}, {"k": "v2"}, {}):
        with open(paths[0], "rb") as file:
            entries.put(files, paths[0], file, notes)
        assert ({paths[0]: notes} if notes else {}) == entries.read(files, paths)
    assert b"stays" == os.getxattr(paths[0], "user.other")


def test_metadata_that_cannot_be_kept_is_refused_and_none_is_not(tmp_path: Path) -> None:
    """Only where some was given: else every upload to such a place would fail."""
    files: Any = HostFiles()
    with open("/proc/self/status", "rb") as file:  # a regular file without such attributes
        entries.put(files, "/x", file, {})
        with pytest.raises(OSError) as refused:
            os.setxattr(file.fileno(), "user.try", b"")
        cannot = refused.value.errno == errno.ENOTSUP  # some users may not, which comes first
        found = status_of(entries.put, files, "/x", file, {"a": "b"})
        assert (501 if cannot else 507) == found
    (tmp_path / "f").touch()
    with open(tmp_path / "f", "rb") as file:
        try:
            os.setxattr(file.fileno(), "user.try", b"")
        except OSError:
            pytest.skip("no extended attributes here")
        assert 507 == status_of(entries.put, files, "/x", file, {"a": "v" * 70_000})


# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_are_never_nothing() -> None:
    assert {"cpuCount": 2, "memoryMB": 3, "diskSizeMB": 4} == metering.sizes(
        Limits(cpus=2.4, memory_bytes=3 << 20, disk_bytes=4 << 20).to_json()
    )
    assert 1 == metering.sizes(Limits(cpus=0.1).to_json())["cpuCount"]
    assert all(each > 0 for each in metering.sizes({}).values())


@pytest.mark.parametrize(
    ("before", "percent"),
    [(None, 0.0), ((0.0, 0), 50.0), ((9.0, 10**9), 400.0), ((10.0, 5 * 10**9), 0.0)],
)
def test_use_of_processors_is_between_two_samples(
    before: tuple[float, int] | None, percent: float
) -> None:
    live: Any = SimpleNamespace(spec=SandboxSpec(limits=Limits(cpus=2, memory_bytes=1 << 30)))
    earlier = metering._Sample(*before, 0, 0) if before else None
    point = metering._point(live, metering._Sample(10.0, 5 * 10**9, 7, 8), earlier)
    assert (percent, 2, 7, 8, 1 << 30, 10) == tuple(
        point[name]
        for name in ("cpuUsedPct", "cpuCount", "memUsed", "diskUsed", "memTotal", "timestampUnix")
    )


async def test_points_are_those_between_two_moments_and_of_this_sandbox() -> None:
    from tests.e2b.here import Here

    with ExitStack() as stack:
        here = Here(stack)
        live, meter = here.live(notes=Notes()), here.shared.meter
        meter._samples[live.sandbox_id] = deque(
            metering._Sample(float(at), 0, at, 0) for at in (1, 2, 3)
        )
        for start, end, found in ((1, 3, [1, 2, 3]), (2, 2, [2]), (1.5, 2.5, [2]), (4, 9, [])):
            points = await meter.points(live, start, end)
            assert found == [each["memUsed"] for each in points]
        other = here.live(notes=Notes())
        assert [] == await meter.points(other, 0, 9)
