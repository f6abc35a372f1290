"""Kernel of a Python context: runs inside the sandbox, with the standard library of Python 3.8 or newer.

Requests are lines of JSON on standard input, answers are frames (see `frames`) on what was standard
output. Cells get pipes in place of both, read by a thread here.
"""

from __future__ import annotations

# Modules in C, not those in Python around them, which import enum, re and collections: a context starts
# in the time of two bare interpreters, not of three.
import _ast as ast
import _signal as signal
import _thread
import builtins
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from queue import SimpleQueue
    from types import CodeType
    from typing import Any

    # Inside, the bootstrap runs both in this namespace, ahead of this module.
    from .kernel_values import BINARY, PART, PART_BYTES, bundle_of, clipped, encode_value, error_of
    from .kernel_wire import Wire, high

_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class StdinNotAvailable(RuntimeError):  # noqa: N818  its name is what a cell's author reads
    """input() was called in a cell that was run without input."""


class Input(io.TextIOBase):
    """Standard input of Python code: lines that the host is asked for."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask

    def readable(self) -> bool:
        return True

    def readline(self, _size: int = -1) -> str:  # type: ignore[override]
        try:
            return self._ask("") + "\n"
        except EOFError:
            return ""

    def read(self, _size: int | None = -1) -> str:
        return "".join(self)


class Lines:
    """Source of cells for tracebacks: in `linecache`, as soon as that is imported."""

    def __init__(self) -> None:
        self._sources: dict[str, Any] = {}
        if "linecache" in sys.modules:
            self._sources = sys.modules["linecache"].cache
        else:
            sys.meta_path.insert(0, self)

    def add(self, name: str, code: str) -> None:
        self._sources[name] = (len(code), None, code.splitlines(True), name)

    def find_spec(self, name: str, *rest: Any) -> Any:
        """Find `linecache` as everybody does, and give it what it has missed."""
        if name != "linecache":
            return None
        sys.meta_path.remove(self)
        spec = next(filter(None, (each.find_spec(name, *rest) for each in sys.meta_path)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_fill(module: Any) -> None:
                run(module)
                module.cache.update(self._sources)
                self._sources = module.cache

            spec.loader.exec_module = run_and_fill  # type: ignore[method-assign]
        return spec


class ExitStatus(Exception):  # noqa: N818  its name is what a cell's author reads
    """The last command of a cell of bash failed."""


class Kernel:
    """Runs cells one after the other in one namespace."""

    def __init__(self, rest: bytes, language: str = "python") -> None:
        self._requests, self._rest = high(0), rest
        self._run = self._evaluate_in_bash if language == "bash" else self._cell
        self._shell: Any = None
        self._jupyter: Any = None
        self._was_interrupted = False
        stderr = -1 if language in ("python", "bash") else high(2)  # cells get another
        names: dict[str, Any]
        if language.startswith("jupyter:"):
            self._run = self._evaluate_in_jupyter
            names = {"__name__": "ringfence_jupyter"}
            exec(compile(PART, "<ringfence jupyter>", "exec"), names)
            self._jupyter = names["Jupyter"](language.partition(":")[2], stderr)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self.wire = Wire()
        self._driver: Any = None
        if language in ("r", "java"):
            self._run = self._evaluate_by_driver
            names = {"__name__": "ringfence_driven"}
            exec(compile(PART, "<ringfence driven>", "exec"), names)
            self._driver = names["Driver"](language, self.wire.ends, stderr)
        self._cells: SimpleQueue[dict[str, Any]] = _queue()
        self._answers: SimpleQueue[str | None] = _queue()
        self._waiting: set[str] = (
            set()
        )  # cells; those that are interrupted before their turn leave it
        self._count, self._takes_input = 0, False
        self._read, self._lines = _reader(), Lines()
        self._loop: Any = None
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        self.names = main.__dict__
        self.names["__builtins__"] = builtins
        own: dict[str, Any] = vars(builtins)
        own["input"] = lambda prompt="": self._input(str(prompt))
        own["display"], own["__ringfence_line__"] = self.display, self._line
        sys.stdin = Input(self._input)
        sys.argv = [""]
        os.environ.setdefault("MPLBACKEND", "agg")

    def serve(self) -> None:
        """Answer requests until the host closes its end."""
        try:
            os.setpgid(0, 0)  # an interrupt reaches what a cell started, and nothing else
        except OSError:
            pass
        for each in (self._jupyter, self._driver):
            if each is not None:
                each.start()  # before the mask, which it would inherit
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        if self._run != self._cell:  # nothing is raised where others are interrupted
            self.wire.whole.interrupt = self._note_interrupt  # type: ignore[method-assign]
        for body in (self._listen, self.wire.pump):
            _thread.start_new_thread(body, ())
        signal.signal(signal.SIGINT, self.wire.whole.interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        self.wire.result("hello", {})
        while True:
            request = self._cells.get()
            if request["do"] in ("copied", "ping"):
                if request["do"] == "copied":
                    _reseed(self.names)
                    for each in (self._shell, self._driver):
                        if each is not None:
                            each.reseed()
                self.wire.result("hello", {})
            elif request["do"] == "variables":
                self._serve(request, self._variables)
            else:
                self._count += request["do"] == "run"  # else it is a hidden cell
                self._serve(request, self._run)

    def _listen(self) -> None:
        """Body of a thread: sort requests. An interrupt does not wait for its turn."""
        seen = self._rest
        while True:
            *lines, seen = seen.split(b"\n")
            for line in lines:
                try:
                    self._sort(self._read(line.decode()))
                except (ValueError, StopIteration, SystemError):
                    pass  # incomplete: its writer was cut off; SystemError without `json.decoder`, to 3.12
            data = os.read(self._requests, 1 << 16)
            if not data:
                os._exit(0)
            pieces = [seen, data]
            while b"\n" not in data:  # long code comes in many pieces
                data = os.read(self._requests, 1 << 16)
                if not data:
                    os._exit(0)
                pieces.append(data)
            seen = b"".join(pieces)

    def _sort(self, request: dict[str, Any]) -> None:
        if request["do"] == "answer":
            self._answers.put(request["text"])
        elif request["do"] in ("copied", "ping"):
            self._cells.put(request)
        elif request["do"] != "interrupt":
            with self.wire.whole:
                self._waiting.add(request["cell"])
            self._cells.put(request)
        else:
            with self.wire.whole:
                cell = request["cell"]
                if cell in self._waiting:
                    self._waiting.discard(cell)
                    self.wire.skip(cell, self._count)
                elif self.wire.cell and cell in (None, self.wire.cell):
                    if os.getpgrp() == os.getpid():
                        os.killpg(0, signal.SIGINT)
                    else:
                        os.kill(os.getpid(), signal.SIGINT)

    def _serve(self, request: dict[str, Any], run: Callable[[dict[str, Any]], None]) -> None:
        whole = self.wire.whole
        signal.signal(signal.SIGINT, whole.interrupt)  # an earlier cell may have ignored it
        self.wire.restore()
        while not self._answers.empty():
            self._answers.get()
        self._was_interrupted = False
        with whole:
            if request["cell"] not in self._waiting:
                return
            self._waiting.discard(request["cell"])
            self.wire.begin(request["cell"])
        error = None
        try:
            try:
                whole.is_running = True
                run(request)
            finally:
                whole.is_running = False
        except BaseException as exc:  # noqa: BLE001  SystemExit too: the kernel stays
            whole.is_running = False
            error = error_of(exc)
        if self.wire.is_child:
            if error is not None:
                os.write(2, error["traceback"])
            os._exit(0 if error is None else 1)
        if error is not None:
            self.wire.result("error", error)
        self.wire.end(self._count)

    # -- running ------------------------------------------------------------------------------

    def _cell(self, request: dict[str, Any]) -> None:
        self._takes_input = request["input"]
        name = f"<cell {self._count}>"
        code = request["code"]
        self._lines.add(name, code)
        tree = _parsed(code, name)
        last = None
        is_shown = not code.rstrip().endswith(";")
        if is_shown and tree.body and isinstance(tree.body[-1], ast.Expr):
            last = tree.body.pop()
        value = None
        try:
            if tree.body:
                self._evaluate(compile(tree, name, "exec", _TOP_LEVEL_AWAIT))
            if isinstance(last, ast.Expr):
                expression = ast.Expression(last.value)
                value = self._evaluate(compile(expression, name, "eval", _TOP_LEVEL_AWAIT))
        except (Exception, SystemExit):
            self._show_figures(None)  # as IPython does; the next cell would show them else
            raise
        if value is not None:
            self.names["_"] = value
            self._show("main", value)
        self._show_figures(value)

    def _evaluate(self, code: CodeType) -> Any:
        value = eval(code, self.names)
        if not code.co_flags & 0x80:  # inspect.CO_COROUTINE
            return value
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(value)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def _evaluate_in_bash(self, request: dict[str, Any]) -> None:
        if self._shell is None:
            names: dict[str, Any] = {"__name__": "ringfence_bash"}
            exec(compile(PART, "<ringfence bash>", "exec"), names)
            self._shell = names["Shell"](self.wire.ends)
        status = self._shell.run(request["code"], self._takes_interrupt)
        if status is None:
            self._shell = None
            raise ExitStatus("bash has ended; the next cell gets a fresh one")
        if status:
            raise ExitStatus(str(status))

    def _evaluate_in_jupyter(self, request: dict[str, Any]) -> None:
        def show(kind: str, data: dict[str, Any]) -> None:
            parts = {str(mime)[:100]: encode_value(str(mime), each) for mime, each in data.items()}
            fitting = [each for each in parts.items() if len(each[1]) <= PART_BYTES]
            self.wire.result(kind, dict(fitting[:32]))

        def answer(prompt: str) -> str | None:
            self.wire.ask(prompt)
            return self._answers.get()

        takes_input = answer if request["input"] else None
        options = {"show": show, "answer": takes_input, "takes_interrupt": self._takes_interrupt}
        self._jupyter.run(request["code"], self.wire.emit, **options)

    def _evaluate_by_driver(self, request: dict[str, Any]) -> None:
        def show(kind: str, parts: dict[str, bytes]) -> None:
            found = {}
            for mime, data in parts.items():
                is_text = mime not in BINARY
                found[mime[:100]] = encode_value(
                    mime, data.decode("utf-8", "replace") if is_text else data
                )
            self.wire.result(
                kind, {mime: data for mime, data in found.items() if len(data) <= PART_BYTES}
            )

        if not self._driver.run(request["code"], show, self._takes_interrupt):
            raise ExitStatus("the interpreter has ended; the next cell gets a fresh one")

    def _note_interrupt(self, *_signal: object) -> None:
        self._was_interrupted = True

    def _takes_interrupt(self) -> bool:
        was, self._was_interrupted = self._was_interrupted, False
        return was

    def _line(self, kind: str, text: str) -> None:
        """Run a line that begins with `!` or `%`, or a cell that begins with `%%`."""
        import subprocess

        word, _, rest = text.strip().partition("\n" if kind == "%%" else " ")
        sys.stdout.flush()
        if kind == "!":
            subprocess.call(text, shell=True)
        elif kind == "%%" and word.strip() in ("bash", "sh"):
            subprocess.run([word.strip(), "-c", rest], check=True)
        elif kind == "%%":
            raise NameError(f"no cell command %%{word.strip()} here: %%bash and %%sh are known")
        elif word == "matplotlib":
            pass  # it chooses how figures are shown: here each cell ends with those it left open
        elif word == "cd":
            os.chdir(os.path.expanduser(rest.strip() or "~"))
        elif word == "pip":
            import importlib
            import shlex
            import site

            # The base is read-only: pip installs below the home directory.
            env = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
            subprocess.call([sys.executable, "-m", "pip", *shlex.split(rest)], env=env)
            user = site.getusersitepackages()
            if user not in sys.path and os.path.isdir(user):
                sys.path.append(user)
            importlib.invalidate_caches()
        else:
            known = "%pip, %cd, %matplotlib and !command are known"
            raise NameError(f"no line command %{word} here: {known}")

    def _input(self, prompt: str = "") -> str:
        sys.stdout.flush()
        if self.wire.is_child or not self._takes_input:
            raise StdinNotAvailable("input() has no input: run the cell with stdin= or on_input=")
        self.wire.ask(prompt)
        answer = self._answers.get()
        if answer is None:
            raise EOFError("no more input")
        return answer

    # -- showing ------------------------------------------------------------------------------

    def display(self, *values: Any) -> None:
        """Send values as results of the cell, in every MIME type that they have."""
        for value in values:
            self._show("display", value)

    def _show(self, name: str, value: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if self.wire.is_child:  # which has no part in the protocol
            return
        self.wire.result(name, bundle_of(value))

    def _show_figures(self, shown: Any) -> None:
        """Show the figures of matplotlib that the cell left open, but for the one that it shows."""
        plots = sys.modules.get("matplotlib.pyplot")
        if plots is None or self.wire.is_child:
            return
        for number in plots.get_fignums():
            figure = plots.figure(number)
            if figure is not shown:
                self._show("display", figure)
            plots.close(figure)

    def _variables(self, _request: dict[str, Any]) -> None:
        import json

        found: list[dict[str, str]] = []
        for name, value in list(self.names.items()):
            if name.startswith("_") or isinstance(value, type(sys)) or len(found) >= 1000:
                continue
            shown = clipped(repr(value), 200)
            found.append({"name": name[:200], "type": type(value).__name__[:200], "value": shown})
        self.wire.result("main", {"application/json": json.dumps(found).encode()})


def _parsed(code: str, name: str) -> ast.Module:
    """Parse a cell; lines with `!` and `%` become calls where Python has no other meaning for them."""
    if code.lstrip().startswith("%%"):
        code = f"__ringfence_line__('%%', {code.strip()[2:]!r})"
    lines = code.split("\n")
    while True:
        try:
            tree: ast.Module = compile(
                "\n".join(lines), name, "exec", _TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
            )
            return tree
        except SyntaxError as exc:
            at = (exc.lineno or 0) - 1
            if not 0 <= at < len(lines) or lines[at].lstrip()[:1] not in ("!", "%"):
                raise
            text = lines[at].lstrip()
            indent = lines[at][: len(lines[at]) - len(text)]
            lines[at] = f"{indent}__ringfence_line__({text[0]!r}, {text[1:]!r})"


def _queue() -> Any:
    try:
        from _queue import SimpleQueue
    except ImportError:
        from queue import SimpleQueue
    return SimpleQueue()


def _reader() -> Callable[[str], Any]:
    """Return `json.loads`, for what the host writes."""
    names = ("object_hook", "object_pairs_hook", "parse_constant")
    form: Any = type(
        "Form",
        (),
        {**dict.fromkeys(names), "strict": False, "parse_float": float, "parse_int": int},
    )
    try:
        from _json import make_scanner

        scan: Any = make_scanner(form)
        return lambda text: scan(text, 0)[0]
    except (ImportError, AttributeError):  # of another interpreter
        import json

        return json.loads


def _reseed(names: dict[str, Any]) -> None:
    """In a copy of a process: whatever draws random numbers draws others than the original."""
    loaded: dict[str, Any] = sys.modules  # an import would cost each copy pages of its own
    if "random" in loaded:
        loaded["random"].seed()
    if "tempfile" in loaded:
        loaded["tempfile"]._name_sequence = None
    if "uuid" in loaded:
        loaded["uuid"]._last_timestamp = None
    if "ssl" in loaded:
        loaded["ssl"].RAND_add(os.urandom(64), 64.0)
    if hasattr(loaded.get("numpy"), "random"):
        _reseed_numpy(loaded["numpy"].random, names)
    if "torch" in loaded:
        loaded["torch"].seed()


def _reseed_numpy(random: Any, names: dict[str, Any]) -> None:
    """Seed the global generator anew, and those among the names that were made without a seed.

    The entropy of `SeedSequence()` has 128 bits; a seed of the program's own is kept.
    """
    random.seed()
    kinds = [each for each in vars(random).values() if isinstance(each, type)]
    for value in list(names.values()):
        if any(type(value) is kind for kind in kinds):
            bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
            seeds = getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)
            entropy = getattr(seeds, "entropy", None)
            if isinstance(entropy, int) and entropy >> 64:
                bits.state = type(bits)().state


if __name__ == "ringfence_kernel":
    Kernel(globals()["REST"], sys.argv[-1]).serve()
