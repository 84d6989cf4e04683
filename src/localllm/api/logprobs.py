"""Log-probabilities of tokens in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from localllm.api.wire import invalid
from localllm.types import TokenLogprob

MAX_TOP_LOGPROBS = 20


class Entry(msgspec.Struct, kw_only=True):
    """`bytes` is there because a token need not be whole characters, and `token` then shows a replacement."""

    token: str
    logprob: float
    bytes: list[int]


class NativeEntry(Entry, omit_defaults=True, kw_only=True):
    top_logprobs: list[Entry] = []


class ChatEntry(Entry, kw_only=True):
    top_logprobs: list[Entry]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Lists of one element for each token. `text_offset` counts characters from the beginning of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def parse_count(wanted: bool, top: int) -> int | None:
    """What a request's `num_top_logprobs` is. Raises InvalidRequest."""
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid("top_logprobs", f"must be between 0 and {MAX_TOP_LOGPROBS}")
    if top and not wanted:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return top if wanted else None


def native(entries: Sequence[TokenLogprob]) -> list[NativeEntry]:
    return [NativeEntry(**_fields(entry), top_logprobs=_top(entry)) for entry in entries]


def chat(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[ChatEntry(**_fields(entry), top_logprobs=_top(entry)) for entry in entries])


def completion(entries: Sequence[TokenLogprob], *, first_offset: int = 0) -> CompletionLogprobs:
    """`first_offset`: characters that came before, of an answer in pieces."""
    tokens = [_text(entry) for entry in entries]
    offsets = [first_offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[{_text(top): top.logprob for top in entry.top} for entry in entries],
        text_offset=offsets,
    )


def _text(entry: TokenLogprob) -> str:
    return entry.piece.decode("utf-8", "replace")


def _fields(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(entry), "logprob": entry.logprob, "bytes": list(entry.piece)}


def _top(entry: TokenLogprob) -> list[Entry]:
    return [Entry(**_fields(top)) for top in entry.top]
