"""For those who write backends: the conformance suite, and what it is made of."""

from __future__ import annotations

import pytest

# Before its modules are imported, so that their plain asserts say what they saw.
pytest.register_assert_rewrite("ringfence.testing.conformance")
