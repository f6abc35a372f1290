"""What a program finds in a jail: the isolation around it, the guest's root, and nothing of the host's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from tests.features import require

# The program. It has Python and the system's libraries, which are shown to it.
_PROBE = """
import ctypes, json, os, resource, signal, sys
c = ctypes.CDLL(None)
told = {
    "pid": os.getpid(), "session": os.getsid(0), "cwd": os.getcwd(), "root": sorted(os.listdir("/")),
    "status": dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines()),
    "mounts": [line.split() for line in open("/proc/self/mountinfo")],
    "securebits": c.prctl(27, 0, 0, 0, 0), "keeps": dict(os.environ), "argv": sys.argv[1:],
    "core": resource.getrlimit(resource.RLIMIT_CORE), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "open": {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")},
    "room": [line.split()[1] for line in open("/proc/self/status") if line.startswith("FDSize")][0],
    "signals": [signal.getsignal(each) is signal.SIG_DFL for each in (signal.SIGTERM, signal.SIGCHLD)],
    "namespaces": {each: os.readlink(f"/proc/self/ns/{each}") for each in os.listdir("/proc/self/ns")},
    "words": os.read(3, 99).decode() if len(sys.argv) > 2 else "",
}
signum = ctypes.c_int()
c.prctl(2, ctypes.byref(signum), 0, 0, 0)
told["dies_by"] = signum.value
told["umask"] = os.umask(0)
def found(path):
    info = os.lstat(path)
    return [oct(info.st_mode), info.st_uid, info.st_gid, info.st_size]
told["guest"] = {}
for above, directories, names in os.walk("/guest"):
    for name in (*directories, *names):
        told["guest"][os.path.join(above, name)[6:]] = found(os.path.join(above, name))
space = os.statvfs("/guest")
told["space"] = [space.f_blocks * space.f_frsize, space.f_files]
try:
    os.chmod(sys.argv[1], 0o4755)
    told["set_id"] = True
except OSError as exc:
    told["set_id"] = exc.errno
print(json.dumps(told))
"""
# A process of its own becomes the parent of the jails.
_RUN = """
import json, os, select, signal, socket, sys, tarfile
from types import SimpleNamespace
from ringfence.backends.local.jailed.bare_jail import bare_jail, filter_of_jail
from ringfence.backends.local.mounts.template import DEVICE, READ_ONLY, tree
from ringfence.launcher import wire
from ringfence.launcher.jail.jailer import Jailer
from ringfence.launcher.machine_code.process_image import HEAD_IS_WRITTEN
from ringfence.launcher.newroot import BuildError
from ringfence.linux import fuse

place, probe = sys.argv[1:3]
_WAITS = "import os; os.write(0, b'up'); os.read(0, 1)"
is_root = os.geteuid() == 0
here = SimpleNamespace(trusted_root=is_root, uid=os.geteuid(), gid=os.getegid(), scratch=place)
ids = "0 700000 8"
if is_root:
    os.setgroups([5])  # which nobody in a jail is to have
jailer = Jailer(wire.socketpair()[1])

def plan_of(name):
    plan = bare_jail(name, here, ids, filter_of_jail())
    plan["steps"] = [("dir", path, 0o755, False) for path in ("/proc", "/guest", "/tmp")]
    for path in dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", sys.base_prefix]):
        if os.path.islink(path):
            plan["steps"].append(("symlink", path, os.readlink(path)))
        elif os.path.isdir(path) and not path.startswith("/usr/"):
            plan["steps"].append(("bind", path, len(plan["trees"])))
            plan["trees"].append(tree(path, READ_ONLY))
    plan["steps"].append(("bind", "/dev/null", len(plan["trees"])))
    plan["trees"].append(tree("/dev/null", DEVICE))
    plan["guest"].update(path="/guest", size_bytes=1 << 20, inodes=64)
    plan["guest"]["steps"] = [
        ("dir", "/etc", 0o755, False), ("file", "/etc/hosts", b"hosts", 0o644), ("symlink", "/bin", "usr/bin"),
        ("dir", "/home", 0o700, True),
    ]
    plan["argv"] = [f"{sys.base_prefix}/bin/python3", "-I", "-S", "-c", probe, "/tmp"]
    plan["env"] = {"ONLY": "this"}
    return plan

