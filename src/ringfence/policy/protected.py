"""Paths in a writable mount that stay read-only without being asked for, and the rule behind them.

Protected is what programs of the host run or obey when a directory is merely used: entered, opened,
searched, committed. Not protected is what builds or tests the project (Makefile, package.json,
workflows), for that is the work itself, and instructions for agents (AGENTS.md), for they are text
that a diff shows. See decision 141.
"""

from __future__ import annotations

import os

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.mount import Mount
    from ..model.spec import SandboxSpec

BY_KIND = {
    "git": (
        ".git/hooks",
        ".git/config",
        ".git/commondir",  # leads git to settings and hooks elsewhere
        ".git/config.worktree",
        ".git/info/attributes",
        ".git/rebase-merge",  # its todo may `exec`
        ".git/sequencer",  # its options name a program
        ".gitmodules",
        ".hg/hgrc",
    ),
    "hooks of git": (
        ".husky",
        ".pre-commit-config.yaml",
        "lefthook.yml",
        "lefthook-local.yml",
        ".lefthook.yml",
    ),
    "shells": (".envrc", ".direnv", ".tool-versions", "mise.toml", ".mise.toml"),
    "editors": (
        ".vscode",
        ".idea",
        ".zed",
        ".devcontainer",
        ".devcontainer.json",
        ".exrc",
    ),
    "agents": (
        ".mcp.json",
        ".agents",
        ".aider.conf.yml",
        ".amazonq",
        ".claude",
        ".codex",
        ".continue",
        ".cursor",
        ".factory",
        ".gemini",
        ".kilocode",
        ".kiro",
        ".opencode",
        "opencode.json",
        "opencode.jsonc",
        ".qwen",
        ".roo",
        ".windsurf",
    ),
    "tools": (".yarnrc.yml", ".ripgreprc"),  # name the program that runs in the tool's place
}
DEFAULTS = tuple(name for names in BY_KIND.values() for name in names)
# Protected where the second is there: elsewhere their programs are not used, or ask before they obey.
WHERE = {
    ".hg/hgrc": ".hg",
    "lefthook.yml": "lefthook.yml",
    "lefthook-local.yml": "lefthook.yml",
    ".lefthook.yml": ".lefthook.yml",
    ".tool-versions": ".tool-versions",
    "mise.toml": "mise.toml",
    ".mise.toml": ".mise.toml",
}
# In addition when the mount shows the caller's home itself.
HOME_DEFAULTS = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile"),
    *(".zshrc", ".zprofile", ".zshenv", ".zlogin", ".zlogout", ".config/fish"),
    *(".ssh", ".gnupg", ".gitconfig", ".config/git", ".local/bin", ".cargo/bin"),
    *(".vimrc", ".vim", ".config/nvim", ".config/zed", ".config/Code"),
    *(".xprofile", ".pam_environment", ".config/autostart", ".config/systemd"),
    *(".config/environment.d", ".local/share/applications"),
)
# Of these an absent one has no stand-in: git would take it for a repository, or for a rebase to go on with.
MAY_BE_MADE = (".git/config", ".git/rebase-merge", ".git/sequencer")
OWN = frozenset((*DEFAULTS, *HOME_DEFAULTS))  # of the mount, not of a repository below it
EVERYTHING = ("*", "all")
NESTED = "nested"  # git's own of `DEFAULTS`, in the repositories below a mount
_GITS = tuple(name for name in DEFAULTS if name.startswith(".git/"))


def check_names(unprotect: tuple[str, ...]) -> None:
    """Refuse a wish to unprotect what is not protected: it may be a slip of the pen.

    Raises:
        InvalidRequest: naming the field.
    """
    for name in unprotect:
        if name not in (*OWN, *EVERYTHING, NESTED):
            from ..model.mistakes import closest

            known = sorted((*OWN, *EVERYTHING, NESTED))
            hint = closest(name, known) if name[:1] != "@" else "presets are for --protect"
            hint = hint or "docs/how-to/mounts-and-protected-paths.md lists the names; `all` is all"
            raise InvalidRequest(
                f"{name!r} is not protected by default", field="unprotect", hint=hint
            )


def wanted(mount: Mount, spec: SandboxSpec, source: str) -> list[tuple[str, bool]]:
    """Paths below the mount to protect, and whether the user named each."""
    if mount.protect is not None:
        return [(name, True) for name in mount.protect if name]
    defaults = list(DEFAULTS)
    if os.path.realpath(os.path.expanduser("~")) == source:
        defaults += HOME_DEFAULTS
    if any(name in EVERYTHING for name in spec.unprotect):
        defaults = []
    else:
        defaults = [
            name
            for name in defaults
            if name not in spec.unprotect
            and (name not in WHERE or os.path.lexists(os.path.join(source, WHERE[name])))
        ]
        if NESTED not in spec.unprotect:
            defaults += _nested(source, [name for name in _GITS if name in defaults])
    named = [_inside(path, mount.target) for path in spec.protect or ()]
    chosen = dict.fromkeys((name, True) for name in named if name)
    chosen.update(dict.fromkeys((name, False) for name in defaults if name not in named))
    return list(chosen)


def _nested(source: str, names: list[str]) -> list[str]:
    """Find the `names` of a repository's `.git` in the repositories below it."""
    from .repositories import Found, look

    found = look(source) if names else Found()
    inner = [f"{path}/" if path else "" for path in found.directories if path != ".git"]
    below = [path + name.removeprefix(".git/") for path in inner for name in names]
    return [*below, *found.links]


def _inside(path: str, target: str) -> str:
    """A path relative to the mount; empty when an absolute one lies elsewhere."""
    if not path.startswith("/"):
        return path
    return path[len(target) + 1 :] if path.startswith(target + "/") else ""
