"""A backend of ordinary host processes, without any isolation, for tests of the code above backends.

It has no name in the registry: pass an `UnconfinedBackend` itself. Never give it code that you do not trust.
"""

from __future__ import annotations

from .backend import UnconfinedBackend

__all__ = ["UnconfinedBackend"]
