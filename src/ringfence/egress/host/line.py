"""The host's side of an egress process: start it, send to it, read from it, and restart it."""

from __future__ import annotations

import _socket as socket
import errno
import os
from _thread import allocate_lock, start_new_thread
from time import monotonic, sleep

from ...errors import NetworkPolicyError
from ...launcher import wire
from ...launcher.spawn import spawn
from ...model.base import jsonform
from ...model.net.netlog import NetworkEvent
from .served import Served

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CODE = "import sys; sys.path.append(sys.argv[1]); from ringfence.egress.main import main; main()"
_LOOKS = 10  # at a process that has not answered; then it is replaced
_LOOK_S = 1.0
_SHORT_LIFE_S = 5.0  # a process that lives longer was well
_MOST_SHORT_LIVES = 8  # in a row; then it is given up
_FIRST_PAUSE_S = 0.02
# EBADF: it has ended, and the next one is not there yet.
_GONE = (errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


class Line:
    """An egress process, and a thread that reads from it. Thread-safe.

    Args:
        arguments: Its command line: the kind, and further directories of modules.

    Attributes:
        missing: Rights that the process could not drop, as text.
        fault: Its last report of an unexpected error.
    """

    def __init__(self, *arguments: str) -> None:
        self.owner = os.getpid()
        self.missing: list[str] = []
        self.fault = ""
        self._arguments = arguments
        self._lock = allocate_lock()  # for all of the following
        self._served: dict[str, Served] = {}
        self._answers: dict[int, _Answer] = {}
        self._tokens = 0
        self._is_closing = False
        self._given_up = ""
        self._short_lives = 0
        self._ended = allocate_lock()
        self._ended.acquire()
        self._spawn()
        try:
            start_new_thread(self._listen, ())
        except RuntimeError as exc:
            self._socket.close()
            _end(self.pid)
            raise NetworkPolicyError(
                f"no thread could be started for the process that enforces network policies: {exc}",
                hint="raise `ulimit -u` or `ulimit -v`",
            ) from exc

    # -- telling ------------------------------------------------------------------------------

    def serve(self, body: dict[str, Any], fds: list[int], *, is_move: bool = False) -> None:
        """Begin with a sandbox; its descriptors are ours from then on, and closed even on failure.

        Args:
            is_move: Another process serves it until this one does: see `settle`.
        """
        served = Served(body, fds, is_move=is_move)
        with self._lock:
            before = self._served.get(body["id"])
            try:
                self._check()
                self._served[body["id"]] = served
                self._send("serve", body, fds)
            except BaseException:
                if before is None:
                    self._served.pop(body["id"], None)
                else:
                    self._served[body["id"]] = before
                served.close()
                raise
        if before is not None:
            before.close()

    def change(self, body: dict[str, Any]) -> None:
        """Give a sandbox other settings; returns once they are in force.

        Raises:
            NetworkPolicyError: They are not; those from before are.
        """
        with self._lock:
            self._check()
            served = self._served.get(body["id"])
            if served is None:
                raise NetworkPolicyError(f"sandbox {body['id']} has no network to be changed")
            before = served.body, served.refusal
            served.body, served.refusal = body, ""
            self._send("change", body)
        self.flush()
        with self._lock:
            if refusal := served.refusal:
                served.body, served.refusal = before  # which the next process is told
                raise not_applied(refusal)

    def settle(self, sandbox_id: str) -> None:
        """Wait until a sandbox that was told of is served.

        Raises:
            NetworkPolicyError: It is not: its policy was refused.
        """
        self.flush()
        with self._lock:
            self._check()
            served = self._served.get(sandbox_id)
            if served is None:
                raise NetworkPolicyError(f"sandbox {sandbox_id} has no network")
            if served.refusal:
                raise not_applied(served.refusal)
            served.is_move = False

    def drop(self, sandbox_id: str) -> Served | None:
        """Cut everything of a sandbox and forget it; returns what there was, its last moment included."""
        with self._lock:
            served, pid = self._served.get(sandbox_id), self.pid
            self._send_drop(sandbox_id)
        if served is None:
            return None
        try:
            self.flush()
        except NetworkPolicyError:
            pass  # there is nobody left who could know more
        with self._lock:
            self._served.pop(sandbox_id, None)
            if self.pid != pid:
                self._send_drop(sandbox_id)  # who followed was told of it again
        served.close()
        return served

    def _send_drop(self, sandbox_id: str) -> None:
        if not self._given_up:
            self._send("drop", {"id": sandbox_id})

    def relay(self, body: dict[str, Any], fds: list[int]) -> None:
        """Hand over two connected sockets to be joined; the caller closes its own descriptors."""
        with self._lock:
            self._check()
            self._send("relay", body, fds)

    def flush(self) -> None:
        """Wait until everything that was told is done, and everything that happened is known.

        Raises:
            NetworkPolicyError: The process does not stay up.
        """
        self._ask("flush", {})

    def live(self, sandbox_id: str) -> list[NetworkEvent]:
        """List the open connections of a sandbox. Also does the work of `flush`."""
        found = self._ask("flush", {"id": sandbox_id})
        return [NetworkEvent(**form) for form in found.get("live", ())]

    def make_authority(self, hosts: list[str]) -> dict[str, str]:
        """A new certificate authority for `hosts`: `cert` and `key` in PEM."""
        found = self._ask("authority", {"hosts": hosts})
        if "cert" not in found:
            raise NetworkPolicyError(
                f"the egress process made no certificate authority: {self.fault or 'it is gone'}"
            )
        return {name: str(found[name]) for name in ("cert", "key")}

    def served(self, sandbox_id: str) -> Served | None:
        with self._lock:
            return self._served.get(sandbox_id)

    def close(self) -> None:
        """End the process; every connection of every sandbox ends with it."""
        with self._lock:
            self._is_closing = True
            self._hang_up()
        # A thread that died before its first line of Python never says so.
        if self._ended.acquire(timeout=_LOOK_S * _LOOKS):
            self._ended.release()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent. Takes no lock: others had it."""
        os.close(self._socket.detach())
        for served in self._served.values():
            served.close()

    # -- the process --------------------------------------------------------------------------

    def _spawn(self) -> None:
        try:
            started = spawn(_CODE, *self._arguments)
        except OSError as exc:
            raise NetworkPolicyError(
                f"the process that enforces network policies could not be started: {exc}",
                hint="look at `ulimit -u` and `ulimit -n`",
            ) from exc
        self.pid, self._socket = started.pid, started.control
        self._started_at = monotonic()
        # It always reads. If it is stopped all the same, callers must not stop with it.
        seconds = int(_LOOK_S * _LOOKS).to_bytes(8, "little") + bytes(8)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def _check(self) -> None:
        if self._given_up:
            raise NetworkPolicyError(
                f"the process that enforces network policies does not stay up: {self._given_up}",
                hint="all connections are denied; create sandboxes in a new process",
            )
        if self._is_closing:
            raise NetworkPolicyError("the egress process was closed")

    def _send(self, verb: str, body: dict[str, Any], fds: list[int] | tuple[int, ...] = ()) -> None:
        """Tell it something. If it is gone, the one that follows is told all that counts."""
        try:
            wire.send(self._socket, (verb, body), fds)
        except OSError as exc:
            if exc.errno in _GONE:
                self._hang_up()
                return
            raise

    def _hang_up(self) -> None:
        try:
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # closing would not wake the thread that listens
        except OSError:
            pass

    def _ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer; empty if a new process replaced the old one and has
        all its state.

        Raises:
            NetworkPolicyError: No process answered: see `_check`.
        """
        answer = _Answer()
        with self._lock:
            self._check()
            self._tokens += 1
            token = self._tokens
            self._answers[token] = answer
            self._send(verb, {**body, "token": token})
            pid = self.pid
        try:
            if not self._await(answer, pid):
                self._replace(pid)
                if not answer.wait(_LOOK_S * _LOOKS):
                    raise NetworkPolicyError(
                        "the process that enforces network policies and its replacement did not answer",
                        hint="all connections are denied; create sandboxes in a new process",
                    )
            if not answer.value:
                with self._lock:
                    self._check()
            return answer.value
        finally:
            with self._lock:
                self._answers.pop(token, None)

    def _await(self, answer: _Answer, pid: int) -> bool:
        """Wait for an answer; False after the timeout, or at once for a stopped process.

        Count polls, not time: if we were frozen together with the process, that time was not spent
        waiting.
        """
        for _ in range(_LOOKS):
            if answer.wait(_LOOK_S):
                return True
            if _is_stopped(pid):
                return answer.wait(0)
        return False

    def _replace(self, pid: int) -> None:
        """End a process that does not answer: its connections die, and the next one is told all."""
        with self._lock:
            if self.pid == pid:
                self.fault = "it did not answer, and was replaced"
                self._hang_up()

    # -- listening ----------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while self._listen_to_one():
                pass
        except BaseException as exc:  # noqa: BLE001  callers would wait for a thread that is gone
            _end(self.pid)
            with self._lock:
                self._give_up(f"the thread that listens to it failed: {exc!r}")
                self._socket.close()
        finally:
            self._ended.release()

    def _listen_to_one(self) -> bool:
        """Hear one process out; whether there is another one after it."""
        sock, pid = self._socket, self.pid
        while data := _receive(sock):
            try:
                self._hear(jsonform.loads(data))
            except Exception as exc:  # noqa: BLE001  it may say what it likes: we stay
                self.fault = f"not understood: {exc!r}"
        _end(pid)
        with self._lock:
            sock.close()
            if self._is_closing:
                self._forget_all()
                return False
        return self._restart()

    def _restart(self) -> bool:
        short = monotonic() - self._started_at < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives > 1:
            sleep(_FIRST_PAUSE_S * 2**self._short_lives)
        with self._lock:
            if self._is_closing:
                self._forget_all()
                return False
            try:
                if self._short_lives > _MOST_SHORT_LIVES:
                    raise NetworkPolicyError(self.fault or "it ends as soon as it has started")
                self._spawn()
                for served in self._served.values():
                    self._send("serve", served.body, served.fds)
                # Whoever asked in the meantime asked nobody; what counts has just been told.
                for answer in self._answers.values():
                    answer.set({})
            except (NetworkPolicyError, OSError) as exc:
                self._give_up(str(exc))
                return False
        return True

    def _give_up(self, reason: str) -> None:
        """Serve nothing more: nobody waits, and who connects is refused. With the lock."""
        self._given_up = reason
        self._hang_up()
        for served in self._served.values():
            served.give_up()
        for answer in self._answers.values():
            answer.set({})

    def _forget_all(self) -> None:
        for served in self._served.values():
            served.close()
        for answer in self._answers.values():
            answer.set({})

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.missing = [str(word) for word in message.get("missing", ())]
        for form in message.get("events", ()):
            event = NetworkEvent(**form)
            served = self._served.get(event.sandbox_id)
            if served is not None:
                served.add(event)
        for sandbox_id, count in message.get("missed", {}).items():
            served = self._served.get(sandbox_id)
            if served is not None:
                served.missed += int(count)
        if "fault" in message:
            self.fault = str(message["fault"])
        if "refused" in message:
            self._hear_refusal(message["refused"])
        self._hear_answer(message)

    def _hear_refusal(self, message: dict[str, Any]) -> None:
        with self._lock:
            served = self._served.get(message["id"])
            if served is None or message["verb"] not in ("serve", "change"):
                self.fault = str(message["reason"])
                return
            served.refusal = str(message["reason"])
            if message["verb"] == "serve" and not served.is_move:
                served.give_up()  # nobody serves it: who connects is to be refused, not to wait

    def _hear_answer(self, message: dict[str, Any]) -> None:
        part = message.get("live")
        given = part or message.get("authority") or {"token": message.get("flushed")}
        with self._lock:
            answer = self._answers.get(given["token"])
        if answer is not None and part:
            answer.live += part["events"]
        elif answer is not None:
            answer.set({**given, "live": answer.live})


class _Answer:
    """Something that another thread will say."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._is_set = False
        self.value: dict[str, Any] = {}
        self.live: list[dict[str, Any]] = []

    def set(self, value: dict[str, Any]) -> None:
        if not self._is_set:
            self.value, self._is_set = value, True
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for the answer; False at the timeout. For one thread."""
        return self._is_set or self._lock.acquire(timeout=seconds)


def not_applied(refusal: str) -> NetworkPolicyError:
    return NetworkPolicyError(f"the policy was not applied: {refusal}")


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped our child."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False


def _receive(sock: wire.Socket) -> bytes:
    try:
        return sock.recv(1 << 17)
    except OSError:
        return b""


def _end(pid: int) -> None:
    """Make sure that a process which has hung up is gone, and reap it; once more does nothing."""
    try:
        # Of one that was reaped the number may be a stranger's, who is no child of ours.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # the program reaps all its children itself
