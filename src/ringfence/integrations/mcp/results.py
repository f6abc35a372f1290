"""Results of the tools: structured for programs, and the same as plain text for models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from .. import outcome

if TYPE_CHECKING:
    from ...contexts import Execution
    from ...model.execs.exec import ExecResult
    from ...model.files import FileInfo

_SANDBOX = Field("", description="Give this as `sandbox` to further calls; absent: not needed.")


class Answer(BaseModel):
    """Fields of every answer. What has its default is not sent."""

    sandbox: str = _SANDBOX

    def lines(self) -> list[str]:
        """The answer as text, without the sandbox's name."""
        raise NotImplementedError

    def text(self) -> str:
        """The answer as a model reads it."""
        named = [f"[sandbox: {self.sandbox}]"] if self.sandbox else []
        return "\n".join(line for line in (*self.lines(), *named) if line)


class CommandAnswer(Answer):
    """How a command ended."""

    stdout: str
    stderr: str = ""
    exit_code: int = Field(description="128 + N where signal N ended it, 124 where time did.")
    timed_out: bool = False
    note: str = Field("", description="Why it ended early, or what of the output is missing.")
    result: str = Field(default="", description="Value of the code's last expression.")

    @classmethod
    def of_cell(cls, sandbox: str, cell: Execution, most: int) -> CommandAnswer:
        """From a cell of a context, with at most so many characters of each text."""
        error = cell.error
        stderr = "\n".join(filter(None, (cell.stderr, error.traceback if error else "")))
        texts = [each.text for each in cell.results if each.text and each.png is None]
        dropped = f"{cell.dropped_bytes} bytes of output were dropped" if cell.dropped_bytes else ""
        plain = error is not None and not error.traceback
        why = f"{error.name}: {error.value}" if error and (plain or cell.timed_out) else ""
        return cls(
            sandbox=sandbox,
            stdout=_cut(cell.stdout, most),
            stderr=_cut(stderr, most),
            result=_cut("\n".join(texts), most),
            exit_code=124 if cell.timed_out else int(error is not None),
            timed_out=cell.timed_out,
            note="; ".join(each for each in (why, dropped) if each),
        )

    @classmethod
    def of(cls, sandbox: str, result: ExecResult) -> CommandAnswer:
        """From the library's result."""
        notes = [outcome.ended_early(result)]
        if result.truncated:
            dropped = result.stdout_dropped_bytes + result.stderr_dropped_bytes
            notes.append(
                f"{dropped} bytes from the middle of the output were dropped: "
                "write it to a file and read parts of that"
            )
        return cls(
            sandbox=sandbox,
            stdout=result.stdout_text,
            stderr=result.stderr_text,
            exit_code=outcome.exit_code(result),
            timed_out=result.timed_out,
            note="; ".join(note for note in notes if note),
        )

    def lines(self) -> list[str]:
        """Output, errors, and how it ended where that is not plain success."""
        code = f"[exit code {self.exit_code}]" if self.exit_code else ""
        note = f"[{self.note}]" if self.note else ""
        streams = self.stdout.removesuffix("\n"), self.stderr.removesuffix("\n")
        shown = [*streams, self.result, note, code]
        return shown if any(shown) else ["[no output]"]


def _cut(text: str, most: int) -> str:
    left_out = len(text) - most
    half = most // 2
    if left_out <= 0:
        return text
    return f"{text[:half]}\n[{left_out} characters are left out here]\n{text[-half:]}"


class FileAnswer(Answer):
    """A file, or the part of it that was asked for."""

    path: str
    content: str = ""
    encoding: str = Field(
        "utf-8",
        description="`base64` where the file is not text; a media type where the answer is an image.",
    )
    size_bytes: int
    next_offset: int | None = Field(
        default=None, description="Where the rest begins; absent: none is left."
    )

    def lines(self) -> list[str]:
        """The content, and how to get the rest."""
        more = self.next_offset
        kind = "" if self.encoding == "utf-8" else f"{self.encoding}, "
        rest = (
            f"[{kind}{self.size_bytes} bytes in all; the rest from offset {more}]" if more else ""
        )
        return [self.content, rest or (f"[{kind}{self.size_bytes} bytes]" if kind else "")]


class ChangeAnswer(Answer):
    """A file that was written."""

    path: str
    size_bytes: int

    def lines(self) -> list[str]:
        """The path and the size."""
        return [f"{self.path}: {self.size_bytes} bytes"]


class Entry(BaseModel):
    """A directory entry."""

    name: str
    kind: str = "file"
    size_bytes: int = 0
    link_target: str | None = None

    @classmethod
    def of(cls, info: FileInfo) -> Entry:
        """From the library's."""
        return cls(
            name=info.name,
            kind=info.kind,
            size_bytes=info.size_bytes if info.kind == "file" else 0,
            link_target=info.link_target,
        )

    def line(self) -> str:
        """As `ls -F` shows it."""
        if self.link_target is not None:
            return f"{self.name} -> {self.link_target}"
        if self.kind == "directory":
            return f"{self.name}/"
        kind = "" if self.kind == "file" else f" ({self.kind})"
        return f"{self.name}{kind} {self.size_bytes}"


class ListAnswer(Answer):
    """A directory."""

    path: str
    entries: list[Entry]
    left_out: int = Field(0, description="Entries beyond these.")

    def lines(self) -> list[str]:
        """Format one entry per line."""
        more = f"[{self.left_out} more entries: list a directory below]" if self.left_out else ""
        return [*(each.line() for each in self.entries), more] if self.entries else ["[empty]"]


class ProcessAnswer(Answer):
    """A background process now, and what it wrote since the last look."""

    process: str
    running: bool
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None

    def lines(self) -> list[str]:
        """The news, and the state."""
        state = "runs" if self.running else f"ended with exit code {self.exit_code}"
        return [
            self.stdout.removesuffix("\n"),
            self.stderr.removesuffix("\n"),
            f"[{self.process} {state}]",
        ]


class RaceAnswer(Answer):
    """Outcome of commands that ran at once."""

    winner: int | None = Field(description="Index of the command whose copy the sandbox is now.")
    outputs: list[str] = Field(description="Of each command; empty: ended as another one won.")

    def lines(self) -> list[str]:
        """Give the winner's output, or that of all where there is none."""
        if self.winner is not None:
            won = f"[command {self.winner} won: the sandbox has its files now]"
            return [self.outputs[self.winner], won]
        shown = [f"[command {index}]\n{text}" for index, text in enumerate(self.outputs)]
        return [*shown, "[no command exited with 0: the sandbox is unchanged]"]


class ResetAnswer(Answer):
    """The sandbox has ended."""

    ended: bool

    def lines(self) -> list[str]:
        """Say that the sandbox has ended."""
        return ["The sandbox has ended. The next call gets a fresh one."]
