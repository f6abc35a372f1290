"""Extension of griffe: completes descriptions of parameters in the API reference.

A parameter is described once, in the docstring that fits best. Elsewhere the reference takes the description
from, in this order: the docstring of the class, a base class, the class that is mirrored (`AsyncSandbox`
mirrors `Sandbox`) or alike, another method of these, and `docs/reference/parameters.toml`.
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

TABLE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "parameters.toml"
MIRRORED = ("AsyncRemote", "Async", "Remote")
LIKE = {"Client": "Sandbox", "Sandbox": "SandboxSpec", "ExecutionResult": "ExecResult"}
ENTRY = re.compile(r"^    (?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ?", re.M)
SECTION = re.compile(r"\n(?=[A-Z][\w ]*:\n    )")

LOG = logging.getLogger("mkdocs.reference")

Described = dict[str, str]


def described(docstring: griffe.Docstring | None) -> Described:
    """Descriptions by name, of the sections Args and Attributes."""
    found: Described = {}
    for section in SECTION.split(docstring.value if docstring else ""):
        title, _, body = section.strip("\n").partition(":\n")
        if title not in ("Args", "Attributes"):
            continue
        entries = list(ENTRY.finditer(body))
        ends = [entry.start() for entry in entries[1:]] + [len(body)]
        for entry, end in zip(entries, ends, strict=True):
            for name in entry["names"].split(", "):
                found[name.lstrip("*")] = " ".join(body[entry.end() : end].split())
    return found


def completed(docstring: griffe.Docstring | None, missing: Described, title: str) -> str:
    """The text of a docstring, with `missing` in its section of this title."""
    lines = "\n".join(f"    {name}: {text}" for name, text in missing.items())
    parts = SECTION.split(docstring.value) if docstring else []
    for number, part in enumerate(parts):
        if part.strip("\n").startswith(f"{title}:\n"):
            parts[number] = f"{part.rstrip()}\n{lines}\n"
            return "\n".join(parts)
    section = f"{title}:\n{lines}\n"
    return "\n".join([parts[0] + "\n", section, *parts[1:]]) if parts else section


class Reference:
    """The public names of a package, and what is known of their parameters.

    Attributes:
        undescribed: Parameters for which there is no description, as `Class.method(name)`.
    """

    def __init__(self, package: griffe.Module, table: dict[str, Any]) -> None:
        self.package, self.undescribed = package, list[str]()
        self.common: Described = {k: v for k, v in table.items() if isinstance(v, str)}
        self.own: dict[str, Described] = {k: v for k, v in table.items() if isinstance(v, dict)}
        self.seen: dict[str, Described] = {}  # as written, by path of the function or class

    def complete(self, names: list[str]) -> None:
        """Complete the docstrings of these names and of their methods."""
        found = [target(self.package[name]) for name in names]
        for each in found:  # all are read before any is changed
            self.read(each)
        for each in found:
            if isinstance(each, griffe.Class):
                self.complete_class(each)
            elif isinstance(each, griffe.Function):
                self.complete_one(each, each.parameters, [], self.common)

    def read(self, subject: Any) -> Described:
        if subject.path not in self.seen:
            self.seen[subject.path] = described(subject.docstring)
        if isinstance(subject, griffe.Class):
            for method in methods(subject):
                self.read(method)
        return self.seen[subject.path]

    def complete_class(self, subject: griffe.Class) -> None:
        line = list(self.kin(subject))
        of_table = {**self.common, **self.own.get(subject.name, {})}
        classes = [self.read(each) for each in line]
        for method in methods(subject):
            if method.name == "__init__":
                parameters = [p for p in method.parameters if p.name not in classes[0]]
                self.complete_one(method, parameters, classes, of_table)
                continue
            same = [
                self.seen[m.path] for each in line for m in methods(each) if m.name == method.name
            ]
            others = [self.seen[m.path] for each in line for m in methods(each)]
            self.complete_one(method, method.parameters, [*same, *classes, *others], of_table)
        if "dataclass" in subject.labels:
            fields = [m for m in subject.members.values() if is_field(m)]
            self.complete_one(subject, fields, classes[1:], of_table, "Attributes")

    def complete_one(
        self,
        subject: Any,
        parameters: Any,
        sources: list[Described],
        table: Described,
        title: str = "Args",
    ) -> None:
        known, missing = self.read(subject), Described()
        for parameter in parameters:
            name = parameter.name.lstrip("*")
            if name in ("self", "cls") or name in known or getattr(parameter, "docstring", None):
                continue
            text = next((each[name] for each in [*sources, table] if name in each), "")
            if text:
                missing[name] = text
            else:
                self.undescribed.append(f"{subject.path.removeprefix('ringfence.')}({name})")
        if missing:
            text = completed(subject.docstring, missing, title)
            subject.docstring = griffe.Docstring(
                text, parent=subject, parser="google", parser_options={"warnings": False}
            )

    def kin(self, subject: griffe.Class) -> Iterator[griffe.Class]:
        """The class, those it inherits from, and the one that it mirrors."""
        yield subject
        yield from (each for each in subject.mro() if isinstance(each, griffe.Class))
        names = [subject.name.removeprefix(prefix) for prefix in MIRRORED]
        names.append(LIKE.get(subject.name, subject.name))
        for name in names:
            if name != subject.name and name in self.package.members:
                yield from self.kin(target(self.package[name]))
                return


def target(subject: Any) -> Any:
    return subject.final_target if subject.is_alias else subject


def methods(subject: griffe.Class) -> list[griffe.Function]:
    """The public methods that a class defines, and its `__init__`."""
    found = [
        target(each)
        for name, each in subject.members.items()
        if name == "__init__" or name[0] != "_"
    ]
    return [each for each in found if isinstance(each, griffe.Function)]


def is_field(member: Any) -> bool:
    return member.is_attribute and member.name[0] != "_" and "instance-attribute" in member.labels


class Complete(griffe.Extension):  # type: ignore[misc]  # untyped where griffe is not installed
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name == "ringfence":
            reference = Reference(pkg, tomllib.loads(TABLE.read_text(encoding="utf-8")))
            reference.complete(public(pkg))
            for name in reference.undescribed:  # which fails a strict build
                LOG.warning("the API reference has no description of %s: see %s", name, TABLE.name)


def public(package: griffe.Module) -> list[str]:
    """Names of its own modules that the package hands on."""
    aliases = {name: each for name, each in package.members.items() if each.is_alias}
    return [name for name, each in aliases.items() if each.target_path.startswith("ringfence.")]
