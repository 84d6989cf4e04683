"""`localllm run`: one answer, or a conversation."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localllm.cli import output
from localllm.cli.client import Client
from localllm.errors import InvalidRequest, ModelNotFound

_THINK_VALUES = ("true", "false", "low", "medium", "high", "max")
# Columns that a wrapped line leaves free at the right.
_MARGIN = 5


@dataclass(frozen=True)
class RunOptions:
    """The flags of `run`, as they were given; empty means not given."""

    model: str
    keepalive: str = ""
    verbose: bool = False
    insecure: bool = False
    wordwrap: bool = True
    format: str = ""
    think: str = ""
    hidethinking: bool = False

    def body(self) -> dict[str, Any]:
        """The request fields that they mean. Raises InvalidRequest for a value that cannot be one."""
        body: dict[str, Any] = {"model": self.model}
        if self.keepalive:
            body["keep_alive"] = self.keepalive
        if self.format:
            body["format"] = _format(self.format)
        if self.think:
            body["think"] = _think(self.think)
        return body


def _format(text: str) -> Any:
    if text == "json":
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f'invalid value for --format: "{text}"', hint="Use json, or a JSON schema.") from None


def _think(text: str) -> bool | str:
    if text not in _THINK_VALUES:
        raise InvalidRequest(
            f'invalid value for --think: "{text}" (must be true, false, high, medium, low, or max)',
            hint="Write it with an equals sign: --think=low.",
        )
    return {"true": True, "false": False}.get(text, text)


def run_model(client: Client, options: RunOptions, words: list[str]) -> None:
    """Answer the prompt made of standard input and `words`; with neither, on a terminal, begin a conversation."""
    body = options.body()
    prompt = _prompt(words)
    ensure_model(client, options)
    if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        from localllm.cli.repl import Repl

        Repl(client, options).run()
        return
    events = client.stream("/api/generate", {**body, "prompt": prompt or ""})
    final = print_answer(events, "response", options)
    if prompt:
        output.write("\n\n")
    if options.verbose:
        print_timings(final)


def _prompt(words: list[str]) -> str | None:
    """None when nothing was said at all; an empty argument counts as said."""
    pieces = list(words)
    if not sys.stdin.isatty():
        # A prompt as argument does not need a standard input that may never end.
        piped = "" if pieces and not _has_input() else sys.stdin.read()
        if piped:
            pieces.insert(0, piped)
    return " ".join(pieces) if pieces else None


def _has_input() -> bool:
    """True for a pipe or file that has something to read, or is at its end, right now or in a moment."""
    import select

    try:
        return bool(select.select([sys.stdin], [], [], 0.5)[0])
    except (OSError, ValueError):
        return True


def ensure_model(client: Client, options: RunOptions) -> dict[str, Any]:
    """What the daemon knows of the model, which is pulled when it is not here."""
    try:
        return client.call("POST", "/api/show", {"model": options.model})
    except ModelNotFound:
        from localllm.cli.models import pull_model

        pull_model(client, options.model, insecure=options.insecure)
    return client.call("POST", "/api/show", {"model": options.model})


def print_answer(events: Iterator[dict[str, Any]], field: str, options: RunOptions) -> dict[str, Any]:
    """Write an answer to stdout as it comes; returns the final object. `field` is where pieces have their text."""
    is_terminal = output.is_terminal(sys.stdout)
    width = shutil.get_terminal_size().columns - _MARGIN if options.wordwrap and is_terminal else 0
    wrapper = output.WordWrapper(max(width, 0))
    is_thinking = False
    event: dict[str, Any] = {}
    with output.waiting("waiting for the first word"):
        first = next(events, {})
    for event in _chain(first, events):
        piece = event.get("message", event)
        thinking, text = piece.get("thinking", ""), piece.get(field, "")
        if thinking and not options.hidethinking:
            output.write(("" if is_thinking else output.dim("Thinking...") + "\n") + output.dim(wrapper.feed(thinking)))
            is_thinking = True
        if text:
            output.write((output.dim("\n...done thinking.") + "\n\n" if is_thinking else "") + wrapper.feed(text))
            is_thinking = False
    return event


def _chain(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def print_timings(final: dict[str, Any]) -> None:
    """The lines of --verbose, on stderr: durations are nanoseconds in `final`."""
    rows: list[tuple[str, str]] = []
    for key in ("total_duration", "load_duration"):
        if value := final.get(key):
            rows.append((key, output.human_duration(value)))
    for key in ("prompt_eval", "eval"):
        count, duration = final.get(f"{key}_count", 0), final.get(f"{key}_duration", 0)
        if count:
            rows.append((f"{key}_count", f"{count} token(s)"))
        if duration:
            rows.append((f"{key}_duration", output.human_duration(duration)))
            rows.append((f"{key}_rate", f"{count / duration * 1e9:.2f} tokens/s"))
    for key, text in rows:
        output.notice(f"{key.replace('_', ' ') + ':':22}{text}")
