"""Parts of every backend on this host: answers, what is given back, sizes, reports, and where mounts may be."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local import comparing, launched, reports, routes
from ringfence.backends.local.acquired import Acquired
from ringfence.backends.local.answers import Refused, answer
from ringfence.backends.local.base import LocalBackend
from ringfence.backends.local.host import blockers
from ringfence.backends.local.host.accounts import find
from ringfence.backends.local.launched import Launched, last_words, room_for_words
from ringfence.backends.local.refusals import error_of, hint_of_source, is_of_the_host, way_on
from ringfence.backends.local.session import (
    check_least,
    environment,
    is_own,
    must_make,
    no_source,
    steps_of_own,
)
from ringfence.backends.local.sizes import of_user, sizes
from ringfence.errors import (
    FileNotFound,
    InvalidRequest,
    IsolationError,
    NetworkPolicyError,
    ResourceExhausted,
    SandboxLost,
    SnapshotNotFound,
)
from ringfence.launcher import wire
from ringfence.launcher.spawn import LEAST_FILES, Started
from ringfence.model.capabilities import Protection
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import SandboxSpec
from ringfence.policy.redirects import redirects_of

pytestmark = pytest.mark.anyone
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


class TestAnswers:
    def read(self, data: bytes | None, timeout_s: float | None = None) -> Any:
        ours, theirs = wire.socketpair()
        try:
            if data is not None:
                with open("/dev/null", "rb") as file:
                    wire.answer(theirs, data, [file.fileno()] if data else [])
            if data == b"":
                theirs.close()
            return answer(ours, timeout_s)
        finally:
            ours.close()
            theirs.close()

    def test_descriptors_come_with_what_went_well_alone(self) -> None:
        for data, body in ((b"Obody", b"body"), (b"READYword", b"word")):
            found, fds = self.read(data)
            assert (body, 1) == (found, len(fds))
            os.close(fds[0])
        for data, kind in (
            (b"E2 [Errno 2] no such file", Refused),
            (b"nonsense", SandboxLost),
            (b"", SandboxLost),
            (b"E109 [Errno 109] too many references", ResourceExhausted),
        ):
            with same_descriptors(), pytest.raises(kind):
                self.read(data)

    def test_a_refusal_names_its_step_once(self) -> None:
        with pytest.raises(Refused) as refused:
            self.read(b"E20 bind /x: [Errno 20] Not a directory")
        assert (errno.ENOTDIR, "bind /x: Not a directory") == (
            refused.value.errno,
            refused.value.strerror,
        )

    def test_what_does_not_come_in_time_is_told(self) -> None:
        with pytest.raises(IsolationError, match=r"within 0\.01 s"):
            self.read(None, 0.01)


def test_what_was_acquired_is_given_back_last_first_whatever_fails() -> None:
    done: list[int] = []

    def give_back(number: int) -> None:
        done.append(number)
        if number == 2:
            raise ValueError("the second")

    def use(*, keeps: bool) -> None:
        with Acquired() as held:
            for number in (1, 2, 3):
                held.callback(give_back, number)
            if keeps:
                held.pop_all()

    with pytest.raises(ValueError, match="the second"):
        use(keeps=False)
    assert [3, 2, 1] == done
    use(keeps=True)
    assert [3, 2, 1] == done


def test_a_backend_has_the_directory_and_egress_that_it_was_given(tmp_path: Path) -> None:
    class Backend(LocalBackend):
        name = "mine"

    given: Any = SimpleNamespace()
    backend = Backend(lambda: given, str(tmp_path))
    assert given is backend.egress()
    assert backend.catalogue().directory.startswith(str(tmp_path))


class TestLaunched:
    def test_words_are_the_last_and_bounded(self) -> None:
        errors = room_for_words("says")
        os.write(errors, b"idle: one\n" + b"x" * 2000 + b"\nidle: two\nlast\n")
        assert "x" * 1000 == last_words(errors, "idle")
        os.close(errors)
        errors = room_for_words("says")
        os.write(errors, b"idle: one\nfirst\nthe idle\n\nlast\n")
        assert "first / last" == last_words(errors, "one", "idle")
        os.close(errors)

    @pytest.fixture
    def started(self) -> Iterator[Callable[[], tuple[Any, wire.Socket, Any]]]:
        running: list[Any] = []

        def start() -> tuple[Any, wire.Socket, Any]:
            near, far = wire.socketpair()
            process = subprocess.Popen(["sleep", "1000"])
            running.append(process)
            made = Launched.__new__(Launched)
            Launched.__init__(made, "helper", "", SimpleNamespace(pid=process.pid, control=near))  # type: ignore[arg-type]
            return made, far, process

        yield start
        for process in running:
            process.kill()
            process.wait()

    def test_one_that_hangs_up_is_gone_a_moment_before_it_ends(self, started: Any) -> None:
        made, far, process = started()
        assert made.alive
        made.tell("do", 1, [])
        message, fds = wire.receive(far)
        assert (("do", 1), 1) == (message, len(fds))
        os.close(fds[0])
        far.close()
        with same_descriptors(), pytest.raises(SandboxLost, match="the helper process is gone"):
            made.ask("do", 2)
        assert process.poll() is None
        assert not made.alive
        process.kill()
        made.wait()
        made.release()
        assert (-1, -1) == (made._pidfd, made.control_fd)
        assert not made.alive

    def test_a_child_of_another_process_is_not_reaped(self, started: Any) -> None:
        made, far, process = started()
        made.owner = os.getppid()
        made.close()
        assert process.poll() is None
        far.close()
        os.close(made._pidfd)

    def test_one_that_another_has_reaped_is_waited_for(
        self, started: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launched, "_END_MS", 20)
        made, far, process = started()
        process.kill()
        process.wait()
        made.close()
        far.close()
        os.close(made._pidfd)
        made, far, _alive = started()
        stranger: Any = ChildProcessError(errno.ECHILD, "not a child")
        monkeypatch.setattr(os, "waitpid", Mock(side_effect=stranger))
        began = time.monotonic()
        made.close()
        monkeypatch.undo()
        assert time.monotonic() - began >= 0.02
        far.close()
        os.close(made._pidfd)

    def test_too_few_files_are_told_before_anything_starts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none(*_: Any, **__: Any) -> Started:
            raise OSError(errno.EAGAIN, "no more processes")

        monkeypatch.setattr(launched, "spawn", none)
        with pytest.raises(IsolationError, match="no process can be started"):
            Launched("helper", "")

        def full(*_: Any, **__: Any) -> Started:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(launched, "spawn", full)
            with pytest.raises(OSError, match="too many") as refused:
                Launched("helper", "")
        assert errno.EMFILE == refused.value.errno, "who called says what to do"
        least = LEAST_FILES
        for most, is_refused in ((least - 1, True), (least, False)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, most))
            with pytest.raises(ResourceExhausted if is_refused else IsolationError):
                Launched("helper", "")


class TestSizes:
    def of(self, memory: int = 16 * GIB, most: int = 512, **limits: Any) -> Any:
        spec = SandboxSpec(limits=Limits(**limits.pop("limits", {})), **limits)
        return sizes(spec, SimpleNamespace(memory_bytes=memory), most_pids=most)  # type: ignore[arg-type]

    def test_defaults_fit_into_the_host_and_each_other(self) -> None:
        found = self.of()
        assert (8 * GIB, 4 * GIB) == (found.memory_bytes, found.disk_bytes)
        assert (1 << 18, 512, 4096, 0) == (
            found.inodes, found.pids, found.open_files, found.terminals
        )  # fmt: skip
        assert 8 * GIB == self.of(256 * GIB).disk_bytes
        small = self.of(limits={"memory_bytes": 64 * MIB})
        assert (48 * MIB, False) == (small.disk_bytes, small.on_disk)
        assert 4096 == self.of(limits={"disk_bytes": MIB}).inodes
        assert 100 == self.of(most=100).pids
        assert 200 == self.of(most=100, limits={"pids": 200}).pids

    def test_files_beyond_memory_are_on_disk(self) -> None:
        over = {"memory_bytes": 64 * MIB, "disk_bytes": 64 * MIB + 1}
        assert self.of(limits=over).on_disk
        assert not self.of(limits={**over, "disk_bytes": 64 * MIB}).on_disk
        named = self.of(disk_root=True)
        assert (4 * GIB, True) == (named.disk_bytes, named.on_disk)

    @pytest.mark.parametrize(("pids", "terminals"), [(512, 0), (513, 32), (1 << 20, 256)])
    def test_more_processes_have_more_terminals(self, pids: int, terminals: int) -> None:
        assert terminals == self.of(limits={"pids": pids}).terminals

    def test_a_user_of_its_own_may_have_more(self) -> None:
        own, callers = of_user(is_own=True), of_user(is_own=False)
        assert own.keys() == callers.keys()
        assert all(own[which] > callers[which] for which in own)


class TestSession:
    def test_the_users_own_variables_win(self) -> None:
        spec = SandboxSpec(env={"A": "user", "PATH": "/mine"})
        found = environment(spec, {"A": "network", "B": "network", "HOME": "/there"})
        assert ("user", "/mine", "network", "/there") == tuple(
            found[name] for name in ("A", "PATH", "B", "HOME")
        )
        assert ("sandbox", "1") == (found["USER"], found["PIP_BREAK_SYSTEM_PACKAGES"])
        image = environment(SandboxSpec(image="debian", user="root"), {})
        assert ("root", False) == (image["LOGNAME"], "PIP_BREAK_SYSTEM_PACKAGES" in image)

    @pytest.mark.parametrize(
        ("path", "own"),
        [("/", False), ("/usr/x", False), ("/lib64/x", False), ("/dev/x", False), ("/work", True)],
    )
    def test_the_systems_directories_stay(self, path: str, own: bool) -> None:
        assert own == is_own(path)

    @pytest.mark.parametrize(
        ("workdir", "of_template", "of_image"),
        [
            ("/home/sandbox", False, True),
            ("/home/sandbox/x", True, True),
            ("/data/x", False, False),
            ("/database", True, True),
            ("/usr/x", False, True),
            ("/", False, False),
        ],
    )
    def test_a_root_is_made_where_nobody_has_made_it(
        self, workdir: str, of_template: bool, of_image: bool
    ) -> None:
        mounts = [ResolvedMount("/data", "read_write", "/h")]
        assert of_template == must_make(workdir, mounts, of_image=False)
        assert of_image == must_make(workdir, mounts, of_image=True)

    def test_a_mount_of_its_own_is_read_only_unless_it_was_asked_for(self) -> None:
        spec = SandboxSpec(workdir="/work")
        made = [("session_dir", "/data")]
        assert made == steps_of_own(spec, Mount("/data", access="read_write"))
        assert [*made, ("protect", "/data")] == steps_of_own(spec, Mount("/data"))
        inner = steps_of_own(spec, Mount("/data", "sub", "read_write"))
        assert [("session_dir", "/work/sub"), ("bind_inside", "/work/sub", "/data", 0)] == inner

    def test_the_least_is_enough(self) -> None:
        least = {"open_files": (64, "the agent lives under it too")}
        check_least(SandboxSpec(limits=Limits(open_files=64)), least)
        check_least(SandboxSpec(), least)
        with pytest.raises(InvalidRequest, match="at least 64: the agent") as refused:
            check_least(SandboxSpec(limits=Limits(open_files=63)), least)
        assert "limits.open_files" == refused.value.field

    def test_a_source_that_cannot_be_had_says_what_to_do(self) -> None:
        gone, closed = FileNotFoundError(2, "gone"), PermissionError(13, "closed")
        assert "parent directory" in no_source(Mount("/data", "/x"), closed).hint
        assert "mounts.source" == no_source(Mount("/data", "/x"), gone).field
        memory = no_source(Mount("/mnt/memory", "/x"), gone)
        assert ("memory_dir", True) == (memory.field, "directory on the host" in memory.hint)


class TestRefusals:
    @pytest.mark.parametrize(
        ("number", "text", "kind", "part"),
        [
            (errno.ENOTDIR, "bind /data: no", InvalidRequest, "a parent is a file"),
            (errno.ENOSPC, "bind /data: no", IsolationError, "doctor"),
            (errno.ENOTDIR, "dir /data: no", IsolationError, "doctor"),
            (errno.EMFILE, "bind /data: no", ResourceExhausted, "ulimit -n"),
            (errno.EFBIG, "file /etc/x: no", IsolationError, "ulimit -f"),
            (errno.EPERM, "network eth: no", NetworkPolicyError, "doctor"),
        ],
    )
    def test_each_step_has_its_fix(
        self, number: int, text: str, kind: type[Exception], part: str
    ) -> None:
        found = error_of(Refused(number, text))
        assert type(found) is kind
        assert part in found.hint

    @pytest.mark.parametrize(
        ("number", "text", "is_hosts"),
        [
            (errno.EPERM, "lock down: sethostname", True),
            (errno.EPERM, "lock down: landlock", False),
            (errno.EACCES, "lock down: sethostname", False),
            (errno.ENOSPC, "create: no", True),
            (errno.EMFILE, "create: no", False),
            (errno.EPERM, "proc: no", True),
            (errno.EPERM, "bind: no", False),
        ],
    )
    def test_what_every_sandbox_takes_is_refused_by_the_host(
        self, number: int, text: str, is_hosts: bool
    ) -> None:
        assert is_hosts == is_of_the_host(Refused(number, text))

    def test_the_way_on_is_that_of_the_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = Refused(errno.EPERM, "proc: no")
        found = [blockers.Blocker("proc", "masked", "unmask it")]
        monkeypatch.setattr(blockers, "find", lambda _: found)
        assert way_on(refused).startswith("masked: unmask it; or show the /proc of this container")
        found.append(blockers.Blocker("chroot", "a chroot", ""))
        assert way_on(refused).startswith("masked: unmask it; a chroot; or go without namespaces")
        found.clear()
        assert way_on(refused).startswith("this host refuses user namespaces")

    def test_only_a_map_that_was_refused_is_a_file_systems_fault(self) -> None:
        text = "bind /data: mount_setattr: Invalid argument"
        assert "cannot map ids" in hint_of_source(OSError(errno.EINVAL, text), "/data")
        assert "in no sandbox" in hint_of_source(OSError(errno.EINVAL, text), "/proc")
        assert "in no sandbox" not in hint_of_source(OSError(errno.EINVAL, text), "/process")
        assert "" == hint_of_source(OSError(errno.EPERM, text), "/data")
        assert "" == hint_of_source(OSError(errno.EINVAL, "bind /data: no"), "/data")


class TestReports:
    def of(self, problem: Exception | None = None, fails: bool = False) -> tuple[Any, list[str]]:
        ended: list[str] = []
        held = Protection("pids_limit", "degraded", "nobody counts"), Protection("x", "enforced")

        def provision(_spec: Any) -> Any:
            if problem is not None:
                raise problem
            return SimpleNamespace(protections=lambda: held, terminate=lambda: ended.append("it"))

        def abilities(_sandbox: Any, protections: Any) -> Any:
            if fails:
                raise ValueError("a fault")
            return reports.of_limits(["pids_limit"], protections)

        backend: Any = SimpleNamespace(name="mine", profile_names=("p",), provision=provision)
        try:
            return reports.report_of(backend, SandboxSpec(), "light", ["pty"], abilities), ended
        except ValueError:
            return None, ended

    def test_what_it_is_read_from_is_ended(self) -> None:
        found, ended = self.of()
        assert (True, ("p",), ["it"]) == (found.available, found.profiles, ended)
        [limit] = found.capabilities
        assert (True, "nobody counts") == (limit.available, limit.reason)
        assert (None, ["it"]) == self.of(fails=True)

    def test_what_refused_is_told_with_its_fix(self) -> None:
        found, _ = self.of(IsolationError("no namespaces", hint="turn them on"))
        assert (False, "no namespaces") == (found.available, found.reason)
        assert [("pty", False)] == [(each.name, each.available) for each in found.capabilities]
        assert ("missing", "turn them on") == (
            found.protections[0].status, found.protections[0].fix
        )  # fmt: skip
        [missing] = reports.of_limits(["x"], (Protection("x", "missing", "none"),))
        assert (False, "none") == (missing.available, missing.reason)


class TestComparing:
    class Catalogue:
        def __init__(self, directory: Path) -> None:
            self.directory, self.opened = str(directory), [""][:0]
            self.image: str | None = None

        def content(self, snapshot_id: str) -> int:
            self.opened.append(snapshot_id)
            if snapshot_id == "gone":
                raise SnapshotNotFound("gone")
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

        def describe(self, snapshot_id: str) -> Any:
            return snapshot_id, SandboxSpec(image=self.image), ("below", "lowest")

    @pytest.fixture
    def compared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        seen = SimpleNamespace(catalogue=self.Catalogue(tmp_path), made=[], ended=[], given=[])
        mounts = [
            ResolvedMount("/data/in", "read_write", "/h"),
            ResolvedMount("/own", "read_write"),
        ]

        def compare(before: list[int], after: list[int], **how: Any) -> str:
            seen.given.append((len(before), len(after), how))
            return "changes"

        def provision(spec: SandboxSpec) -> Any:
            seen.made.append(spec)
            return SimpleNamespace(terminate=lambda: seen.ended.append(spec), snapshot=snapshot)

        def snapshot(_metadata: Any, moment: Any) -> None:
            if seen.refuses:
                raise IsolationError("no")
            moment.file = open("/dev/null", "rb")  # noqa: SIM115

        seen.refuses = False
        monkeypatch.setattr(comparing, "compare", compare)
        seen.backend = SimpleNamespace(
            name="mine", catalogue=lambda: seen.catalogue, provision=provision
        )
        seen.sandbox = SimpleNamespace(
            spec=SandboxSpec(id="one", ttl_s=9, memory_dir="/usr", mounts=(Mount("/d", "/usr"), Mount("/own"))),
            mounts=mounts, has_whiteouts=True, lower=("upper", "low"), snapshot=snapshot,
        )  # fmt: skip
        return seen

    def test_with_a_new_one_that_ends_again(self, compared: Any) -> None:
        assert "changes" == comparing.changes(compared.sandbox, compared.backend, None)
        [spec] = compared.made
        assert (None, None, None, ["/own"]) == (
            spec.id, spec.ttl_s, spec.memory_dir, [each.target for each in spec.mounts]
        )  # fmt: skip
        assert [spec] == compared.ended
        before, after, how = compared.given[0]
        assert (1, 3, True) == (before, after, how["is_layer"])
        assert ["low", "upper"] == compared.catalogue.opened, "the lowest first"
        for path, mounted in (
            ("/data/in/x", True), ("/data/in", True), ("/data", True), ("/", True),
            ("/data/inner", False), ("/own", False),
        ):  # fmt: skip
            assert mounted == how["is_mounted"](path), path
        compared.refuses = True
        with pytest.raises(IsolationError):
            comparing.changes(compared.sandbox, compared.backend, None)
        assert 2 == len(compared.ended)

    def test_with_a_snapshot_and_those_below_it(self, compared: Any) -> None:
        comparing.changes(compared.sandbox, compared.backend, "since")
        assert ["lowest", "below", "since"] == compared.catalogue.opened[:3]
        assert (3, 3) == compared.given[0][:2]
        assert [] == compared.made
        compared.sandbox.lower = ("gone", "low")
        with pytest.raises(SnapshotNotFound):
            comparing.changes(compared.sandbox, compared.backend, "since")
        compared.catalogue.image = "debian"
        with pytest.raises(InvalidRequest, match="another image") as refused:
            comparing.changes(compared.sandbox, compared.backend, "since")
        assert "since" == refused.value.field


class TestRoutes:
    def names(self, plan: Any) -> list[str]:
        return [batch[0] for batch in plan["batches"]]

    def test_a_change_adds_before_and_removes_after(self) -> None:
        first, second = (
            NetworkPolicy(rules=(NetworkRule(net, "80"),)) for net in ("10.0.0.0/8", "192.0.2.0/24")
        )
        plan: Any = routes.plan_to_change(first, second)
        assert ["routes", "filter", "routes"] == self.names(plan)
        assert plan["batches"][0][2] != plan["batches"][2][2]
        fresh = routes._table(redirects_of(second))
        assert len(plan["batches"][1][2]) > len(fresh[2]), "the old table goes at once"
        away: Any = routes.plan_to_change(first, NetworkPolicy())
        assert ["filter", "routes"] == self.names(away)
        assert routes.plan_to_change(first, first) is None
        assert routes.plan_for(NetworkPolicy.parse("unrestricted")) is None

    def test_many_routes_are_sent_in_pieces_and_none_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rules = tuple(NetworkRule(f"10.{at}.0.0/16", "80") for at in range(9))
        whole = routes._ways([rule.host for rule in rules], with_addresses=True)
        assert 1 == len(whole)
        monkeypatch.setattr(routes, "_MOST", 4)
        pieces = routes._ways([rule.host for rule in rules], with_addresses=True)
        assert [len(whole[0][2])] == [sum(len(piece[2]) for piece in pieces)]
        assert [11, 7, 3] == [piece[4] for piece in pieces], "where IPv6 begins in each"

    def test_plans_that_are_kept_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(routes, "_plans", {})
        monkeypatch.setattr(routes, "_MOST_PLANS", 2)
        for at in range(5):
            policy = NetworkPolicy(rules=(NetworkRule("a.example", str(80 + at)),))
            assert routes.plan_for(policy) is routes.plan_for(policy)
            assert len(routes._plans) <= 2


class TestAccounts:
    PASSWD = (
        b"short:x:1\ndev:x:1001:1:,:/home/dev:/bin/sh\ndev:x:1002:1::/other:/bin/sh\n"
        b"odd:x:1003:1::relative:/bin/sh\nbig:x:65535:1::/:/bin/sh\nlast:x:65534:1::/:/bin/sh\n"
    )

    def of(self, user: str, content: bytes | None = PASSWD) -> Any:
        def open_read(_path: str) -> Any:
            if content is None:
                raise FileNotFound("no /etc/passwd")
            return io.BytesIO(content)

        return find(SimpleNamespace(open_read=open_read), user)

    def test_the_first_whole_line_of_a_name_is_taken(self) -> None:
        found = self.of("dev")
        assert (1001, {"USER": "dev", "LOGNAME": "dev", "HOME": "/home/dev"}) == (
            found.uid,
            found.env,
        )
        assert "HOME" not in self.of("odd").env
        assert 65534 == self.of("last").uid
        assert (0, {}) == (self.of("root", b"root:x:7:7::/:/x\n").uid, self.of("root").env)
        for user in ("short", "big", "nobody-here"):
            with pytest.raises(InvalidRequest, match="unknown user"):
                self.of(user)
        with pytest.raises(InvalidRequest, match="unknown user"):
            self.of("dev", None)
        with pytest.raises(InvalidRequest):
            self.of("far", b"#" * (1 << 20) + b"\nfar:x:1:1::/:/x\n")
