"""A process image goes on where its program stopped: another process, with nothing of its taker's."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.gvisor import places, plan, runsc
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.local.agents import agent_code
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.jailed import jails
from ringfence.errors import IsolationError
from ringfence.launcher.machine_code import process_image_elf
from ringfence.launcher.machine_code.process_image import ProcessImage
from tests.features import require
from tests.native.outside import until

pytestmark = pytest.mark.full

_FIRST_SEGMENT_BYTES_AT = 64 + 32  # p_filesz of the first program header: elf(5)
_SECRET = "mine-alone-31c9"
# What is taken stops in the middle of a sum; then it says who it is.
_TAKEN = (
    "import os, signal; x = 40; os.kill(os.getpid(), signal.SIGSTOP); "
    "print(x + 2, os.getpid(), sorted(os.listdir('/proc/self/fd')))"
)
_TAKE = """
import os, sys
sys.path.append(sys.argv[1])
from ringfence.launcher.machine_code import process_images
waits = sys.argv[5:] == ["waits"]
image = process_images.take(
    [sys.argv[2], "-I", "-S", "-X", "utf8", "-c", sys.argv[3]],
    {"LC_ALL": "C"}, os.open("/dev/null", os.O_RDONLY), sys.argv[4],
    (sys.argv[5], sys.argv[6:]) if sys.argv[6:] else None, waits=waits,
)
fd = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
image.write_head(fd)
image.write_rest(fd)
print(os.fstat(fd).st_size - image.size_bytes)
"""


@pytest.fixture
def process_image(tmp_path: Path) -> Path:
    return _taken(tmp_path, _TAKEN)


def _taken(tmp_path: Path, program: str, *copy_task: str) -> Path:
    """A copy of what runs `program`."""
    if os.uname().machine != "x86_64":
        pytest.skip("process images are for x86-64")
    place = tmp_path / "process_image"
    source = str(Path(agent_code.__file__).parents[4])
    python = agent_code.interpreter()[0]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _TAKE, source, python, program, str(place), *copy_task],
        env={"SECRET": _SECRET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("0\n", "") == (done.stdout, done.stderr)
    return place


def test_every_copy_goes_on_as_another_process(process_image: Path) -> None:
    said = [
        subprocess.run([process_image], capture_output=True, text=True, check=True).stdout.split(
            maxsplit=2
        )
        for _ in range(2)
    ]

    assert ["42", "42"] == [first for first, _pid, _fds in said]
    assert said[0][1] != said[1][1]
    # Its standard streams, and the one by which it looks.
    assert ["['0', '1', '2', '3']\n"] * 2 == [fds for _first, _pid, fds in said]


def test_nothing_of_the_takers_is_in_it(process_image: Path) -> None:
    content = process_image.read_bytes()
    assert b"LC_ALL=C" in content, "the control: its own environment is"
    assert _SECRET.encode() not in content


_WITH_A_GAP = """
import os, signal
kept = bytearray(1 << 20)
kept[:4], kept[-4:] = b"head", b"tail"
os.kill(os.getpid(), signal.SIGSTOP)
sizes = {}
for line in open("/proc/self/maps"):
    place, path = line.split()[0], line[line.find("/"):].strip()
    start, _, end = place.partition("-")
    sizes[path] = sizes.get(path, 0) + int(end, 16) - int(start, 16)
