"""Code blocks of a Markdown page, and running them as a reader would.

- ```console: every `$ command` (continued on `> ` lines) runs in one shell per block; the lines
  below a command are its output.
- ```python: all blocks of a page run in order in one program.
- ```output: what the Python block right above printed.

`...` in expected output stands for anything. `<!-- not run: reason -->` right above a block takes
it out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\s*$")
NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>.+?) -->$")
TIMEOUT_S = 180  # a busy machine starts a command in a second


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its fence, counted from 1."""

    language: str
    text: str
    line: int
    not_run: str = ""


@dataclass
class Command:
    """One `$ command` of a console block and the output shown below it."""

    script: str
    expected: list[str] = field(default_factory=list)


def blocks_of(page: str) -> list[Block]:
    blocks: list[Block] = []
    lines = iter(enumerate(page.splitlines(), start=1))
    reason = ""
    for number, line in lines:
        if fence := FENCE.match(line):
            body = []
            for _, inner in lines:
                if "```" == inner.rstrip():
                    break
                body.append(inner)
            blocks.append(Block(fence[1], "\n".join(body), number, reason))
            reason = ""
        elif marker := NOT_RUN.match(line.strip()):
            reason = marker["reason"]
        elif line.strip():
            reason = ""
    return blocks


def commands_of(block: Block) -> list[Command]:
    commands: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:]))
        elif line.startswith("> ") and commands and not commands[-1].expected:
            commands[-1].script += "\n" + line[2:]
        elif commands:
            commands[-1].expected.append(line)
        else:
            raise ValueError(f"line {block.line}: output before any command: {line}")
    return commands


def matches(expected: str, got: str) -> bool:
    """Compare as text with trailing space ignored; `...` matches anything."""
    pattern = ".*".join(re.escape(part.strip(" ")) for part in expected.strip().split("..."))
    plain = "\n".join(line.rstrip() for line in got.strip().splitlines())
    return re.fullmatch(pattern.replace(".*", r"\s*.*\s*"), plain, re.DOTALL) is not None


def run_console(block: Block, cwd: Path, env: dict[str, str]) -> None:
    """Run one console block; a command may fail only where the next one is `echo $?`.

    Raises:
        AssertionError: a command failed or printed something else.
    """
    commands = commands_of(block)
    mark = "@@ringfence-docs@@"
    script = "\n".join(
        f"{command.script}\n__status=$?; echo '{mark}'$__status; (exit $__status)"
        for command in commands
    )
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # [output, "status\noutput", ..., "status\n"]: each mark ends one command's output.
    first, *rest = run.stdout.split(mark)
    outputs = [first, *(part.partition("\n")[2] for part in rest)]
    statuses = [int(part.partition("\n")[0]) for part in rest]
    for number, command in enumerate(commands):
        where = f"line {block.line}: $ {command.script}"
        assert number < len(statuses), f"{where}\nnever ended\n{run.stderr}"
        asked = number + 1 < len(commands) and "echo $?" == commands[number + 1].script.strip()
        assert 0 == statuses[number] or asked, f"{where}\nstatus {statuses[number]}\n{run.stderr}"
        _check(where, "\n".join(command.expected), outputs[number], run.stderr)


def run_python(blocks: list[Block], cwd: Path, env: dict[str, str], page: str) -> None:
    """Run a page's Python blocks in order as one program; each prints what its output block says.

    Raises:
        AssertionError: a block failed or printed something else.
    """
    mark = "@@ringfence-docs@@"
    # Blank lines keep the page's line numbers, so that a traceback names the line in the page.
    program = ["from __future__ import annotations"]
    python = [block for block in blocks if "python" == block.language]
    for block in python:
        program.append(
            f"exec(compile({chr(10) * block.line + block.text!r}, {page!r}, 'exec'), globals())\n"
            f"print({mark!r}, flush=True)"
        )
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert 0 == run.returncode, f"{page}\n{run.stdout}\n{run.stderr}"
    outputs = run.stdout.split(f"{mark}\n")
    shown = {id(above): below for above, below in pairwise(blocks) if "output" == below.language}
    for block, output in zip(python, outputs, strict=False):
        if id(block) in shown:
            _check(f"{page}, line {block.line}", shown[id(block)].text, output)


def _check(where: str, expected: str, got: str, stderr: str = "") -> None:
    assert matches(expected, got), f"{where}\nexpected:\n{expected}\ngot:\n{got}\n{stderr}"
