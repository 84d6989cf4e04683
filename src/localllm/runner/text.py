"""From tokens to typed deltas: whole characters only, stop strings never shown, thinking and tool calls told apart."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable

from localllm.chat.formats import OutputParser
from localllm.types import Delta, TokenLogprob


class StopMatcher:
    """Finds the first stop string in a stream and holds back only what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_stopped = False
        self.found = ""

    def feed(self, text: str) -> str:
        """The text that is certain now. Once `is_stopped`, everything before the stop string has been returned."""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if hits:
            index, self.found = min(hits)
            self.is_stopped = True
            self._held = ""
            return text[:index]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and, at the end of the stream, turned out to be plain text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """One answer: bytes of tokens in, deltas out."""

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stops: tuple[str, ...],
        parser: OutputParser,
        logprobs: deque[TokenLogprob] | None = None,
        *,
        max_tool_calls: int = 0,
    ) -> None:
        """`piece` gives the bytes of a token, which need not be whole characters.

        `logprobs` must have an entry for each token before that is fed; None when they are not wanted. The answer ends
        after `max_tool_calls`, if not 0.
        """
        self._max_tool_calls = max_tool_calls
        self._num_tool_calls = 0
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(stops)
        self._parser = parser
        self._logprobs = logprobs
        self._num_new_tokens = 0
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was found, or the last tool call that is wanted: nothing more may be fed."""
        return self._stops.is_stopped or self._has_enough_calls

    @property
    def stopped_by(self) -> str:
        """The stop string that was found, "" for none."""
        return self._stops.found

    @property
    def _has_enough_calls(self) -> bool:
        return 0 < self._max_tool_calls <= self._num_tool_calls

    def feed(self, token: int) -> Delta | None:
        """The delta that `token` completes, or None when nothing can be shown yet."""
        self.num_tokens += 1
        self._num_new_tokens += 1
        text = self._stops.feed(self._decoder.decode(self._piece(token)))
        return self._delta(self._parser.feed(text)) if text else None

    def finish(self) -> Delta | None:
        """The last delta, once no more tokens come."""
        if self._has_enough_calls:
            return None
        tail = "" if self.is_stopped else self._stops.feed(self._decoder.decode(b"", final=True))
        tail += self._stops.finish()
        pieces = [*(self._parser.feed(tail) if tail else ()), *self._parser.finish()]
        is_owed = self._logprobs is not None and self._num_new_tokens > 0
        return self._delta(pieces or ([Delta()] if is_owed else []))

    def _delta(self, pieces: list[Delta]) -> Delta | None:
        if not pieces:
            return None
        num_tokens, self._num_new_tokens = self._num_new_tokens, 0
        logprobs = tuple(self._logprobs.popleft() for _ in range(num_tokens)) if self._logprobs is not None else ()
        calls = tuple(call for p in pieces for call in p.tool_calls)
        if self._max_tool_calls:
            calls = calls[: self._max_tool_calls - self._num_tool_calls]
        self._num_tool_calls += len(calls)
        return Delta(
            content="".join(p.content for p in pieces),
            thinking="".join(p.thinking for p in pieces),
            tool_calls=calls,
            num_tokens=num_tokens,
            logprobs=logprobs,
        )
