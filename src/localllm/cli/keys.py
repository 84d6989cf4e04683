"""The commands about API keys. They work on the file itself, so that a first key can be made before any daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from localllm.cli import output
from localllm.config import keys_file
from localllm.errors import LocalLLMError
from localllm.keys.key import Key, Scope, check_name, digest_of, new_secret, parse_priority
from localllm.keys.store import KeyStore


def add_key(name: str, scope: Scope, priority: str, *, rpm: int, tokens_per_day: int, models: Sequence[str]) -> None:
    secret = new_secret()
    names = tuple(word.strip() for text in models for word in text.split(",") if word.strip())
    key = Key(check_name(name), digest_of(secret), scope, parse_priority(priority), rpm, tokens_per_day, names)
    KeyStore(keys_file()).add(key)
    output.line(secret)
    output.remark("Keep it: it cannot be shown again. The command line takes it from LOCALLLM_API_KEY.")


def list_keys(*, as_json: bool) -> None:
    keys = KeyStore(keys_file()).keys()
    if as_json:
        output.print_json([_plain(key) for key in keys])
        return
    rows = [
        [
            *(key.name, key.scope, str(key.priority), str(key.rpm or "-"), str(key.tokens_per_day or "-")),
            ", ".join(key.models) or "all",
        ]
        for key in keys
    ]
    output.table(["NAME", "SCOPE", "PRIORITY", "RPM", "TOKENS/DAY", "MODELS"], rows)


def _plain(key: Key) -> dict[str, object]:
    return {
        "name": key.name,
        "scope": key.scope,
        "priority": key.priority,
        "rpm": key.rpm,
        "tokens_per_day": key.tokens_per_day,
        "models": list(key.models),
    }


def remove_keys(names: Sequence[str]) -> None:
    """Stops at the first that is not there."""
    store = KeyStore(keys_file())
    for name in names:
        if not store.remove(name):
            raise LocalLLMError(f'there is no key "{name}"', hint="`localllm keys list` shows those that there are.")
        output.line(f"removed '{name}'")


def show_usage(days: int, *, as_json: bool) -> None:
    first = datetime.now(timezone.utc) - timedelta(days=days - 1)
    rows = KeyStore(keys_file()).usage(first.strftime("%Y-%m-%d"))
    if as_json:
        fields = ("day", "key", "model", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
        output.print_json([{field: getattr(row, field) for field in fields} for row in rows])
        return
    table = [
        [
            *(row.day, row.key, row.model),
            *map(str, (row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens)),
        ]
        for row in rows
    ]
    output.table(["DAY", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT"], table)
