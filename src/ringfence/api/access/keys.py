"""Keys: random, shown once, kept as digests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import replace

from ...errors import InvalidRequest, LifecycleError, NotFound, QuotaExceeded
from ...model.acquire import check_client
from ...model.base import checks
from ...model.base.ids import new_id
from ...store.records import KeyRecord
from .caller import TOKEN, Caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...store.store import Store

_PREFIX = "rf_"
_E2B_PREFIX = "e2b_"
_SECRET_BYTES = 32
_NAME_MAX = 255
_MOST_TOKENS = 100  # of one sandbox
_FLUSH_S = 60.0


def digest_of(secret: str) -> bytes:
    """Hash a secret for storage. It is long and random, so a slow hash would not make guessing harder."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"ringfence-key").digest()


class Authenticator:
    """Knows who has which key, without asking anybody: there is one daemon to a state directory.

    `caller` is for the event loop; what writes is for other threads.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read()
        self._used: dict[str, float] = {}
        self._flushed = time.monotonic()

    def read(self) -> None:
        """Read all keys anew: in a cluster, another gateway has changed some."""
        self._known = {record.id: record for record in self._store.every_key()}

    # -- opening --------------------------------------------------------------------------------

    def caller(self, text: str) -> Caller | None:
        """Find the caller of a key; None for a text that is not a key, or one expired or deleted."""
        text = _from_e2b(text)
        if not text.startswith(_PREFIX) or not text.isascii():
            return None
        key_id, _, secret = text.removeprefix(_PREFIX).partition(".")
        record, now = self._known.get(key_id), time.time()
        kept = (bytes(32), bytes(32)) if record is None else (record.digest, _old(record, now))
        # Constant time: an unknown key costs as many comparisons as a known one.
        digest = digest_of(secret)
        fits = [hmac.compare_digest(digest, each) for each in kept]
        if not any(fits) or record is None or self._until(record) <= now:
            return None
        self._used[key_id] = now
        return Caller(
            record.owner,
            record.scope,
            sandbox=record.sandbox or "",
            key=record.id,
            expires_at=record.expires_at,
            max_sandboxes=record.max_sandboxes,
            max_requests=record.max_requests,
            digest=digest,
        )

    def holder(self, key_id: str) -> Caller | None:
        """Find the caller of a key that still opens, for what was made with it; None: it does not."""
        record = self._known.get(key_id)
        if record is None or self._until(record) <= time.time():
            return None
        return Caller(
            record.owner,
            record.scope,
            key=record.id,
            expires_at=record.expires_at,
            max_requests=record.max_requests,
            digest=record.digest,
        )

    def opens_until(self, caller: Caller) -> float:
        """Return the time at which the caller's secret stops opening, in seconds since 1970; 0: now."""
        record = self._known.get(caller.key)
        if record is None:
            return 0.0
        if caller.digest == record.digest:
            return self._until(record)
        if caller.digest == record.old_digest:
            return min(self._until(record), record.old_until or 0.0)
        return 0.0

    def _until(self, record: KeyRecord) -> float:
        """Return the expiry of a key or of the key it was made with; 0: that was removed."""
        until = float("inf") if record.expires_at is None else record.expires_at
        if not record.maker:
            return until
        maker = self._known.get(record.maker)
        return 0.0 if maker is None else min(until, self._until(maker))

    # -- changing -------------------------------------------------------------------------------

    def make(self, *, owner: str, scope: str, name: str = "", **more: Any) -> tuple[KeyRecord, str]:
        """A new key: its record, and the text that opens, which is kept nowhere.

        Args:
            more: Further columns of the record.
        """
        check_client(owner, "owner")
        if len(checks.text(name, "name")) > _NAME_MAX or not name.isprintable():
            raise InvalidRequest(f"must be up to {_NAME_MAX} printable characters", field="name")
        key_id, secret = new_id("key"), secrets.token_urlsafe(_SECRET_BYTES)
        record = KeyRecord(key_id, digest_of(secret), owner, scope, time.time(), name=name, **more)
        self._store.add_key(record)
        self._known[key_id] = record
        return record, f"{_PREFIX}{key_id}.{secret}"

    def make_token(
        self, caller: Caller, sandbox: str, owner: str, ttl_s: float | None
    ) -> tuple[KeyRecord, str]:
        """A key that opens one sandbox, for no longer than the key that it is made with.

        Raises:
            QuotaExceeded: The sandbox has as many as it may.
        """
        has = sum(record.sandbox == sandbox for record in [*self._known.values()])
        if has >= _MOST_TOKENS:
            hint = "create tokens with a ttl_s, or end sandboxes that you do not need"
            raise QuotaExceeded(f"sandbox {sandbox} has {has} tokens", field="tokens", hint=hint)
        ends = [] if ttl_s is None else [time.time() + ttl_s]
        ends += [] if caller.expires_at is None else [caller.expires_at]
        expires = min(ends, default=None)
        return self.make(
            owner=owner, scope=TOKEN, sandbox=sandbox, maker=caller.key, expires_at=expires
        )

    def rotate(self, key_id: str, overlap_s: float) -> tuple[KeyRecord, str]:
        """Another secret for a key; the one before opens for `overlap_s` more.

        Raises:
            NotFound: There is none.
            LifecycleError: It is a token.
        """
        record = self._need(key_id)
        if record.scope == TOKEN:
            raise LifecycleError("a token cannot be rotated", hint="create a new token")
        secret, until = secrets.token_urlsafe(_SECRET_BYTES), time.time() + overlap_s
        changes = {
            "digest": digest_of(secret),
            "old_digest": record.digest if overlap_s else None,
            "old_until": until if overlap_s else None,
        }
        self._store.change_key(key_id, **changes)
        made = self._known[key_id] = replace(record, **changes)  # type: ignore[arg-type]
        return made, f"{_PREFIX}{key_id}.{secret}"

    def remove(self, key_id: str, caller: Caller, *, this_key: bool) -> None:
        """Let a key, and every token that was made with it, open nothing more, from now on.

        Args:
            this_key: The caller means the very key that it uses.

        Raises:
            NotFound: There is none.
            LifecycleError: It is the caller's own, and that was not said.
        """
        self._need(key_id)
        if key_id == caller.key and not this_key:
            raise LifecycleError(
                f"{key_id} is the key of this request",
                hint="use another key, or add `this_key=true`",
            )
        self._store.remove_key(key_id)
        for each in [*self._known.values()]:
            if key_id in (each.id, each.maker):
                self._known.pop(each.id, None)

    def _need(self, key_id: str) -> KeyRecord:
        record = self._known.get(key_id)
        if record is None:
            raise NotFound(f"no key {key_id!r}", hint="`ringfence keys list` lists all keys")
        return record

    # -- looking --------------------------------------------------------------------------------

    def every(self) -> list[dict[str, Any]]:
        """Every key as admins see it, oldest first, which says nothing of the secrets."""
        self.flush()
        return [shown(each) for each in self._store.every_key()]

    @property
    def is_due(self) -> bool:
        """True once after each flush interval; the caller then flushes."""
        if time.monotonic() - self._flushed < _FLUSH_S:
            return False
        self._flushed = time.monotonic()
        return True

    def flush(self) -> None:
        """Write down when keys were used, and forget the tokens that are over."""
        before, used, self._used = {*self._known}, self._used, {}
        self._store.note_keys(used, time.time())
        for gone in before - {record.id for record in self._store.every_key()}:
            self._known.pop(gone, None)


def e2b_form(text: str) -> str:
    """A key as clients of E2B want it, which take `e2b_` and hexadecimal digits only."""
    return _E2B_PREFIX + text.removeprefix(_PREFIX).encode().hex()


def _from_e2b(text: str) -> str:
    if not text.startswith(_E2B_PREFIX):
        return text
    try:
        return _PREFIX + bytes.fromhex(text.removeprefix(_E2B_PREFIX)).decode()
    except ValueError:
        return text


def _old(record: KeyRecord, now: float) -> bytes:
    is_kept = record.old_until is not None and record.old_until > now
    return record.old_digest if is_kept and record.old_digest else bytes(32)


def shown(record: KeyRecord) -> dict[str, Any]:
    """A key as admins see it, which says nothing of the secret."""
    return {
        "id": record.id,
        "owner": record.owner,
        "scope": record.scope,
        "sandbox_id": record.sandbox,
        "name": record.name,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "last_used_at": record.used_at,
        "made_with": record.maker or None,
        "max_sandboxes": record.max_sandboxes,
        "max_requests": record.max_requests,
    }
