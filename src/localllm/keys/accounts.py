"""The daemon's view of the keys: who is it, may they, and how much was it.

Keys that the command line adds or removes count from the next request on. Usage is counted in memory and written down
every few seconds, so that no request waits for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from localllm.errors import Forbidden, InvalidKey, LocalLLMError
from localllm.keys import key as keys
from localllm.keys.key import Key, Scope
from localllm.keys.limits import RequestRates, check_quota
from localllm.keys.store import KeyStore, UsageRow

FLUSH_SECONDS = 2.0
_DAY = "%Y-%m-%d"

_log = logging.getLogger(__name__)


class Accounts:
    def __init__(
        self,
        path: Path,
        *,
        is_key_needed: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` is the file of a KeyStore. Every caller needs a key as soon as there are any; or always."""
        self._store = KeyStore(path)
        self._is_key_needed = is_key_needed
        self._now = now
        self._monotonic = monotonic
        self._rates = RequestRates()
        self._stamp: object = None
        self._keys: list[Key] = []
        self._day = ""
        self._num_tokens: dict[str, int] = {}
        self._pending: dict[tuple[str, str, str], UsageRow] = {}
        self._flush_task: asyncio.Task[None] | None = None

    def keys(self) -> list[Key]:
        """As they are now. Raises StoreError when they cannot be read: nobody is let in by mistake."""
        stamp = self._current_stamp()
        if stamp != self._stamp:
            # That of before: what is written in between is then seen the next time.
            self._keys, self._stamp = self._store.keys(), stamp
        return self._keys

    def authenticate(self, secret: str) -> Key | None:
        """The key of a caller who gives this secret ("" for none); None where nobody needs one. Raises InvalidKey."""
        known = self.keys()
        if not known and not self._is_key_needed:
            return None
        found = keys.find(known, secret)
        if found is None:
            raise InvalidKey(
                "the API key is not valid" if secret else "an API key is needed",
                hint="Send one that `localllm keys add NAME` made, as `Authorization: Bearer KEY` or in x-api-key; "
                "the command line takes it from LOCALLLM_API_KEY.",
            )
        return found

    def admit(self, key: Key, scope: Scope) -> None:
        """Raises Forbidden, RateLimited or QuotaExceeded. Only inference counts as a request."""
        if not key.allows(scope):
            raise Forbidden(
                f'the key {key.name} has the scope "{key.scope}", and this needs "{scope}"',
                hint="Use another key, or make one with that scope.",
            )
        if scope == "inference":
            now = self._now()
            self._turn_day(now)
            check_quota(key, self._num_tokens.get(key.name, 0), _seconds_left(now))
            self._rates.admit(key, self._monotonic())

    def note(self, key: Key, model: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """A request of the key has ended, in whatever way, after so much work."""
        self._turn_day(self._now())
        self._num_tokens[key.name] = self._num_tokens.get(key.name, 0) + prompt_tokens + output_tokens
        self._count([UsageRow(self._day, key.name, model, 1, prompt_tokens, cached_tokens, output_tokens)])
        if self._flush_task is None or self._flush_task.done():
            self._flush_task = asyncio.get_running_loop().create_task(self._flush_soon())

    def _count(self, rows: Iterable[UsageRow]) -> None:
        for row in rows:
            place = (row.day, row.key, row.model)
            self._pending[place] = self._pending.get(place, UsageRow(*place)).plus(row)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        await self.flush()

    async def flush(self) -> None:
        """Write down what was counted. What cannot be written is kept for the next time."""
        rows, self._pending = list(self._pending.values()), {}
        try:
            if rows:
                await asyncio.to_thread(self._store.add_usage, rows)
        except LocalLLMError as error:
            _log.warning("%s", error.message)
            self._count(rows)

    def _turn_day(self, now: datetime) -> None:
        """Begin with what is on record for the day, also when the clock was set back to one that was over."""
        day = now.strftime(_DAY)
        if day == self._day:
            return
        self._day, self._num_tokens = day, {}
        for row in [*self._store.usage(since=day), *self._pending.values()]:
            if row.day == day:
                self._num_tokens[row.key] = self._num_tokens.get(row.key, 0) + row.tokens

    def _current_stamp(self) -> object:
        """Changes whenever somebody writes to the file; in SQLite's mode of working that is seen at its log."""
        return [_stamp_of(self._store.path), _stamp_of(self._store.path.with_name(f"{self._store.path.name}-wal"))]


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _seconds_left(now: datetime) -> float:
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    return (midnight - now).total_seconds()
