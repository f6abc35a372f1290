"""The project's language: retired terms stay retired, docstrings say what a thing does, sentences are short.

Terms and reasons are in docs/decisions/0170-use-the-fields-terms.md. An allowance is what was there when
the rule came. It may be lowered, never raised.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent
RECORD = "0170-use-the-fields-terms.md"
SOURCE = ROOT / "src" / "ringfence"
PYTHON = sorted(
    path
    for top in ("src", "tests", "tools", "examples")
    for path in (ROOT / top).rglob("*.py")
    if path != Path(__file__)
)
RETIRED = {
    **dict.fromkeys(("hull", "hulls", "hulled"), "jail"),
    **dict.fromkeys(("keeper", "keepers"), "jailer"),
    **dict.fromkeys(("errand", "errands"), "helper task"),
    **dict.fromkeys(("ferry", "ferries", "ferried"), "connection relay"),
    **dict.fromkeys(("noun", "nouns"), "model"),
    "doorkeeper": "authenticator",
    "stills": "process images",
    "unkept": "handover",
}
"""Words with no other use here, and what to say instead: as parts of names, in comments and in docstrings."""
RETIRED_NAMES = {
    **dict.fromkeys(("asleep", "beds", "Bed", "sleeper", "falls_asleep"), "hibernation"),
    **dict.fromkeys(("NoWallsError", "walls", "of_walls"), "isolation"),
    **dict.fromkeys(("NO_WAYS", "ways_in"), "namespace fds"),
    **dict.fromkeys(("still_program", "Still", "take_still"), "process image"),
    **dict.fromkeys(("HOLDER", "Keeping", "NothingKept"), "fd store, handover"),
    **dict.fromkeys(("Lanes", "lanes"), "thread pools"),
    **dict.fromkeys(("Doorkeeper", "Guard"), "authenticator, middleware"),
    **dict.fromkeys(("Tally", "Book"), "counters, index"),
    **dict.fromkeys(("bury", "hurry", "poke", "bear"), "release, unthrottle, wake, spawn"),
}
"""Whole names, of words that have other uses."""
NAMED_BY_OTHERS = {
    "tests/client/test_sandbox.py",
    "tests/conformance/test_ssh.py",
    "tests/native/test_degraded.py",
}
"""Tests in which a `sleeper` is a process that runs sleep(1)."""

OPENERS = re.compile(r"(Who|What|Whose|Whether|Those|Nobody|Somebody|One)\b")
_ANY_OPENER = re.compile(rf"[\"']\s*{OPENERS.pattern}")
OPENERS_LEFT: dict[str, int] = {}
"""Docstrings of each package that begin so, as of the rule."""
MOST_WORDS = 35
LONG_LEFT = {
    ".": 2,
    "docs/decisions": 56,
    "docs/explanation": 8,
    "docs/how-to": 11,
    "docs/reference": 7,
}
"""Sentences of more words in each directory of documents, as of the rule."""


def _tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)


def _words_of(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


_ANY_RETIRED = re.compile(rf"(?i:{'|'.join(RETIRED)})|\b({'|'.join(RETIRED_NAMES)})\b")


def _retired_in(path: Path) -> list[str]:
    if not _ANY_RETIRED.search(path.read_text(encoding="utf-8")):
        return []  # to divide a file into tokens takes most of the time
    found = []
    where = path.relative_to(ROOT).as_posix()
    for token in _tokens(path):
        if token.type == tokenize.NAME:
            words = _words_of(token.string)
            term = RETIRED_NAMES.get(token.string) if where not in NAMED_BY_OTHERS else None
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            words, term = re.findall(r"[a-z]+", token.string.lower()), None
        else:
            continue
        term = term or next((RETIRED[word] for word in words if word in RETIRED), None)
        if term:
            found.append(f"{where}:{token.start[0]}: {token.string[:60]!r}: say {term}")
    return found


def test_retired_terms_stay_retired() -> None:
    assert [] == [line for path in PYTHON for line in _retired_in(path)]


def test_documents_use_none_of_them() -> None:
    """Names of files, which links may have, left out."""
    found = []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"\]\([^)]*\)", "]", path.read_text(encoding="utf-8").lower())
        if path.name != RECORD:
            found += [
                f"{path.name}: {word}" for word in re.findall(r"[a-z]+", text) if word in RETIRED
            ]
    assert [] == found


def test_no_module_has_a_retired_name() -> None:
    retired = {*RETIRED, *RETIRED_NAMES}
    assert [] == [path for path in PYTHON if retired & {path.stem, *path.stem.split("_")}]


def _openers() -> Counter[str]:
    found: Counter[str] = Counter()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # To read a file as syntax takes most of the time.
        for node in ast.walk(ast.parse(text)) if _ANY_OPENER.search(text) else ():
            if isinstance(node, documented) and OPENERS.match(ast.get_docstring(node) or ""):
                found[path.relative_to(SOURCE).parts[0]] += 1
    return found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Not with Who, What, Whose, Whether, Those, Nobody, Somebody or One."""
    found = _openers()
    assert {} == {name: count for name, count in found.items() if count > OPENERS_LEFT.get(name, 0)}


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown page: code left out, each cell and item for itself, links as their text."""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\n#+\s|\|", "\n" + text):
        yield from re.split(r"[.!?:]\s+(?=\S)", " ".join(block.split()))


def _long_in(text: str) -> list[str]:
    return [each for each in _sentences(text) if len(each.split()) > MOST_WORDS]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("word " * MOST_WORDS + "last.", 1),
        ("word " * MOST_WORDS, 0),
        ("word " * MOST_WORDS + ". And another.", 0),
        ("| " + "word " * MOST_WORDS + "| word |", 0),
        ("- " + "word " * MOST_WORDS + "\n- word", 0),
        ("```\n" + "word " * 99 + "\n```\n", 0),
        ("[" + "word " * MOST_WORDS + "](a b c)", 0),
    ],
    ids=["long", "just right", "two", "a cell", "an item", "code", "a link"],
)
def test_sentences_are_told_apart(text: str, count: int) -> None:
    assert count == len(_long_in(text))


def _long() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        where = path.relative_to(ROOT).parent.as_posix()
        found[where] += len(_long_in(path.read_text(encoding="utf-8")))
    return found


def test_sentences_are_short() -> None:
    found = _long()
    assert {} == {name: count for name, count in found.items() if count > LONG_LEFT.get(name, 0)}
