"""Small things done inside for a probe that is judged on the host."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import sys
import time

_DEPTH = 1800


def links(target: str, *paths: str) -> None:
    """Make every path a link to `target`."""
    for path in paths:
        os.symlink(target, path)


def endless(directory: str) -> None:
    """Make a FIFO, and links to devices that never end or never begin."""
    os.mkfifo(f"{directory}/fifo")
    os.symlink("/dev/zero", f"{directory}/zero")
    os.symlink("/dev/tty", f"{directory}/tty")


def deep(name: str) -> None:
    """Make a tree that is deeper than most programs can think."""
    for _ in range(_DEPTH):
        os.mkdir(name)
        os.chdir(name)


def replace_link(path: str) -> None:
    """Make a directory with a file in it of what was a link."""
    os.unlink(path)
    os.mkdir(path)
    with open(f"{path}/x", "w", encoding="ascii") as file:
        file.write("x")


def odd_tree(path: str) -> None:
    """Make a tree of things that are not plain files."""
    os.makedirs(f"{path}/directory")
    os.mkfifo(f"{path}/fifo")
    os.symlink("/etc/shadow", f"{path}/link")
    with open(f"{path}/open", "w", encoding="ascii"):
        os.chmod(f"{path}/open", 0o777)
    os.chmod(f"{path}/directory", 0o1777)


def hole(path: str, size: str) -> None:
    """Make a file of `size` bytes that holds nothing."""
    with open(path, "wb") as file:
        file.truncate(int(size))


def vandalise(directory: str) -> None:
    """Try to change everything in a directory."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        for action in (_open_up, _append, os.unlink):
            try:
                action(path)
            except OSError:
                continue


def _open_up(path: str) -> None:
    os.chmod(path, 0o777)


def _append(path: str) -> None:
    with open(path, "a", encoding="ascii") as file:
        file.write("x")


def make(directory: str) -> None:
    """Make a file and a directory."""
    _append(f"{directory}/made")
    os.mkdir(f"{directory}/made-directory")


def overwrite(path: str) -> None:
    """Write to a file that is there."""
    with open(path, "r+b", buffering=0) as file:
        file.write(b"evil")


def overwrite_mapped(path: str) -> None:
    """The same through a mapping."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4) as memory:
        memory[0:4] = b"evil"
        memory.flush()


def write_new(path: str) -> None:
    """Write a file that is not there."""
    with open(path, "x", encoding="ascii") as file:
        file.write("#!/bin/sh\n")


def connect(path: str) -> None:
    """Connect to a unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)


def fill(directory: str, count: str) -> None:
    """Make a directory with so many files."""
    os.makedirs(directory)
    for number in range(int(count)):
        _append(f"{directory}/{number}")


def swap(directory: str) -> None:
    """Make of `tree/dir` the link that lies aside, and the directory again, for as long as it is let."""
    os.chdir(directory)
    print("swapping", flush=True)
    moves = (
        *(("tree/dir", "aside/dir"), ("aside/link", "tree/dir")),
        *(("tree/dir", "aside/link"), ("aside/dir", "tree/dir")),
    )
    while True:
        for number, (old, new) in enumerate(moves):
            try:
                os.rename(old, new)
            except OSError:
                continue  # who copies may have made something there
            if number % 2:
                time.sleep(0.0005)


def serve(word: str) -> None:
    """Listen on every address; print the port, and send `word` to the first client."""
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        sock.listen()
        sock.settimeout(20)
        print(sock.getsockname()[1], flush=True)
        with sock.accept()[0] as client:
            client.sendall(word.encode())


def modes(top: str) -> None:
    """Print owner, mode and path of everything below `top`."""
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            info = os.lstat(os.path.join(directory, name))
            print(info.st_uid, f"{stat.S_IMODE(info.st_mode):o}", stat.S_IFMT(info.st_mode), name)
    sys.stdout.flush()
