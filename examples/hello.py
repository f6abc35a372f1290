"""What a program sees from inside a sandbox: who it is, what it cannot reach, what still works."""

import os
import pwd
import socket
import sys


def identity() -> str:
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = "nobody we know"
    return f"{name} (uid {os.getuid()}), pid {os.getpid()}, on {socket.gethostname()}"


def kernel_says(*fields: str) -> str:
    with open("/proc/self/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return ", ".join(f"{field} {lines[field].strip()}" for field in fields)


def processes() -> str:
    return ", ".join(sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int))


def try_to_list(path: str) -> str:
    try:
        return f"{len(os.listdir(path))} entries"
    except OSError as exc:
        return f"no: {exc.strerror}"


def try_to_connect(address: tuple[str, int]) -> str:
    try:
        with socket.create_connection(address, timeout=2):
            return "connected"
    except OSError as exc:
        return f"no: {exc.strerror or exc}"


def primes_below(limit: int) -> int:
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    return sum(sieve)


print("python         ", sys.version.split()[0])
print("I am           ", identity())
print("the kernel says", kernel_says("CapEff", "CapBnd", "NoNewPrivs", "Seccomp"))
print("processes here ", processes())
print("in /           ", " ".join(sorted(os.listdir("/"))))
print("in /root       ", try_to_list("/root"))
print("network        ", try_to_connect(("192.0.2.1", 443)))
with open("note.txt", "w", encoding="utf-8") as note:
    note.write("written inside, gone with the sandbox\n")
print("a file of mine ", os.path.abspath("note.txt"), os.path.getsize("note.txt"), "bytes")
print("primes below 1M", primes_below(1_000_000))
