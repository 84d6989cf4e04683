"""Keys and usage in one SQLite file, which the command line and the daemon share."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from localllm.errors import InvalidRequest, StoreError
from localllm.keys.key import Key

_BUSY_SECONDS = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    scope TEXT NOT NULL,
    priority INTEGER NOT NULL,
    rpm INTEGER NOT NULL,
    tokens_per_day INTEGER NOT NULL,
    models TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
);
"""


class UsageRow(msgspec.Struct, frozen=True):
    """What one key did with one model on one UTC day ("2026-12-31"). Cached tokens are part of the prompt's."""

    day: str
    key: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: UsageRow) -> UsageRow:
        """The work of both, for the place of this one."""
        mine, its = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return UsageRow(*mine[:3], *(a + b for a, b in zip(mine[3:], its[3:], strict=True)))

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def _key_of(row: tuple[Any, ...]) -> Key:
    name, digest, scope, priority, rpm, tokens_per_day, models = row
    return Key(name, digest, scope, priority, rpm, tokens_per_day, tuple(filter(None, models.split(","))))


class KeyStore:
    """Nothing is written, and no file made, before the first key. Every method may raise StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keys(self) -> list[Key]:
        with self._reading() as db:
            rows = db.execute("SELECT * FROM keys ORDER BY name").fetchall() if db else []
        return [_key_of(row) for row in rows]

    def add(self, key: Key) -> None:
        """Raises InvalidRequest when there is one of that name."""
        row = (key.name, key.digest, key.scope, key.priority, key.rpm, key.tokens_per_day, ",".join(key.models))
        with self._writing() as db:
            try:
                db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                raise InvalidRequest(
                    f'there is a key "{key.name}" already', hint=f"Remove it first: localllm keys rm {key.name}"
                ) from None

    def remove(self, name: str) -> bool:
        """False when there is none of that name. What it has used stays on record."""
        if not self.path.exists():
            return False
        with self._writing() as db:
            return db.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount > 0

    def add_usage(self, rows: Iterable[UsageRow]) -> None:
        with self._writing() as db:
            db.executemany(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                "cached_tokens = cached_tokens + excluded.cached_tokens, "
                "output_tokens = output_tokens + excluded.output_tokens",
                [msgspec.structs.astuple(row) for row in rows],
            )

    def usage(self, since: str) -> list[UsageRow]:
        """From the day `since` on, by day, key and model."""
        with self._reading() as db:
            query = "SELECT * FROM usage WHERE day >= ? ORDER BY day, key, model"
            return [UsageRow(*row) for row in db.execute(query, (since,))] if db else []

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """None while there is no file."""
        if not self.path.exists():
            yield None
            return
        with self._open() as db:
            yield db

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Nobody else may read it; SQLite gives its side files the same mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise self._failure(error) from error
        with self._open() as db, db:
            yield db

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(_SCHEMA)
                yield db
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        return StoreError(f"the keys in {self.path} cannot be used: {error}", hint="Is the disk full, or read-only?")
