"""Paths in a writable mount that stay read-only without being asked for, and the rule behind them.

Protected is what programs of the host run or obey when a directory is merely used: entered, opened,
searched, committed. Not protected is what builds or tests the project (Makefile, package.json,
workflows), for that is the work itself, and instructions for agents (AGENTS.md), for they are text
that a diff shows. See decision 141.
"""

from __future__ import annotations

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
