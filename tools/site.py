"""Hooks of mkdocs: navigation from docs/index.md, the API reference, links to the repository, llms.txt."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[\w./-]+\.md)(?:#[^)]*)?\)(?P<about>:[^\[\n]*)?")
OUTWARD = re.compile(r"\]\((?P<path>(?:\.\./)+[\w./-]+)(?P<anchor>#[^)]*)?\)")
GROUPS = {
    "sandbox": "Sandboxes",
    "sessions": "Sessions",
    "client": "Sandboxes of a server",
    "execution": "The execution service",
    "model": "Requests and results",
    "errors": "Errors",
}


def sections_of_index() -> dict[str, list[tuple[str, str, str]]]:
    """Title, path and description of each page that docs/index.md links, by its headings."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for part in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        name, _, body = part.partition("\n")
        seen: dict[str, tuple[str, str]] = {}
        for link in LINK.finditer(body):
            about = link["about"].removeprefix(":").strip(" ,·") if link["about"] else ""
            seen.setdefault(link["path"], (link["text"], about))
        sections[name] = [(text, path, about) for path, (text, about) in seen.items()]
    return sections


def on_config(config: Any) -> Any:
    """Make the navigation from docs/index.md; of the decisions, all."""
    nav: list[Any] = [{"Start": "index.md"}]
    for name, pages in sections_of_index().items():
        nav.append({name: [{text: path} for text, path, _ in pages]})
    linked = {path for pages in sections_of_index().values() for _, path, _ in pages}
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    paths = [f"decisions/{path.name}" for path in decisions]
    nav[-1]["Decisions"] += [path for path in paths if path not in linked]
    config["nav"] = nav
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to the repository, and fill the API reference."""
    here = PurePosixPath(page.file.src_uri).parent

    def outward(link: re.Match[str]) -> str:
        path = normpath(f"docs/{here}/{link['path']}")
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{path}{link['anchor'] or ''})"

    if page.file.src_uri == "reference/api.md":
        markdown += "".join(public_names())
    return OUTWARD.sub(outward, markdown)


def public_names() -> list[str]:
    """A directive of mkdocstrings for each public name, in groups."""
    tree = ast.parse((ROOT / "src" / "ringfence" / "__init__.py").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {room: [] for room in GROUPS}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            room = node.module.partition(".")[0]
            # As `X as X`, by which a package says that it hands a name on.
            found.setdefault(room, []).extend(n.name for n in node.names if n.asname == n.name)
    parts = []
    for room, names in found.items():
        parts.append(f"\n## {GROUPS.get(room, room)}\n\n")
        parts += [f"::: ringfence.{name}\n\n" for name in names]
    return parts


def on_post_build(config: Any) -> None:
    """Write llms.txt, and each page's Markdown beside its HTML, where llms.txt leads."""
    site, lines = Path(config["site_dir"]), [f"# {config['site_name']}", ""]
    lines += [f"> {config['site_description']}", ""]
    for name, pages in sections_of_index().items():
        lines += [f"## {'Optional' if name == 'Decisions' else name}", ""]
        for text, path, about in pages:
            url = f"{path.removesuffix('.md')}/index.md"
            (site / url).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / "docs" / path, site / url)
            lines.append(f"- [{text}]({config['site_url']}{url})" + (f": {about}" if about else ""))
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
