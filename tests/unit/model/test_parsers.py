"""What people type: mounts, sizes, durations, host lists, ids."""

from __future__ import annotations

import math
import string
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model import strategies as some

from ringfence.errors import InvalidRequest
from ringfence.model import Limits, Mount, NetworkPolicy, SandboxSpec, parse_duration, parse_size
from ringfence.model.base.checks import normal_path
from ringfence.model.base.ids import MAX_LENGTH, check_id, new_id

pytestmark = pytest.mark.anyone


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("0", 0), ("4096", 4096), ("64k", 65536), ("256m", 2**28), ("256M", 2**28),
            ("1g", 2**30), ("1G", 2**30), ("2t", 2**41), ("1KiB", 1024), ("1.5GiB", 3 * 2**29),
            ("10MB", 10 * 2**20), ("5b", 5), (" 7 k ", 7168), ("9007199254740993", 2**53 + 1),
        ],
    )  # fmt: skip
    def test_sizes(self, text: str, size: int) -> None:
        assert size == parse_size(text)

    @pytest.mark.parametrize(
        "text",
        ["", "m", "-1", "+1", "1e3", "nan", "inf", "1.2.3", ".5", "5.", "1x", "1bb", "1ibib",
         "0x10", "1_000", "٣", "1" * 40],
    )  # fmt: skip
    def test_no_sizes(self, text: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            parse_size(text, "memory")

        assert "memory" == refusal.value.field

    @given(st.integers(0, 2**60), st.sampled_from(["", "k", "M", "GiB", "tb"]))
    def test_whole_sizes_are_exact(self, number: int, unit: str) -> None:
        factor = 1024 ** " kmgt".index((unit.lower() or " ")[0])

        assert number * factor == parse_size(f"{number}{unit}")


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("5", 5), ("1.5", 1.5), ("5s", 5), ("500ms", 0.5), ("1m", 60), ("2h", 7200), ("1d", 86400),
         ("7 s", 7), ("1ms", 0.001)],
    )  # fmt: skip
    def test_durations(self, text: str, seconds: float) -> None:
        assert seconds == parse_duration(text)

    @pytest.mark.parametrize(
        "text", ["", "s", "-1s", "1e3", "nan", "inf", "5 minutes", "1:30", "5ss"]
    )
    def test_no_durations(self, text: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            parse_duration(text, "timeout")

        assert "timeout" == refusal.value.field

    @given(st.text(string.printable, max_size=12))
    def test_any_text_is_a_number_or_refused(self, text: str) -> None:
        for parse in (parse_size, parse_duration):
            try:
                value = parse(text)
            except InvalidRequest:
                continue
            assert value >= 0
            assert math.isfinite(value)


class TestMounts:
    @pytest.mark.parametrize(
        ("text", "mount"),
        [
            ("/src:/dst", Mount("/dst", "/src")),
            ("/src:/dst:ro", Mount("/dst", "/src")),
            ("/src:/dst:rw", Mount("/dst", "/src", "read_write")),
            (":/dst:rw", Mount("/dst", "", "read_write")),
            ("/with:colon:/dst:rw", Mount("/dst", "/with:colon", "read_write")),
            (".:/work:rw", Mount("/work", "/here", "read_write")),
            ("sub/dir:/work", Mount("/work", "/here/sub/dir")),
            ("../up:/work", Mount("/work", "/here/../up")),
            ("/ro:/dst//x/./", Mount("/dst/x", "/ro")),
        ],
    )
    def test_mounts(self, text: str, mount: Mount) -> None:
        assert mount == Mount.parse(text, relative_to="/here")

    def test_a_relative_source_without_a_base_is_the_sessions(self) -> None:
        mount = Mount.parse("sub/dir:/work")

        assert ("sub/dir", False) == (mount.source, mount.is_host_path)

    @pytest.mark.parametrize(
        ("text", "field"),
        [
            ("", "mount"), ("/only", "mount"), ("/a:", "mount"), ("/a:ro", "mount"),
            ("/a:b", "mount.target"), ("/a:/b:RO", "mount.access"), ("/a:/b:rw:x", "mount.target"),
            ("/a:/", "mount.target"), ("/a:/proc/x:ro", "mount.target"),
            ("/a:/x/../y", "mount.target"),
            ("../up:/work", "mount.source"), ("/a\0:/b", "mount"),
        ],
    )  # fmt: skip
    def test_no_mounts(self, text: str, field: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            Mount.parse(text)

        assert field == refusal.value.field

    @given(
        some.targets.filter(lambda t: ":" not in t),
        some.absolute_paths,
        st.sampled_from(["ro", "rw"]),
    )
    def test_what_is_written_out_is_read(self, target: str, source: str, access: str) -> None:
        mount = Mount.parse(f"{source}:{target}:{access}")

        assert (target, source, access == "rw") == (mount.target, mount.source, mount.is_writable)

    @given(st.text(max_size=30))
    def test_any_text_is_a_mount_or_refused(self, text: str) -> None:
        try:
            mount = Mount.parse(text)
        except InvalidRequest:
            return
        assert mount.target.startswith("/")
        assert ".." not in mount.target.split("/")
        assert "\0" not in mount.target + mount.source

    @pytest.mark.parametrize(
        "target", ["/libfoo/x", "/usr/local", "/etc/app", "/home", "/procfs", "/opt/dev"]
    )
    def test_neighbours_of_what_is_reserved(self, target: str) -> None:
        assert target == Mount(target).target

    @pytest.mark.parametrize("source", ["../up", "a/../../b", "a\0b"])
    def test_a_session_source_stays_in_the_session(self, source: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            Mount("/work", source)

        assert "source" == refusal.value.field

    @pytest.mark.parametrize("path", ["", ".", "/abs", "../x", "a\0"])
    def test_what_cannot_be_protected(self, path: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            Mount("/work", "/src", protect=(path,))

        assert "protect[0]" == refusal.value.field


class TestPaths:
    @given(some.any_text)
    def test_normalising_is_idempotent_and_safe(self, path: str) -> None:
        try:
            once = normal_path(path, "path")
        except InvalidRequest:
            return
        if once:
            assert once == normal_path(once, "path")
        assert once.startswith("/") == path.startswith("/")
        assert not {"..", ".", ""}.intersection(
            once.removeprefix("/").split("/") if once.strip("/") else []
        )

    @given(st.lists(some.parts, min_size=1, max_size=5), st.data())
    def test_noise_in_a_path_changes_nothing(self, parts: list[str], data: st.DataObject) -> None:
        noise = st.sampled_from(["/", "//", "/./", "/././/"])
        noisy = "".join(data.draw(noise) + part for part in parts) + data.draw(
            st.sampled_from(["", "/", "//."])
        )

        assert "/" + "/".join(parts) == normal_path(noisy, "path")

    @given(st.lists(some.parts, max_size=4), st.lists(some.parts, max_size=4))
    def test_a_step_up_is_refused_wherever_it_is(self, before: list[str], after: list[str]) -> None:
        with pytest.raises(InvalidRequest):
            normal_path("/" + "/".join([*before, "..", *after]), "path")

    @pytest.mark.parametrize("path", ["/" + "a" * 256, "/" + "ü" * 128, "/a" * 2048])
    def test_too_long_for_the_kernel(self, path: str) -> None:
        with pytest.raises(InvalidRequest):
            normal_path(path, "path")

    def test_a_lone_surrogate_cannot_be_written(self) -> None:
        with pytest.raises(InvalidRequest):
            normal_path("/\ud800", "path")


class TestNetworks:
    def test_policies(self) -> None:
        assert NetworkPolicy.parse("none").is_none
        assert NetworkPolicy.parse("unrestricted").is_unrestricted
        assert ("a.com", "*.b.org:443") == NetworkPolicy.parse("a.com, *.B.org:443").allowed_hosts

    @pytest.mark.parametrize(
        ("given", "canonical"),
        [
            ("Example.COM", "example.com"), ("example.com.", "example.com"),
            ("a.com:0443", "a.com:443"),
            ("10.0.0.0/8", "10.0.0.0/8"), ("1.2.3.4:80", "1.2.3.4:80"), ("::1", "::1"),
            ("[::1]", "::1"), ("[0:0::1]:80", "[::1]:80"), ("fe80::/10", "fe80::/10"),
            ("localhost", "localhost"), ("_dmarc.a.com", "_dmarc.a.com"),
        ],
    )  # fmt: skip
    def test_one_spelling_of_each_rule(self, given: str, canonical: str) -> None:
        assert (canonical,) == NetworkPolicy(allowed_hosts=(given,)).allowed_hosts

    @pytest.mark.parametrize(
        "host",
        [
            "", " ", "a b", "a..b", "-a.com", "a-.com", "a.com:", "a.com:0", "a.com:65536",
            "a.com:x",
            "*", "*.", "*.com", "a.*.com", "**.a.com", "http://a.com", "a.com/path", "u@a.com",
            "a.com%00", "a\0.com", "ä.com", "127.1", "2130706433", "0x7f.0.0.1", "0x7f000001",
            "017700000001", "1.2.3", "1.2.3.4.5", "01.2.3.4", "10.0.0.1/8", "10.0.0.0/33",
            "[::1", "[::1]x", "[::1]:", "::g", "1.2.3.4.", "a" * 64 + ".com", "a.com,b.com",
        ],
    )  # fmt: skip
    def test_what_is_no_rule(self, host: str) -> None:
        """Above all whatever a resolver reads as an address and a careless eye as a name."""
        with pytest.raises(InvalidRequest) as refusal:
            NetworkPolicy(allowed_hosts=(host,))

        assert "allowed_hosts[0]" == refusal.value.field

    @given(st.lists(some.hosts, min_size=1, max_size=4))
    def test_rules_are_canonical(self, hosts: list[str]) -> None:
        once = NetworkPolicy(allowed_hosts=tuple(hosts))

        assert once == NetworkPolicy(allowed_hosts=once.allowed_hosts)
        assert once == NetworkPolicy.parse(",".join(hosts))

    @given(st.text(max_size=30))
    def test_any_text_is_a_policy_or_refused(self, text: str) -> None:
        try:
            policy = NetworkPolicy.parse(text)
        except InvalidRequest:
            return
        assert policy.is_none == (text.strip() == "none")

    def test_unrestricted_has_no_list(self) -> None:
        with pytest.raises(InvalidRequest):
            NetworkPolicy("unrestricted", ("a.com",))


class TestIds:
    @given(st.sampled_from(["native", "sbx", "sess", "a" * 26]))
    def test_new_ids_are_ids_in_order(self, prefix: str) -> None:
        made = [new_id(prefix) for _ in range(50)]

        assert sorted(set(made)) == made
        assert all(each == check_id(each) and len(each) <= MAX_LENGTH for each in made)

    def test_new_ids_are_version_7(self) -> None:
        _, _, uuid = new_id("native").partition("-")

        assert ("7", True) == (uuid[14], uuid[19] in "89ab")

    def test_a_prefix_that_would_not_fit(self) -> None:
        for prefix in ("a" * 27, "", "A", "../x"):
            with pytest.raises(InvalidRequest):
                new_id(prefix)

    @pytest.mark.parametrize(
        "given",
        ["", "  ", ".", "..", "a/b", "a.b", "A", "a_b", "-a", "a-", "a b", "é", "a\n", "a\0",
         "x" * 64, 7],
    )  # fmt: skip
    def test_what_is_no_id(self, given: object) -> None:
        if given == "a\n":
            assert "a" == check_id(given)  # white space around is trimmed
            return
        with pytest.raises(InvalidRequest) as refusal:
            check_id(given)

        assert "id" == refusal.value.field

    @given(st.text())
    def test_an_id_is_never_a_path(self, given: str) -> None:
        try:
            checked = check_id(given)
        except InvalidRequest:
            return
        assert checked == given.strip()
        assert not set(checked) - set(string.ascii_lowercase + string.digits + "-")


class TestLimits:
    @given(some.limits)
    def test_seconds_and_cores_are_exact(self, limits: Limits) -> None:
        assert limits == Limits.from_json(limits.to_json())

    def test_whole_seconds_become_floats(self) -> None:
        assert isinstance(Limits(wall_time_s=5).wall_time_s, float)

    @given(st.floats(max_value=0) | st.just(math.nan) | st.just(math.inf))
    def test_times_that_make_no_sense(self, value: float) -> None:
        for name in ("wall_time_s", "idle_timeout_s", "cpus"):
            with pytest.raises(InvalidRequest) as refusal:
                Limits(**cast("Any", {name: value}))
            assert name == refusal.value.field


class TestSpecs:
    def test_the_default_is_safe(self) -> None:
        spec = SandboxSpec()

        assert spec.network.is_none
        assert ("os_hardened", "light") == (spec.profile, spec.tier)
        assert () == spec.allow_degraded

    def test_users_by_name_and_number(self) -> None:
        assert "1000" == SandboxSpec(user="01000").user == SandboxSpec(user=1000).user  # type: ignore[arg-type]
        assert "sandbox" == SandboxSpec(user="sandbox").user

    @pytest.mark.parametrize(
        "user", ["", "-1", "4294967295", "a b", "a/b", "x" * 33, "root\n", -1, True]
    )
    def test_what_is_no_user(self, user: object) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            SandboxSpec(user=user)  # type: ignore[arg-type]

        assert "user" == refusal.value.field
