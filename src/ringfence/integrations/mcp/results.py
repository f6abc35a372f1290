"""What the tools answer. The SDK turns these into output schemas and structured content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from .. import outcome

if TYPE_CHECKING:
    from ...model.exec import ExecResult
    from ...model.files import FileInfo

_SANDBOX = Field("", description="Give this as `sandbox` to further calls; empty: not needed.")


class Answer(BaseModel):
    """What every tool says."""

    sandbox: str = _SANDBOX


class CommandAnswer(Answer):
    """How a command ended."""

    stdout: str
    stderr: str
    exit_code: int = Field(description="128 + N where signal N ended it, 124 where time did.")
    timed_out: bool = False
    note: str = Field("", description="Why it ended early, or what of the output is missing.")
    duration_s: float = 0.0

    @classmethod
    def of(cls, sandbox: str, result: ExecResult) -> CommandAnswer:
        """From the library's result."""
        notes = [outcome.ended_early(result)]
        if result.truncated:
            dropped = result.stdout_dropped_bytes + result.stderr_dropped_bytes
            notes.append(f"{dropped} bytes from the middle of the output were dropped")
        return cls(
            sandbox=sandbox,
            stdout=result.stdout_text,
            stderr=result.stderr_text,
            exit_code=outcome.exit_code(result),
            timed_out=result.timed_out,
            note="; ".join(note for note in notes if note),
            duration_s=round(result.duration_s, 3),
        )


class FileAnswer(Answer):
    """A file, or the part of it that was asked for."""

    path: str
    content: str
    encoding: str = Field("utf-8", description="`base64` where the file is not text.")
    size_bytes: int
    complete: bool = Field(description="Whether `content` reaches the end of the file.")


class ChangeAnswer(Answer):
    """A file that was written."""

    path: str
    size_bytes: int


class Entry(BaseModel):
    """One directory entry."""

    name: str
    kind: str
    size_bytes: int
    link_target: str | None = None

    @classmethod
    def of(cls, info: FileInfo) -> Entry:
        """From the library's."""
        return cls(
            name=info.name,
            kind=info.kind,
            size_bytes=info.size_bytes,
            link_target=info.link_target,
        )


class ListAnswer(Answer):
    """A directory."""

    path: str
    entries: list[Entry]


class ProcessAnswer(Answer):
    """A background process now, and what it wrote since the last look."""

    process: str
    running: bool
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


class ResetAnswer(Answer):
    """The sandbox has ended."""

    ended: bool = True
