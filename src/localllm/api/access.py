"""Which API key a request came with, what that allows, and what it has used: see docs/security.md.

The key travels in a context variable, so that whatever a request leads to knows it without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers

from localllm.errors import Forbidden
from localllm.keys.accounts import Accounts
from localllm.keys.key import Key, Scope
from localllm.protocol.messages import Prefill
from localllm.store.library import StoredModel
from localllm.types import Delta, Embeddings, Finished

# What probes and people who look around may see; none of it says anything about anybody.
_PUBLIC = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
_INFERENCE = frozenset(
    {"/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/api/tokenize", "/api/detokenize", "/api/render"}
)
_READ = frozenset({"/api/show", "/api/me"})


@dataclass(frozen=True)
class _Caller:
    key: Key
    accounts: Accounts


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)


def scope_of(method: str, path: str) -> Scope | None:
    """What a key needs for a request; None for what is open to all. Unknown routes change something."""
    if method in ("GET", "HEAD"):
        return None if path in _PUBLIC else "read"
    if path in _READ:
        return "read"
    return "inference" if path in _INFERENCE or path.startswith("/v1/") else "admin"


def secret_in(headers: Headers) -> str:
    """The API key in a request's headers, as OpenAI's and Ollama's clients or as Anthropic's send it; "" for none."""
    kind, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" and secret.strip() else headers.get("x-api-key", "").strip()


def admit(accounts: Accounts, method: str, path: str, headers: Headers) -> None:
    """Let the request in, or raise InvalidKey, Forbidden, RateLimited or QuotaExceeded."""
    scope = scope_of(method, path)
    if scope is None:
        return
    key = accounts.authenticate(secret_in(headers))
    _caller.set(None)
    if key is not None:
        accounts.admit(key, scope)
        _caller.set(_Caller(key, accounts))


def current_key() -> Key | None:
    """That of the request; None where nobody needs one."""
    caller = _caller.get()
    return None if caller is None else caller.key


def check_model(model: StoredModel) -> None:
    """Raises Forbidden when the request's key is for other models."""
    key = current_key()
    if key is not None and not key.allows_model(model.name.display, model.name.display.removesuffix(":latest")):
        raise Forbidden(
            f"the key {key.name} may not use the model {model.name.display}",
            hint=f"It may use {', '.join(key.models)}.",
            field="model",
        )


@contextmanager
def metered(model: StoredModel, *, is_free: bool = False) -> Iterator[Callable[[object], None]]:
    """Around a request to a model: it takes all items that come back, and charges them however the request ends."""
    caller = _caller.get()
    tally = _Tally()
    try:
        yield tally.note
    finally:
        if caller is not None and not is_free:
            caller.accounts.note(
                caller.key,
                model.name.display,
                prompt_tokens=tally.num_prompt,
                cached_tokens=tally.num_cached,
                output_tokens=tally.num_output,
            )


class _Tally:
    """What one request has cost so far. A client that leaves has had what was computed for it."""

    def __init__(self) -> None:
        self.num_prompt = self.num_cached = self.num_output = 0

    def note(self, item: object) -> None:
        if isinstance(item, Prefill):
            self.num_prompt = max(self.num_prompt, item.num_computed_tokens)
        elif isinstance(item, Delta):
            self.num_output += item.num_tokens
        elif isinstance(item, Finished | Embeddings):
            usage = item.usage
            self.num_prompt, self.num_cached = usage.num_prompt_tokens, usage.num_cached_tokens
            self.num_output = usage.num_output_tokens
