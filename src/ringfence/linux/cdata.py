"""C types and functions, from the C half of `ctypes`.

`ctypes` itself spends 2 ms on parts that no system call needs, and every start would pay that
twice: in the caller's process and in the zygote. The names here mean what they mean there.
"""

# ruff: noqa: N801  (the names are those of `ctypes`)

from __future__ import annotations

from _ctypes import (
    FUNCFLAG_CDECL,
    FUNCFLAG_PYTHONAPI,
    FUNCFLAG_USE_ERRNO,
    CFuncPtr,
    Structure,
    addressof,
    byref,
    dlopen,
    dlsym,
    get_errno,
    sizeof,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from ctypes import (
        c_char_p,
        c_int,
        c_long,
        c_size_t,
        c_uint,
        c_uint64,
        c_ulong,
        c_ushort,
        c_void_p,
    )
    from typing import Any
else:
    from _ctypes import _SimpleCData

    class c_char_p(_SimpleCData):
        _type_ = "z"

    class c_void_p(_SimpleCData):
        _type_ = "P"

    class c_ushort(_SimpleCData):
        _type_ = "H"

    class c_int(_SimpleCData):
        _type_ = "i"

    class c_uint(_SimpleCData):
        _type_ = "I"

    class c_long(_SimpleCData):
        _type_ = "l"

    class c_ulong(_SimpleCData):
        _type_ = "L"

    c_size_t = c_uint64 = c_ulong  # the same on every 64-bit Linux; there is no other here

__all__ = (
    "Structure",
    "address_of",
    "address_of_variable",
    "addressof",
    "byref",
    "c_char_p",
    "c_int",
    "c_long",
    "c_size_t",
    "c_uint",
    "c_uint64",
    "c_ulong",
    "c_ushort",
    "c_void_p",
    "function",
    "function_at",
    "get_errno",
    "memmove",
    "memset",
    "python_function",
    "sizeof",
)

_nothing: Any = None
_program = dlopen(_nothing, 0)  # what is loaded already: the C library, and Python itself


class _Function(CFuncPtr):
    """A C function whose errno `get_errno` tells."""

    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
    _restype_ = c_int


class _PythonFunction(CFuncPtr):
    """A function of Python itself, called with the interpreter lock held."""

    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI
    _restype_ = c_int


def function(name: str, result: type, *types: type) -> Callable[..., int]:
    """The C function `name` with its types declared: each call of this makes a new object."""
    found = _Function(dlsym(_program, name))
    found.restype = result
    found.argtypes = types
    return found


def function_at(address: int, result: type, *types: type) -> Callable[..., int]:
    found = _Function(address)
    found.restype = result
    found.argtypes = types
    return found


def address_of(buffer: bytearray) -> int:
    """Address of the content of a buffer, whose length stays as it is from now on."""
    return addressof(c_ulong.from_buffer(buffer))


def address_of_variable(name: str) -> int:
    """Address of a variable of the C library; OSError: it has none."""
    return int(dlsym(_program, name))


def python_function(name: str) -> Callable[[], int]:
    """A function of the C API without arguments."""
    return _PythonFunction(dlsym(_program, name))


memset = function("memset", c_void_p, c_void_p, c_int, c_size_t)
memmove = function("memmove", c_void_p, c_void_p, c_char_p, c_size_t)
