"""An in-memory backend: sandboxes made of a file tree, threads and pipes.

It runs no program of the host, only a few built-in ones and a small `sh`, so that code
above the backends can be tested anywhere in milliseconds. It isolates nothing real.
"""

from __future__ import annotations

from .backend import FakeBackend

__all__ = ["FakeBackend"]
