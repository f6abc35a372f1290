"""Shared state of a cluster, in the key-value store of Ray's head: nodes, keys, bindings."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, replace

from ..api.access.gateways import SECRET_BYTES
from ..errors import BackendUnavailable, RingfenceError, ServerUnreachable
from ..store.records import KeyRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    T = TypeVar("T")

_BYTES = ("digest", "old_digest")
HEAD = "node:__internal_head__"
"""The resource that Ray's head alone has."""


def connect(address: str, name: str) -> Directory:
    """Join a Ray cluster as a driver.

    Args:
        address: `auto` for the one of this machine, else HOST:PORT of its head.
        name: Of the Ringfence cluster: one Ray cluster can have several.

    Raises:
        BackendUnavailable: Ray is not installed, or in a version that was not tried.
        ServerUnreachable: No Ray cluster is there.
    """
    # Both are read when Ray is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without its head for so long, Ray ends this process: a head may take minutes to come back.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    try:
        import ray
    except ImportError as exc:
        hint = 'pip install "ringfence[ray]"'
        raise BackendUnavailable(f"Ray is not installed: {exc}", hint=hint) from exc
    check_version(ray.__version__)
    if not ray.is_initialized():
        try:
            ray.init(
                address=address,
                namespace=namespace_of(name),
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as exc:
            hint = "start Ray with `ringfence cluster up`, or `ray start --head`"
            raise ServerUnreachable(f"no Ray cluster at {address}: {exc}", hint=hint) from exc
    return Directory(name)


TRIED = ("2.60",)
"""Versions of Ray that the tests ran with."""


def check_version(version: str) -> None:
    """Refuse a version of Ray that was not tried.

    Raises:
        BackendUnavailable: It was not.
    """
    if ".".join(version.split(".")[:2]) not in TRIED:
        wanted = " or ".join(f"{each}.*" for each in TRIED)
        raise BackendUnavailable(
            f"Ray {version} was not tried with this version of Ringfence",
            hint=f'pip install "ray[default]=={wanted}"',
        )


def namespace_of(name: str) -> str:
    return f"ringfence-{name}"


class Directory:
    """The store of one Ringfence cluster. Every call takes part of a millisecond, and may block.

    Raises:
        ServerUnreachable: From every method: Ray's head does not answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._space = namespace_of(name).encode()

    # -- the store ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The value of a key; None without."""
        from ray.experimental import internal_kv

        found: bytes | None = self._ask(
            lambda: internal_kv._internal_kv_get(key.encode(), namespace=self._space)
        )
        return found

    def put(self, key: str, value: bytes) -> None:
        from ray.experimental import internal_kv

        self._ask(
            lambda: internal_kv._internal_kv_put(
                key.encode(), value, overwrite=True, namespace=self._space
            )
        )

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a value where there is none; what is there now."""
        from ray.experimental import internal_kv

        was_there = self._ask(
            lambda: internal_kv._internal_kv_put(
                key.encode(), value, overwrite=False, namespace=self._space
            )
        )
        return (self.get(key) or value) if was_there else value

    def remove(self, key: str, *, prefix: bool = False) -> None:
        from ray.experimental import internal_kv

        self._ask(
            lambda: internal_kv._internal_kv_del(
                key.encode(), del_by_prefix=prefix, namespace=self._space
            )
        )

    def list(self, prefix: str) -> list[str]:
        from ray.experimental import internal_kv

        found = self._ask(
            lambda: internal_kv._internal_kv_list(prefix.encode(), namespace=self._space)
        )
        return sorted(each.decode() for each in found)

    def many(self, prefix: str) -> dict[str, bytes]:
        """Keys and values of all that begin so, in two calls."""
        import ray

        keys = [each.encode() for each in self.list(prefix)]
        if not keys:
            return {}
        client = ray._private.worker.global_worker.gcs_client
        found = self._ask(lambda: client.internal_kv_multi_get(keys, self._space))
        return {key.decode(): value for key, value in found.items()}

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RingfenceError:
            raise
        except Exception as exc:  # Ray raises several kinds, none of them documented
            raise ServerUnreachable(f"Ray's head does not answer: {exc}") from exc

    # -- what is in it --------------------------------------------------------------------------

    def secret(self) -> bytes:
        """The secret of gateways and nodes, made by the first that asks."""
        return self.put_first("secret", secrets.token_bytes(SECRET_BYTES))

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("config") or b"{}")
        return found

    def ray_nodes(self) -> dict[str, tuple[str, int]]:
        """Ray's nodes that it calls alive, by their ids; where each one's raylet listens."""
        import ray

        return {
            each["NodeID"]: (each["NodeManagerAddress"], each["NodeManagerPort"])
            for each in self._ask(ray.nodes)
            if each["Alive"]
        }

    def ray_resources(self) -> dict[str, dict[str, float]]:
        """Resources in all of each of Ray's nodes that it calls alive, by their ids."""
        import ray

        return {each["NodeID"]: each["Resources"] for each in self._ask(ray.nodes) if each["Alive"]}


class KeyRing:
    """API keys in the directory, as `Authenticator` wants them; so any gateway knows every key.

    Attributes:
        version: Changes with each change of a key.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def version(self) -> bytes:
        """Text that differs after each change, by whatever gateway."""
        return self._directory.get("keys-version") or b""

    def every_key(self) -> list[KeyRecord]:
        """Every key, oldest first."""
        found = [_key_of(value) for value in self._directory.many("key/").values()]
        used = self._directory.many("used/")
        found = [
            replace(each, used_at=float(used[f"used/{each.id}"]))
            if f"used/{each.id}" in used
            else each
            for each in found
        ]
        return sorted(found, key=lambda each: (each.created_at, each.id))

    def add_key(self, record: KeyRecord) -> None:
        self._write(record)
        self._changed()

    def change_key(self, key_id: str, **columns: Any) -> None:
        if found := self._directory.get(f"key/{key_id}"):
            self._write(replace(_key_of(found), **columns))
            self._changed()

    def remove_key(self, key_id: str) -> None:
        self._forget(key_id)
        for each in self.every_key():
            if each.maker == key_id:
                self._forget(each.id)
        self._changed()

    def note_keys(self, used: Mapping[str, float], now: float) -> None:
        """Remember when keys were used last, and forget tokens that have expired.

        Not in the records: another gateway may be rotating one.
        """
        for key_id, used_at in used.items():
            self._directory.put(f"used/{key_id}", repr(used_at).encode())
        for record in self.every_key():
            if record.sandbox is not None and (record.expires_at or now) < now:
                self._forget(record.id)

    def _forget(self, key_id: str) -> None:
        self._directory.remove(f"key/{key_id}")
        self._directory.remove(f"used/{key_id}")

    def _write(self, record: KeyRecord) -> None:
        form = {**asdict(record)}
        for name in _BYTES:
            form[name] = None if form[name] is None else form[name].hex()
        self._directory.put(f"key/{record.id}", json.dumps(form).encode())

    def _changed(self) -> None:
        self._directory.put("keys-version", secrets.token_bytes(8))


def _key_of(value: bytes) -> KeyRecord:
    form = json.loads(value)
    for name in _BYTES:
        form[name] = None if form[name] is None else bytes.fromhex(form[name])
    return KeyRecord(**form)
