"""Keys: random, shown once, kept as digests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from ..errors import InvalidRequest, NotFound
from ..model import checks
from ..model.acquire import check_client
from ..model.ids import new_id
from ..store.records import KeyRecord
from .caller import Caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..store.store import Store

ADMIN, USER, SANDBOX = "admin", "user", "sandbox"

_PREFIX = "rf_"
_SECRET_BYTES = 32
_NAME_MAX = 255


def digest_of(secret: str) -> bytes:
    """What is kept of a secret. It is random and long: nothing slower would make guessing harder."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"ringfence-key").digest()


def make(
    store: Store, *, owner: str, scope: str, sandbox: str | None = None, name: str = ""
) -> tuple[KeyRecord, str]:
    """A new key: its record, and the text that opens, which is kept nowhere."""
    check_client(owner, "owner")
    if len(checks.text(name, "name")) > _NAME_MAX or not name.isprintable():
        raise InvalidRequest(f"must be up to {_NAME_MAX} printable characters", field="name")
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    record = KeyRecord(
        id=new_id("key"),
        digest=digest_of(secret),
        owner=owner,
        scope=scope,
        created_at=time.time(),
        sandbox=sandbox,
        name=name,
    )
    store.add_key(record)
    return record, f"{_PREFIX}{record.id}.{secret}"


class Doorkeeper:
    """Knows who has which key, without asking anybody: there is one daemon to a state directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = {record.id: record for record in store.every_key()}

    def add(self, record: KeyRecord) -> None:
        """From now on it opens."""
        self._known[record.id] = record

    def caller(self, text: str) -> Caller | None:
        """Whose key that is; None for what is none."""
        if not text.startswith(_PREFIX) or not text.isascii():
            return None
        key_id, _, secret = text.removeprefix(_PREFIX).partition(".")
        record = self._known.get(key_id)
        kept = record.digest if record is not None else bytes(32)
        # As long for a key that is not there: only the digests are compared, and those evenly.
        if not hmac.compare_digest(digest_of(secret), kept) or record is None:
            return None
        is_admin = record.scope == ADMIN
        return Caller(record.owner, is_admin, sandbox=record.sandbox or "", key=record.id)

    def remove(self, key_id: str) -> None:
        """Let a key open nothing more, from now on.

        Raises:
            NotFound: There is none.
        """
        removed = self._store.remove_key(key_id)
        self._known.pop(key_id, None)
        if not removed:
            raise NotFound(f"no key {key_id!r}", hint="`ringfence keys list` has those there are")


def shown(record: KeyRecord) -> dict[str, object]:
    """A key as admins see it, which says nothing of the secret."""
    return {
        "id": record.id,
        "owner": record.owner,
        "scope": record.scope,
        "sandbox_id": record.sandbox,
        "name": record.name,
        "created_at": record.created_at,
    }
