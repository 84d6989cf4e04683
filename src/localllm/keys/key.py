"""PURE: what a key is and what it allows."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal, get_args

import msgspec

from localllm.errors import InvalidRequest

Scope = Literal["read", "inference", "admin"]
# Each allows what those before it do.
SCOPES: tuple[Scope, ...] = get_args(Scope)
PRIORITIES = {"high": -5, "normal": 0, "low": 5}
PREFIX = "llm-"
_SECRET_BYTES = 32
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)


class Key(msgspec.Struct, frozen=True):
    """A key as it is kept: `digest` is the SHA-256 of its secret, which nobody has but its owner.

    The secret is 32 random bytes, so there is nothing to guess that a slow hash would have to protect.
    `rpm` bounds requests in any minute and `tokens_per_day` prompt and answer tokens of a UTC day; 0 is no bound.
    `models` are names that may be used, with `*` for anything; none means all. `priority` as in a request, where lower
    is sooner.
    """

    name: str
    digest: bytes
    scope: Scope = "inference"
    priority: int = 0
    rpm: int = 0
    tokens_per_day: int = 0
    models: tuple[str, ...] = ()

    def allows(self, scope: Scope) -> bool:
        return SCOPES.index(scope) <= SCOPES.index(self.scope)

    def allows_model(self, *names: str) -> bool:
        """Whether the key may use a model that has these names."""
        patterns = [pattern.lower() for pattern in self.models]
        return not patterns or any(fnmatchcase(name.lower(), pattern) for name in names for pattern in patterns)


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def find(keys: Iterable[Key], secret: str) -> Key | None:
    """The key with this secret. Takes as long whichever it is and whether there is one."""
    digest, found = digest_of(secret), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def check_name(name: str) -> str:
    """Raises InvalidRequest for what cannot be a key's name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f'"{name}" cannot be the name of a key', hint="Use up to 64 letters, digits, dots, hyphens and underscores."
        )
    return name


def parse_priority(text: str) -> int:
    """ "high", "normal", "low" or an integer from -10 (first) to 10 (last). Raises InvalidRequest."""
    word = text.strip().lower()
    try:
        priority = PRIORITIES[word] if word in PRIORITIES else int(word)
    except ValueError:
        priority = 99
    if not -10 <= priority <= 10:
        raise InvalidRequest(f'"{text}" is not a priority', hint="It is high, normal, low, or a number from -10 to 10.")
    return priority
