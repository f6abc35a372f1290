"""Host-wide resources that no limit counts: a process that takes them takes them from others."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

from .kit import NO_SECCOMP, Outcome, call, escaped, first_escape, held, inconclusive, probe, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# asm-generic/socket.h: a classic program, one for all that share a port; and programs of bpf(2).
_FILTERS = {"SO_ATTACH_FILTER": 26, "SO_ATTACH_REUSEPORT_CBPF": 51}
_PROGRAMS = {"SO_ATTACH_BPF": 50, "SO_ATTACH_REUSEPORT_EBPF": 52}
_SO_REUSEPORT, _TCP_ULP, _UDP_ENCAP = 15, 31, 100
_BUFFERS = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}
_F_OFD_SETLK = 37  # linux/fcntl.h
_NEW_LISTENER = 8  # linux/seccomp.h
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 4, 0o4000
_PRIVATE_ANONYMOUS, _READ_WRITE = 0x22, 3


def _option(level: int, option: int, value: bytes) -> int:
    """0, or the errno below zero, of an option of a new socket."""
    kind = socket.SOCK_STREAM if level == socket.IPPROTO_TCP else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as made:
        made.setsockopt(socket.SOL_SOCKET, _SO_REUSEPORT, 1)
        try:
            made.setsockopt(level, option, value)
        except OSError as exc:
            return -(exc.errno or errno.EIO)
    return 0


@probe("syscalls.socket-filter", "medium", NO_SECCOMP)
def socket_filter(_context: dict[str, Any]) -> Outcome:
    """No program may be put on a socket: the kernel compiles it, into room that the whole host shares."""
    allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 1), 8)
    program = struct.pack("=H6xQ", 1, ctypes.addressof(allow))
    tried = [(name, _option(socket.SOL_SOCKET, n, program)) for name, n in _FILTERS.items()]
    # A descriptor that is not open: that it is missed tells that the kernel has looked for it.
    none = struct.pack("=i", -1)
    tried += [(name, _option(socket.SOL_SOCKET, n, none)) for name, n in _PROGRAMS.items()]
    outcomes = [
        held(f"{name}: {said(result)}")
        if result == -errno.EPERM
        else escaped(f"{name} reached the kernel: {said(result)}")
        for name, result in tried
    ]
    return first_escape(outcomes)


@probe("syscalls.socket-buffers", "medium", NO_SECCOMP)
def socket_buffers(_context: dict[str, Any]) -> Outcome:
    """The buffers of sockets must keep their size: what some of them hold counts against no limit."""
    outcomes = []
    for name, option in _BUFFERS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            before = _sizes(made)
            try:
                made.setsockopt(socket.SOL_SOCKET, option, sum(before) // 8)
            except OSError as exc:
                outcomes.append(held(f"{name}: {exc.strerror}"))
                continue
            changed = _sizes(made) != before
            outcomes.append(escaped(f"{name} worked") if changed else held(f"{name}: no change"))
    return first_escape(outcomes)


def _sizes(made: socket.socket) -> list[int]:
    kinds = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    return [made.getsockopt(socket.SOL_SOCKET, kind) for kind in kinds]


@probe("syscalls.open-file-locks", "medium", NO_SECCOMP)
def open_file_locks(_context: dict[str, Any]) -> Outcome:
    """No locks may be had whose owner nobody can see: the kernel charges them to no limit."""
    fd = os.memfd_create("locked")
    try:
        lock = ctypes.create_string_buffer(struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
        # Each ignores the upper half.
        results = [call("fcntl", fd, high | _F_OFD_SETLK, lock) for high in (0, 1 << 32)]
    finally:
        os.close(fd)
    if any(result == 0 for result in results):
        return escaped("F_OFD_SETLK worked")
    return held(f"F_OFD_SETLK: {', '.join(map(said, results))}")


@probe("syscalls.filter-listener", "medium", NO_SECCOMP)
def filter_listener(_context: dict[str, Any]) -> Outcome:
    """No filter may outlive its process: what filters take of the host is bounded by processes alone."""
    allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
    program = ctypes.create_string_buffer(struct.pack("=H6xQ", 1, ctypes.addressof(allow)), 16)
    # The second has bits that the kernel takes off, and a careless comparison does not.
    tried = [call("seccomp", 1, flags, program) for flags in (_NEW_LISTENER, 1 << 32 | 8)]
    taken = [result for result in tried if result >= 0]
    if taken:
        return escaped(f"a descriptor that keeps a filter: {taken[0]}")
    if set(tried) == {-errno.EINVAL}:
        return held(f"seccomp with a listener: {said(tried[0])}")
    return inconclusive(f"seccomp with a listener: {', '.join(map(said, tried))}")


@probe("syscalls.udp-in-kernel", "low", NO_SECCOMP)
def udp_in_kernel(_context: dict[str, Any]) -> Outcome:
    """No protocol may be put on UDP in the kernel: IPsec there has been a way to root."""
    # UDP_ENCAP_ESPINUDP and _L2TPINUDP only mark the socket, which is closed at once.
    results = [_option(socket.IPPROTO_UDP, _UDP_ENCAP, struct.pack("=i", kind)) for kind in (2, 3)]
    if set(results) == {-errno.ENOPROTOOPT}:
        return held(f"UDP_ENCAP: {said(results[0])}")
    return escaped(f"UDP_ENCAP reached the kernel: {', '.join(map(said, results))}")


@probe("syscalls.tcp-in-kernel", "low", NO_SECCOMP)
def tcp_in_kernel(_context: dict[str, Any]) -> Outcome:
    """No protocol may be put on TCP in the kernel: TLS there has been a way to root, and libraries have it."""
    # Without a name: that this is missed tells that the kernel has looked.
    result = _option(socket.IPPROTO_TCP, _TCP_ULP, b"")
    if result == -errno.ENOENT:
        return held(f"TCP_ULP: {said(result)}")
    return escaped(f"TCP_ULP reached the kernel: {said(result)}")


@probe("syscalls.huge-pages", "medium", NO_SECCOMP)
def huge_pages(_context: dict[str, Any]) -> Outcome:
    """Pages that the host has set aside must not be had: they count against no memory limit."""
    size = os.sysconf("SC_PAGE_SIZE")
    # None takes any: the first has no length, the second is an empty file, the third needs a privilege.
    mapped = call("mmap", 0, 0, _READ_WRITE, _PRIVATE_ANONYMOUS | _MAP_HUGETLB, -1, 0)
    file = call("memfd_create", b"huge", _MFD_HUGETLB)
    segment = call("shmget", 0, size, 0o1600 | _SHM_HUGETLB)
    if file in (-errno.ENOSYS, -errno.EINVAL):
        return inconclusive("this kernel has no huge pages")
    outcomes = [
        held(f"{name}: {said(result)}")
        if result == -errno.ENOMEM or (name, result) == ("shmget", -errno.ENOSYS)
        else escaped(f"{name} reached the kernel: {said(result)}")
        for name, result in (("mmap", mapped), ("memfd_create", file), ("shmget", segment))
    ]
    return first_escape(outcomes)
