"""Peers that run one command in a fresh sandbox and are gone: a whole life in one process."""

from __future__ import annotations

from .peer import CommandPeer, Peer, program


def bubblewrap() -> Peer:
    """All namespaces and the host's root read-only: no filter, no Landlock, no limits."""
    options = "--unshare-all --ro-bind / / --proc /proc --dev /dev"
    return CommandPeer("bwrap", program("bwrap"), *options.split(), "true")


def nsjail() -> Peer:
    options = "-Mo --really_quiet --chroot /"
    return CommandPeer("nsjail", program("nsjail"), *options.split(), "--", program("true"))


def firejail() -> Peer:
    return CommandPeer("firejail", program("firejail"), "--quiet", "--noprofile", "true")