print(bytes(kept).replace(bytes(1024), b"."), os.getpid(), [
    each for each, size in sizes.items() if each.startswith("/usr/") and size <= 1 << 18
])
"""


def test_zeros_are_not_kept_and_small_files_are(tmp_path: Path) -> None:
    """So that a copy is soon written, and opens as few files as it can."""
    plain, gap = tmp_path / "plain", tmp_path / "gap"
    for each in (plain, gap):
        each.mkdir()
    process_images_ = _taken(plain, _TAKEN), _taken(gap, _WITH_A_GAP)

    said = subprocess.run([process_images_[1]], capture_output=True, text=True, check=True).stdout
    head, _pid, small = said.split(maxsplit=2)
    middle = head.removeprefix("b'head").removesuffix("tail'").replace("\\x00", "")
    assert "." * 1023 == middle, "all of it is there again"
    assert "[]\n" == small
    assert process_images_[1].stat().st_size - process_images_[0].stat().st_size < 1 << 19, (
        "and not in the file"
    )


_IS_TOLD = """
import os, signal, socket
os.kill(os.getpid(), signal.SIGSTOP)
print(socket.socket(fileno=0).recv(100).decode())
"""


def _begun(place: Path) -> tuple[Path, bytes]:
    """A copy in which nothing but the head is written yet, and what is to be at `place`, which is zeros."""
    content = place.read_bytes()
    (head_bytes,) = struct.unpack_from("<Q", content, _FIRST_SEGMENT_BYTES_AT)
    begun = place.with_name("begun")
    begun.write_bytes(content[:head_bytes].ljust(len(content), b"\0"))
    begun.chmod(0o700)
    place.write_bytes(bytes(len(content)))
    return begun, content


def test_a_copy_may_begin_before_it_is_written(tmp_path: Path) -> None:
    """What is not there yet it reads after the first message to it, which it leaves where it is."""
    place = _taken(tmp_path, _IS_TOLD, "waits").resolve()
    begun, content = _begun(place)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        theirs,
        subprocess.Popen([begun], stdin=theirs.fileno(), stdout=subprocess.PIPE) as running,
    ):
        assert until(lambda: Path(f"/proc/{running.pid}/syscall").read_text().startswith("45 "))
        place.write_bytes(content)
        ours.send(b"go on")
        said, _ = running.communicate()
    assert b"go on\n" == said
    assert 0 == running.returncode


def test_one_that_does_not_wait_needs_all_of_it(tmp_path: Path) -> None:
    """The control to the one above."""
    begun, _content = _begun(_taken(tmp_path, _TAKEN))
    assert subprocess.run([begun], check=False).returncode < 0


def _agents_program(sandbox: Sandbox) -> str:
    """The command line of PID 1."""
    return sandbox.exec(["cat", "/proc/1/cmdline"]).stdout.decode().rstrip("\0").replace("\0", " ")


def test_guests_start_from_it_where_there_is_room(backend: GvisorBackend) -> None:
    small = Limits(disk_bytes=4 << 20)
    assert "" == backend.report().reason
    with (
        Sandbox.create(backend=backend) as usual,
        Sandbox.create(backend=backend, limits=small) as narrow,
    ):
        assert places.PROCESS_IMAGE == _agents_program(usual)
        assert _agents_program(narrow).startswith(agent_code.interpreter()[0])
        for sandbox in (usual, narrow):
            gone = sandbox.exec(["ls", "-A", "/.ringfence"])
            assert 2 == gone.exit_code, "what it was started from is gone"


def test_where_none_can_be_taken_the_agent_starts_anew(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "process_image", _unusable)
    with pytest.raises(Refused, match="ended"):
        jails.ask_for_process_image(backend.jailer(), plan.process_image())
    assert "" == backend.without_process_images
    with Sandbox.create(backend=backend) as sandbox:
        assert _agents_program(sandbox).startswith(agent_code.interpreter()[0])
    assert "process image did not work here" in backend.report().reason


def test_where_a_process_image_does_not_go_on_the_agent_starts_anew(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    argv = [agent_code.interpreter()[0], "-I", "-S", "-c", ends]
    monkeypatch.setattr(plan, "process_image", lambda: {**_unusable(), "argv": argv})
    assert jails.ask_for_process_image(backend.jailer(), plan.process_image()).size_bytes, (
        "it can be taken"
    )

    for _ in range(2):
        with Sandbox.create(backend=backend) as sandbox:
            assert _agents_program(sandbox).startswith(agent_code.interpreter()[0])
    report = backend.report()
    assert report.available
    assert "process image did not work here" in report.reason


def test_what_fails_for_another_reason_fails(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox.create(backend=backend):
        pass
    monkeypatch.setattr(runsc.Runsc, "flags", lambda *_, **__: ["--no-such-flag"])
    with pytest.raises(IsolationError):
        Sandbox.create(backend=backend)
    monkeypatch.undo()
    with Sandbox.create(backend=backend) as sandbox:
        assert places.PROCESS_IMAGE == _agents_program(sandbox), (
            "the process image was not to blame"
        )


def _unusable() -> dict[str, object]:
    return {"argv": ["/bin/false"], "env": {}, "place": places.PROCESS_IMAGE}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="such programs are for x86-64")
def test_a_program_that_waits_and_then_writes(tmp_path: Path) -> None:
    files = {str(tmp_path / name): name.encode() * 3 + b"\n" for name in ("one", "two")}
    program = tmp_path / "program"
    program.write_bytes(process_image_elf.writing(files))
    program.chmod(0o700)
    for path in files:
        Path(path).touch()

    with subprocess.Popen([program], stdin=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert [b""] * 2 == [Path(path).read_bytes() for path in files], "it was told nothing yet"
        running.stdin.write(b"g")
    (tmp_path / "two").unlink()
    without = subprocess.run([program], stdin=subprocess.DEVNULL, check=False)

    assert (0, b"oneoneone\n") == (running.returncode, (tmp_path / "one").read_bytes())
    assert -signal.SIGILL == without.returncode, "what it cannot do does not pass unseen"


def test_a_copy_has_its_task_run_when_it_says_so(tmp_path: Path) -> None:
    """By a child that knows what to write before it is told; without it nothing goes on."""
    source, target = tmp_path / "source", tmp_path / "target"
    target.touch()
    wanted = b"what to write".ljust(process_image_elf.TASK_BYTES)
    source.write_bytes(wanted)
    size = f"os.path.getsize({str(target)!r})"
    told = (
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); "
        f"os.unlink({str(source)!r}); before = {size}; os.write({process_image_elf.GO_FD}, b'g'); "
        f"status = os.waitpid(-1, 0)[1]; print(before, status, {size})"
    )
    copy = _taken(tmp_path, told, str(source), str(target))

    done = subprocess.run([copy], capture_output=True, text=True, check=False)
    without = subprocess.run([copy], capture_output=True, check=False)

    assert (0, f"0 0 {len(wanted)}\n", "") == (done.returncode, done.stdout, done.stderr)
    assert wanted == target.read_bytes()
    assert -signal.SIGILL == without.returncode, "what it should write is gone"


def test_a_copy_task_that_cannot_be_run_does_not_pass_unseen(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(process_image_elf.TASK_BYTES))
    told = (
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); "
        f"os.write({process_image_elf.GO_FD}, b'g'); print(os.waitpid(-1, 0)[1] & 0x7f)"
    )
    copy = _taken(tmp_path, told, str(source), str(tmp_path / "absent"))

    done = subprocess.run([copy], capture_output=True, text=True, check=True)

    assert f"{int(signal.SIGILL)}\n" == done.stdout


def test_gvisor_is_started_only_when_the_head_of_its_agent_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy host writes late: gVisor then found zeros, and said "exec format error"."""
    require("user namespaces")
    require("runsc")
    write_head = ProcessImage.write_head

    def write_late(image: ProcessImage, fd: int) -> None:
        time.sleep(2)  # many times what gVisor takes to come as far as executing the agent
        write_head(image, fd)

    backend = GvisorBackend(prebuilt=False)
    try:
        Sandbox.create(backend=backend).terminate()  # now it relies on images
        monkeypatch.setattr(ProcessImage, "write_head", write_late)
        with Sandbox.create(backend=backend) as sandbox:
            assert sandbox.exec(["true"]).ok
    finally:
        backend.close()
