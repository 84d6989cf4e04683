"""An answer on its way to stdout, and what is to be said about it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from localllm.cli import output
from localllm.cli.format import human_duration
from localllm.cli.wrap import WordWrapper
from localllm.errors import LocalLLMError

Events = Generator[dict[str, Any], None, None]

# Columns that a wrapped line leaves free at the right.
_MARGIN = 5
_LABEL_WIDTH = 22


@dataclass(frozen=True)
class Answer:
    """All of the text, and the last object of the stream, which has the counts and timings."""

    text: str
    final: dict[str, Any]


class AnswerWriter:
    """Writes pieces as they come: thinking between two lines that say so, then the text."""

    def __init__(self, *, wordwrap: bool, hidethinking: bool) -> None:
        self._width = output.wrap_width(_MARGIN) if wordwrap else 0
        self._wrapper = WordWrapper(self._width)
        self._hides_thinking = hidethinking
        self._is_thinking = False

    def think(self, text: str) -> None:
        if self._hides_thinking:
            return
        if not self._is_thinking:
            self._is_thinking = True
            output.write_styled(output.dim("Thinking...") + "\n")
        output.write_styled(output.dim(self._wrapper.feed(output.clean(text))))

    def say(self, text: str) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._wrapper = WordWrapper(self._width)
            output.write_styled("\n" + output.dim("...done thinking.") + "\n\n")
        output.write_styled(self._wrapper.feed(output.clean(text)))


def print_answer(events: Events, writer: AnswerWriter) -> Answer:
    """Write an answer of /api/generate or /api/chat to its end. However this ends, the request ends with it.

    Raises what the stream raises, and LocalLLMError for a stream that stops too early.
    """
    said: list[str] = []
    with contextlib.closing(events):
        for event in _with_spinner(events):
            piece = event.get("message") or event
            if thinking := piece.get("thinking"):
                writer.think(thinking)
            if text := piece.get("content") or piece.get("response"):
                said.append(text)
                writer.say(text)
            if event.get("done"):
                return Answer("".join(said), event)
    raise LocalLLMError("the answer broke off before its end", hint="The daemon's log may say why.")


def _with_spinner(events: Events) -> Iterator[dict[str, Any]]:
    """Shows that something is going on until there is something to read."""
    with output.waiting("waiting for the first word"):
        first = next(events, None)
    if first is not None:
        yield first
        yield from events


def print_remarks(final: dict[str, Any]) -> None:
    """What a person should know who takes the answer for whole."""
    if num_dropped := final.get("dropped_message_count"):
        output.remark(f"Note: the {num_dropped} oldest messages were left out, as the context window is full.")
    if final.get("done_reason") == "length":
        output.remark("Note: the answer stops here because the context window is full.")


def print_timings(final: dict[str, Any]) -> None:
    """The lines of --verbose, on stderr: durations are nanoseconds in `final`."""
    rows: list[tuple[str, str]] = []
    for key in ("total_duration", "load_duration"):
        if value := final.get(key):
            rows.append((key, human_duration(value)))
    for key in ("prompt_eval", "eval"):
        count, duration = final.get(f"{key}_count", 0), final.get(f"{key}_duration", 0)
        if count:
            rows.append((f"{key}_count", f"{count} token(s)"))
        if duration:
            rows.append((f"{key}_duration", human_duration(duration)))
        if count and duration:
            rows.append((f"{key}_rate", f"{count / duration * 1e9:.2f} tokens/s"))
    for key, text in rows:
        output.notice(f"{key.replace('_', ' ') + ':':{_LABEL_WIDTH}}{text}")
