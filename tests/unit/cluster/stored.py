"""A cluster's store in memory, for what gateways do with it."""

from __future__ import annotations

from typing import Any


class Stored:
    """As `Directory`, without Ray. Of one process: each call is whole, as each of Ray's is."""

    def __init__(self, **values: bytes) -> None:
        self.values = values
        self.living: dict[str, tuple[str, int]] = {}

    def config(self) -> dict[str, Any]:
        return {}

    def ray_nodes(self) -> dict[str, tuple[str, int]]:
        return self.living

    def list(self, prefix: str) -> list[str]:
        return sorted(each for each in self.values if each.startswith(prefix))

    def many(self, prefix: str) -> dict[str, bytes]:
        return {each: self.values[each] for each in self.list(prefix)}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def put_first(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def remove(self, key: str) -> None:
        self.values.pop(key, None)
