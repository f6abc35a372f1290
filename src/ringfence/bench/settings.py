"""How much to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Counts and sizes of one run of the benchmark.

    Attributes:
        peers: Measure every peer found here, not just the ones that a target names.
        quick: Fewer runs of everything: seconds instead of minutes, and medians that wobble.
        full: As many live sandboxes as is aimed for.
    """

    peers: bool = False
    quick: bool = False
    full: bool = False

    @property
    def rounds(self) -> int:
        return 10 if self.quick else 40

    @property
    def slow_rounds(self) -> int:
        """Of what takes a tenth of a second and more."""
        return 3 if self.quick else 10

    @property
    def parked(self) -> tuple[int, ...]:
        return (1, 10) if self.quick else (1, 10, 100)

    @property
    def live(self) -> int:
        return 5000 if self.full else 100 if self.quick else 1000

    @property
    def callers(self) -> int:
        return 8

    @property
    def throughput_s(self) -> float:
        return 1.0 if self.quick else 4.0

    @property
    def file_bytes(self) -> int:
        return 64 << 20 if self.quick else 1 << 30

    @property
    def tree_files(self) -> int:
        return 1000 if self.quick else 10_000

    @property
    def file_rounds(self) -> int:
        return 1 if self.quick else 3

    @property
    def image_bytes(self) -> int:
        return 50 << 20 if self.quick else 500 << 20
