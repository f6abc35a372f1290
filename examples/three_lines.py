"""Untrusted code in three lines of Python."""

from ringfence import Sandbox

with Sandbox.create() as sandbox:
    result = sandbox.exec(["python3", "-c", "print(sum(range(1_000_001)))"], timeout_s=10)
    print(result.stdout_text, end="")
