"""Run a command on a kernel that lacks some calls: `python refusing.py ERRNO NUMBER,… COMMAND…`.

A system-call filter answers them with ERRNO, for the command and everything that it starts.
NUMBER:WORD is refused only where its second argument is WORD, such as one request of ioctl(2).
"""

from __future__ import annotations

import os
import struct
import sys

from ringfence.linux import privileges, seccomp

# include/uapi/linux/bpf_common.h, seccomp.h
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ANSWER = 0x7FFF0000, 0x00050000
NUMBER_AT, SECOND_AT = 0, 24  # of the call, in struct seccomp_data

CLONE3, OPEN_TREE, MOUNT_SETATTR, LANDLOCK_CREATE_RULESET = 435, 428, 442, 444  # on every machine


def compile_refusal(number: int, calls: list[int]) -> bytes:
    """A program that answers `calls` with errno `number` and lets all others through."""

    def line(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    # Each match jumps over the others and over ALLOW.
    matches = [line(JUMP_IF_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    ends = [line(RETURN, 0, 0, ALLOW), line(RETURN, 0, 0, ANSWER | number)]
    return b"".join([line(LOAD_WORD, 0, 0, NUMBER_AT), *matches, *ends])


def compile_request_refusal(number: int, call: int, word: int) -> bytes:
    """The same for a call whose second argument is `word`."""
    lines = (
        (LOAD_WORD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 0, 2, call),
        (LOAD_WORD, 0, 0, SECOND_AT),
        (JUMP_IF_EQUAL, 1, 0, word),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ANSWER | number),
    )
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def main() -> None:
    number, calls, *command = sys.argv[1:]
    privileges.set_no_new_privs()
    call, _, word = calls.partition(":")
    if word:
        seccomp.install_filter(compile_request_refusal(int(number), int(call), int(word, 16)))
        os.execvp(command[0], command)
    seccomp.install_filter(compile_refusal(int(number), [int(call) for call in calls.split(",")]))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
