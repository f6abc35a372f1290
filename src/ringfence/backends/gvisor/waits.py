"""Kernel waits in gVisor's start, and how its processes avoid them.

A sandbox starts `runsc` five times in a row, and each of these waits is for an RCU grace period,
which takes 5 to 20 ms. A program with one thread does not wait; one in Go has several from its
start. See decision 0088.
"""

from __future__ import annotations

from ...policy.seccomp import Condition, Rule

_REGISTER_PRIVATE_EXPEDITED = 1 << 4  # include/uapi/linux/membarrier.h

# Every start registers for a barrier within its own process, before it knows what it is started for;
# the platforms that run a guest in the Sentry's own memory use it, and those fall back to the global
# barrier, which stays. What a guest asks for itself is answered by the Sentry, from the global one.
NO_REGISTERING = Rule(
    ("membarrier",), "ENOSYS", (Condition(0, 32, 0xFFFF_FFFF, (_REGISTER_PRIVATE_EXPEDITED,)),)
)
SAYS = "] membarrier("  # in the line by which each start lets its standard error know

# A table of descriptors grows at the 65th and at the 257th, and the Sentry has both before its guest
# has run once. It is born with a table of its parents' size.
DESCRIPTORS = 512