def run(plan, besides=(), said=()):
    errors, told = os.memfd_create("errors"), []
    control, ours = wire.socketpair()
    reply, answer = wire.socketpair()
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        jailer.create(plan, reply, [control.fileno(), errors, *besides])
    except BuildError as exc:
        control.close()
        return {"step": exc.step, "errno": exc.cause.errno, "jails": len(jailer.jails)}
    except OSError as exc:
        control.close()
        leaked = len(os.listdir("/proc/self/fd")) - len(before) + 1
        return {"step": "", "errno": exc.errno, "jails": len(jailer.jails), "leaked": leaked}
    after = sorted(os.listdir("/proc/self/fd"))
    control.close()
    data, fds = wire.receive_raw(answer)
    for word in said:
        word(ours)
    pid, status = os.waitpid(int(data[1:]), 0)
    jailer.forget(pid)
    heard, more = wire.receive_raw(ours)
    text = os.pread(errors, 1 << 20, 0).decode()
    return {
        "leaked": len(after) - len(before), "pidfds": len(fds), "heard": heard.decode(), "more": len(more),
        "status": status, "jails": len(jailer.jails),
        "told": json.loads(text) if text.startswith("{") else text,
    }

os.umask(0o077)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
done = {}

plan = plan_of("plain")
plan.update(passes=1, descriptors=300, rlimits=[*plan["rlimits"], (7, 400, 500)])
plan["argv"].append("one")
plan["after"] = [("dir", "/after", 0o755, False)]
if is_root:
    plan["guest"]["owner"] = 5
read, write = os.pipe()
os.write(write, b"words")
done["plain"] = run(plan, [read])

plan = plan_of("kept")
plan["keep_capabilities"] = True
plan["guest"].update(process_image="/image", process_image_bytes=12345, owner=5 if is_root else 0)
def fill(ours):
    said, (fd,) = wire.receive_raw(ours)
    assert said == b"O", said
    os.pwrite(fd, b"image", 0)
    os.close(fd)
    wire.send_raw(ours, HEAD_IS_WRITTEN)
done["kept"] = run(plan, said=[fill])

plan = plan_of("given up")
plan["guest"].update(process_image="/image", process_image_bytes=5)
def give_up(ours):
    wire.receive_raw(ours)
    wire.send_raw(ours, b"?")
done["given up"] = run(plan, said=[give_up])

image, packed = f"{place}/image", f"{place}/packed"
for path in (image, packed):
    os.mkdir(path)
    os.chmod(path, 0o755)
os.mkdir(f"{image}/etc")
os.chmod(f"{image}/etc", 0o755)
for path in (f"{image}/own", f"{packed}/restored"):
    open(path, "w").close()
    os.chmod(path, 0o644)
content = os.memfd_create("content")
def of_root(member):
    member.uid = member.gid = 0
    return member
with os.fdopen(os.dup(content), "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
    tar.add(packed, ".", filter=of_root)
os.lseek(content, 0, 0)
plan = plan_of("content")
plan["guest"]["has_content"] = True
done["content"] = run(plan, [content])

plan = plan_of("broken content")
plan["guest"]["has_content"] = True
broken = os.memfd_create("broken")
os.write(broken, b"no archive" * 100)
os.lseek(broken, 0, 0)
done["broken content"] = run(plan, [broken])

plan = plan_of("image")
plan["steps"] += [("dir", path, 0o755, False) for path in ("/guest/within", "/guest/within/root")]
plan["guest"].update(
    path="/guest/within/root", image=len(plan["trees"]), owner=5 if is_root else 0,
    steps=[
        ("image_dir", "/new", 0o755, False), ("image_file", "/new/file", b"new", 0o644, False),
        ("symlink", "/link", "/own"),
    ],
)
plan["trees"].append(tree(image, READ_ONLY))
done["image"] = run(plan)

plan = plan_of("entered")
plan["argv"] = [f"{sys.base_prefix}/bin/python3", "-I", "-S", "-c", _WAITS]
def entered_with(pidfd, fds, **request):
    reply, answer = wire.socketpair()
    jailer.enter(request, reply, [pidfd, *fds])
    reply.close()
    said, made = wire.receive_raw(answer)
    os.wait()
    return said.decode(), made
def entered(pidfd, fds, **request):
    said, made = entered_with(pidfd, fds, **request)
    assert made == [], said
    return said
def names(fd):
    os.lseek(fd, 0, 0)
    with tarfile.open(fileobj=os.fdopen(fd, "rb")) as tar:
        return sorted(tar.getnames())
def inside(pidfd, code, op="run", more=(), **request):
    argv = [f"{sys.base_prefix}/bin/python3", "-I", "-S", "-c", code]
    return entered(pidfd, more, op=op, argv=argv, env={"IS": "set"}, **request)
def relay(pidfd, jail, said):
    tasks = f"{place}/cgroup"
    os.mkdir(tasks)
    open(f"{tasks}/tasks", "w").close()
    line, theirs = socket.socketpair()
    control, other = wire.socketpair()
    made = entered_with(
        pidfd, [theirs.fileno(), other.fileno()], op="relay", cgroup_dirs=[tasks], cgroup_version=1,
        filter=filter_of_jail(), token=b"",
    )
    theirs.close(); other.close()
    pid, (its,) = int(made[0][1:]), made[1]
    wire.send(control, ({"batches": [], "port": 0}, True))
    line.settimeout(30)
    assert line.recv(100), "it passes plans on once it is locked down"
    proc = f"/proc/{pid}"
    said["relay"] = {
        "status": dict(row.split(":", 1) for row in open(f"{proc}/status").read().splitlines()),
        "tasks": open(f"{tasks}/tasks").read(), "owner": os.stat(f"{proc}/environ").st_uid,
    }
    if is_root:  # whom else it is hidden from
        said["relay"].update({
            "open": sorted(map(int, os.listdir(f"{proc}/fd"))),
            "null": [os.readlink(f"{proc}/fd/{number}") for number in range(3)],
            "elsewhere": [
                each for each in os.listdir(f"{proc}/ns") if each[-9:] != "_children"
                and os.readlink(f"{proc}/ns/{each}") != os.readlink(f"/proc/{jail}/ns/{each}")
            ],
        })
    control.close()
    poll = select.poll()
    poll.register(its, select.POLLIN)
    said["relay"]["ends"] = bool(poll.poll(30000))
def visit(ours):
    assert b"up" == wire.receive_raw(ours)[0], "before, its mounts are the host's"
    (pid,) = jailer.jails
    pidfd = os.pidfd_open(pid)
    said = done["entered"] = {}
    shown = "import os; print(open('/tmp/note').read(), oct(os.stat('/tmp/note').st_mode), dict(os.environ))"
    said["with a file"] = inside(pidfd, shown, file=("/tmp/note", b"noted"))
    said["says why"] = inside(pidfd, "import sys; print('because', file=sys.stderr); sys.exit(3)")
    said["no words"] = inside(pidfd, "import sys; sys.exit(17)")
    said["killed"] = inside(pidfd, "import os; os.kill(os.getpid(), 9)")
    much = inside(pidfd, "print('x' * 100000, 'end', end='')")
    said["much"] = [len(much), much[-4:]]
    # A file of that name is not written over.
    said["file there"] = inside(pidfd, "1", file=("/guest/etc/hosts", b"other"))
    script = ("/tmp/note", b"#!/bin/sh" + bytes([10]) + b"exit 17")
    said["its file"] = entered(pidfd, [], op="run", argv=["/tmp/note"], env={}, file=script)
    said["who"] = inside(pidfd, "import os; print(os.listdir('/tmp'), os.getresuid(), os.getresgid(),"
        " os.getgroups(), sorted(os.listdir('/proc/self/fd'))[:4], os.getppid())")
    packed = os.memfd_create("packed")
    said["pack"] = entered(pidfd, [packed], op="pack", path="/guest", shown=[])
    said["packed"] = names(packed)

    source = os.open(image, os.O_PATH | os.O_DIRECTORY)
    info = os.fstat(source)
    wanted = {**tree(image, READ_ONLY), "device": info.st_dev, "inode": info.st_ino, "fd": 0}
    mount = {"op": "mount", "trusted_root": is_root, "trees": [wanted], "uid": 0, "gid": 0}
    look = "import os; print(sorted(os.listdir('/guest')), sorted(os.listdir('/guest/more')), "
    look += "bool(os.statvfs('/guest/more').f_flag & os.ST_RDONLY), os.statvfs('/guest/more').f_flag & 6)"
    said["mount"] = entered(pidfd, [source], **mount, steps=[("bind", "/guest/more", 0)])
    said["mounted"] = inside(pidfd, look)
    said["unmount"] = entered(pidfd, [], op="unmount", path="/guest/more")
    said["unmounted"] = inside(pidfd, look)
    said["place"] = inside(pidfd, "import os; print(oct(os.stat('/guest/more').st_mode))")
    steps = [("bind", "/guest/more", 0), ("rewrite", "/none", b"")]
    said["no mount"] = entered(pidfd, [source], **mount, steps=steps)
    said["not mounted"] = inside(pidfd, look)
    os.close(source)

    saved, place_of = os.memfd_create("saved"), os.open(place, os.O_RDONLY)
    state = "import os; print(os.path.basename(os.readlink('/proc/self/fd/3'))[:8],"
    state += " open('/proc/1/stat').read().split()[2])"
    said["checkpoint"] = inside(pidfd, state, op="checkpoint", more=[place_of, saved], path="/guest", shown=[])
    assert not said["checkpoint"].startswith("E"), said
    said["saved"] = names(saved)
    said["goes on"] = inside(pidfd, "print(open('/proc/1/stat').read().split()[2])")
    said["blocked"] = inside(pidfd, "print(*(row for row in open('/proc/self/status') if 'SigBlk' in row))")
    said["unknown"] = entered(pidfd, [], op="none")
    said["network"], made = entered_with(pidfd, [], op="network", network={"batches": [], "port": 3128})
    sockets = [socket.socket(fileno=fd) for fd in made]
    said["sockets"] = [list(each.getsockname()[:2]) for each in sockets]
    said["connected"] = inside(pidfd, "import socket; socket.create_connection(('127.0.0.1', 3128), 9)")
    said["accepted"] = sockets[0].accept()[1][0]
    relay(pidfd, pid, said)
    os.close(pidfd)
    wire.send_raw(ours, b"x")
run(plan, said=[visit])

lines, control = [socket.socketpair() for _ in range(2)], wire.socketpair()
plan = plan_of("share")
plan["share"] = {"shown": "/guest", "mounts": "/guest", "whose": 7}
plan["argv"] = [f"{sys.base_prefix}/bin/python3", "-I", "-S", "-c", _WAITS]
def ask(ours):
    assert b"up" == wire.receive_raw(ours)[0]
    for line, _theirs in lines:
        head = fuse.HEADER.pack(fuse.HEADER.size + 4, fuse.LOOKUP, 7, 1, 0, 0, 1, 0)
        line.sendall(head + b"etc" + bytes(1))
        done["answers"].append(-fuse.ANSWER.unpack_from(line.recv(4096))[1])
    (pid,) = jailer.jails
    (child,) = map(int, open(f"/proc/{pid}/task/{pid}/children").read().split())
    status = dict(row.split(":", 1) for row in open(f"/proc/{child}/status").read().splitlines())
    done["server"] = {"status": status, "open": sorted(map(int, os.listdir(f"/proc/{child}/fd")))}
    wire.send_raw(ours, b"x")
done["answers"] = []
done["share"] = run(plan, [*(theirs.fileno() for _line, theirs in lines), control[1].fileno()], [ask])

for name, part, step in (
    ("no step", "steps", ("symlink", "/tmp", "there")),
    ("no step after", "after", ("dir", "/none/below", 0o755, False)),
):
    plan = plan_of(name)
    plan[part] = [*plan[part], step]
    done[name] = run(plan)
plan = plan_of("no program")
plan["argv"] = ["/none"]
done["no program"] = run(plan)
plan = plan_of("no source")
info = os.stat(image)
plan["trees"].append({**tree(image, READ_ONLY), "device": info.st_dev, "inode": info.st_ino})
plan["trees"].append({**tree(image, READ_ONLY), "inode": 1})
done["no source"] = run(plan)
done["ours"] = {each: os.readlink(f"/proc/self/ns/{each}") for each in os.listdir("/proc/self/ns")}
done["in image"] = sorted(os.listdir(image))
print(json.dumps(done))
"""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def jails() -> Found:
    """What was found in jails, and said of them."""
    require("user namespaces")
    # Not in a directory of pytest's, which only we may enter: a jail has other ids.
    with tempfile.TemporaryDirectory(prefix="rf-place-") as place:
        os.chmod(place, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", _RUN, place, _PROBE],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert "" == done.stderr
    found: Found = json.loads(done.stdout)
    return found


def test_a_program_is_alone_in_namespaces_of_its_own(jails: Found) -> None:
    told, ours = jails["plain"]["told"], jails["ours"]
    assert (1, 1, "/") == (told["pid"], told["session"], told["cwd"])
    apart = {"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"}
    assert apart == {each for each in apart if told["namespaces"][each] != ours[each]}
    assert ["/tmp", "one"] == told["argv"]
    assert "this" == told["keeps"].pop("ONLY")
    assert {"LC_CTYPE"} >= set(told["keeps"])


def test_a_program_sees_what_it_was_given_and_nothing_else(jails: Found) -> None:
    told = jails["plain"]["told"]
    shown = {"usr", "lib", "lib64", "bin", sys.base_prefix.split("/")[1]}
    assert {"after", "dev", "guest", "proc", "tmp"} == set(told["root"]) - shown
    mounts = {each[4]: each for each in told["mounts"]}
    read_only = {each for each in mounts if "ro" in mounts[each][5].split(",")}
    assert {"/", "/guest", "/proc"} == set(mounts) - read_only
    assert {each.split("/")[1] for each in read_only} <= {*shown, "dev"}
    for path, flags in (
        ("/", "nosuid,nodev"),
        ("/guest", "nosuid,nodev"),
        ("/proc", "nosuid,nodev,noexec"),
    ):
        assert set(flags.split(",")) <= set(mounts[path][5].split(",")), path
    assert "size=16384k" in mounts["/"][-1]
    assert not [each for each in told["mounts"] if any("shared:" in word for word in each)]
    assert [1 << 20, 64] == told["space"]


def test_a_program_has_no_rights_and_gets_none(jails: Found) -> None:
    told = jails["plain"]["told"]
    rights = {name: int(told["status"][name], 16) for name in told["status"] if name[:3] == "Cap"}
    assert {0} == set(rights.values())
    assert ("1", "2") == tuple(told["status"][name].strip() for name in ("NoNewPrivs", "Seccomp"))
    assert told["securebits"] & 0xEF == 0xEF
    assert 9 == told["dies_by"], "it ends with its maker"
    assert 1 == told["set_id"], "its filter refuses set-id bits"
    assert ["0"] * 4 == told["status"]["Uid"].split() == told["status"]["Gid"].split()
    if os.geteuid() == 0:
        assert [] == told["status"]["Groups"].split()
    kept = jails["kept"]["told"]
    assert 0 < int(kept["status"]["CapEff"], 16) == int(kept["status"]["CapBnd"], 16)
    assert 1 == kept["set_id"]


def test_a_program_begins_with_limits_signals_and_descriptors_of_its_own(jails: Found) -> None:
    told = jails["plain"]["told"]
    assert ([1, 1], [400, 500]) == (told["core"], told["files"])
    assert 0o022 == told["umask"]
    assert [True, True] == told["signals"]
    assert 0 == int(told["status"]["SigBlk"], 16)
    opened = {int(number): text.partition(":")[0] for number, text in told["open"].items()}
    assert {0: "socket", 1: "/memfd", 2: "/memfd", 3: "pipe", 299: "/memfd"} == opened
    assert 300 <= int(told["room"])
    assert "words" == told["words"]
    assert {"0", "1", "2"} == set(jails["kept"]["told"]["open"])


def test_the_guests_root_has_what_steps_made_and_its_owners(jails: Found) -> None:
    owner = 5 if os.geteuid() == 0 else 0
    made = {
        "/etc": ["0o40755", owner, owner],
        "/etc/hosts": ["0o100644", owner, owner],
        "/bin": ["0o120777", owner, owner],
        "/home": ["0o40700", 0, 0],
    }
    guest = jails["plain"]["told"]["guest"]
    assert made == {name: each[:3] for name, each in guest.items()}
    guest = jails["kept"]["told"]["guest"]
    assert ["0o100700", owner, owner, 12345] == guest.pop("/image")
    assert made == {name: each[:3] for name, each in guest.items()}
    assert (256, "") == (jails["given up"]["status"], jails["given up"]["told"])


def test_a_snapshot_is_unpacked_into_the_guests_root(jails: Found) -> None:
    assert {"/etc", "/etc/hosts", "/bin", "/home", "/restored"} == set(
        jails["content"]["told"]["guest"]
    )
    broken = jails["broken content"]
    assert broken["heard"].startswith("E5 unpack: ")
    assert (256, "") == (broken["status"], broken["told"])


def test_an_image_lies_below_what_is_written(jails: Found) -> None:
    told = jails["image"]["told"]
    assert {
        "/within",
        "/within/root",
        "/within/root/etc",
        "/within/root/link",
        "/within/root/new",
        "/within/root/new/file",
        "/within/root/own",
    } == set(told["guest"])
    owner = 5 if os.geteuid() == 0 else 0
    assert ["0o120777", owner, owner] == told["guest"]["/within/root/link"][:3]
    assert 5 != told["guest"]["/within/root/own"][1], "where it leads"
    assert ["etc", "own"] == jails["in image"]
    mounts = {each[4]: each for each in told["mounts"]}
    assert "overlay" in mounts["/guest/within/root"]
    assert {"nosuid", "nodev"} <= set(mounts["/guest/within/root"][5].split(","))
    assert not [each for each in mounts if "layers" in each]


def test_files_are_served_beside_the_program_with_its_isolation(jails: Found) -> None:
    assert [0, 0] == jails["answers"]
    status = jails["server"]["status"]
    rights = {name: int(status[name], 16) for name in status if name[:3] == "Cap"}
    assert {0} == set(rights.values())
    assert ("1", "2") == tuple(status[name].strip() for name in ("NoNewPrivs", "Seccomp"))
    assert {0, 1, 2, 3, 4, 5} <= set(jails["server"]["open"])
    assert 8 >= len(jails["server"]["open"])
    assert 0 == jails["share"]["status"]


def test_a_command_of_the_programs_runs_beside_it(jails: Found) -> None:
    said = jails["entered"]
    assert said["with a file"].startswith("Onoted 0o100700 {'IS': 'set'")
    assert said["who"].startswith("O[] (0, 0, 0) (0, 0, 0) ["), (
        "the file is gone, also after a failure"
    )
    if os.geteuid() == 0:
        assert said["who"].startswith("O[] (0, 0, 0) (0, 0, 0) [] ")
    assert ["OSigBlk:", "0" * 16] == said["blocked"].split(), "the jailer blocks some"
    assert "E5 run: [Errno 5] because" == said["says why"]
    assert said["no words"].startswith("E17 run: ")
    assert said["its file"].startswith("E17 run: ")
    assert "E5 run: [Errno 5] ended by signal 9" == said["killed"]
    assert said["file there"].startswith("E17 run: [Errno 17] File exists: '/guest/etc/hosts'")
    assert [1 + 4096, " end"] == said["much"], "the last words"
    assert said["unknown"].startswith("E71 none: ")


def test_the_guests_root_is_streamed_and_saved_while_it_stands_still(jails: Found) -> None:
    said = jails["entered"]
    assert ("O", [".", "./bin", "./etc", "./home"]) == (said["pack"], said["packed"])
    assert "Orf-place T\n" == said["checkpoint"], "the directory is the third descriptor"
    assert [".", "./bin", "./etc", "./home", "./more"] == said["saved"]
    assert "OT\n" != said["goes on"]


def test_its_network_is_changed_inside_and_its_sockets_come_out(jails: Found) -> None:
    said = jails["entered"]
    assert ("O", [["::", 3128], ["127.0.0.53", 53]]) == (said["network"], said["sockets"])
    assert ("O", "::ffff:127.0.0.1") == (said["connected"], said["accepted"])


def test_who_relays_a_machines_connections_has_only_the_jails_network(jails: Found) -> None:
    """It reads what a guest says. It is in the jail's cgroups, and ends with its line."""
    found = jails["entered"]["relay"]
    status = found["status"]
    assert {0} == {int(status[name], 16) for name in status if name[:3] == "Cap"}
    assert ("1", "2") == tuple(status[name].strip() for name in ("NoNewPrivs", "Seccomp"))
    assert "ringfence-relay" == status["Name"].strip()
    assert ("0", True) == (found["tasks"], found["ends"])
    assert 0 == found["owner"], "nobody inside traces it"
    if os.geteuid() == 0:
        assert [] == status["Groups"].split()
        assert [] == found["elsewhere"], "all of its namespaces are the jail's"
        assert ([0, 1, 2, 3, 4, 5], ["/dev/null"] * 3) == (found["open"], found["null"])


def test_more_is_mounted_in_a_jail_or_nothing_of_it(jails: Found) -> None:
    said = jails["entered"]
    with_it = "O['bin', 'etc', 'home', 'more'] ['etc', 'own'] True 6"
    without = "O['bin', 'etc', 'home', 'more'] [] False"
    assert ("O", "O") == (said["mount"], said["unmount"])
    assert said["mounted"].startswith(with_it)
    assert said["unmounted"].startswith(without)
    assert said["place"].split()[0] == "O0o40755", "whatever the umask of who asks for it"
    assert said["no mount"].startswith("E2 rewrite /none: ")
    assert said["not mounted"].startswith(without)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no step", "E17 symlink /tmp: "),
        ("no step after", "E2 dir /none/below: "),
        ("no program", "E2 jail: "),
    ],
)
def test_what_fails_is_told_by_its_step(jails: Found, name: str, said: str) -> None:
    assert jails[name]["heard"].startswith(said)
    assert (256, "", 0) == tuple(jails[name][each] for each in ("status", "told", "jails"))


def test_the_jailer_keeps_nothing_of_a_jail(jails: Found) -> None:
    if os.geteuid() == 0:  # else the jail opens it itself, while its ids are being mapped
        assert {"step": "", "errno": 116, "jails": 0, "leaked": 0} == jails["no source"]
    for name in ("plain", "kept", "content", "image", "no step", "no program"):
        found = jails[name]
        assert (0, 1, 0) == (found["leaked"], found["pidfds"], found["jails"]), name
