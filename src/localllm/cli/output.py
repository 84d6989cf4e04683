"""The one place of the command line that prints: data to stdout, everything else to stderr.

Nothing but plain text goes to what is not a terminal; NO_COLOR and TERM=dumb are honoured on terminals.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from rich.progress import Progress

_GREY, _RESET = "\x1b[90m", "\x1b[0m"


def is_terminal(stream: Any) -> bool:
    """A stream that shows escape sequences to a person."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """A piece of data, as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def line(text: str = "") -> None:
    write(f"{text}\n")


def notice(text: str) -> None:
    """Something for a person to read, not for a script."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    line(json.dumps(value, indent=2, ensure_ascii=False))


def print_error(error: LocalLLMError) -> None:
    notice(f"Error: {error.message}")
    if error.hint:
        notice(f"Hint: {error.hint}")


def dim(text: str) -> str:
    """Grey on a terminal with colours."""
    return f"{_GREY}{text}{_RESET}" if is_terminal(sys.stdout) and not os.environ.get("NO_COLOR") else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns with a gap of four, as Ollama prints them."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        line("    ".join(cells) + "    ")


@contextlib.contextmanager
def transfer_progress() -> Iterator[Progress | None]:
    """A bar on stderr with size, speed and time left; None where nobody would see it."""
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr while the block runs, for a person who waits."""
    if not (is_terminal(sys.stderr) and sys.stdout.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def human_size(size: int) -> str:
    """Bytes in units of 1000: "986 MB", "2.0 GB" (two figures below ten)."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            value = size / unit
            return f"{int(value)} {name}" if value >= 10 else f"{value:.1f} {name}"
    return f"{size} B"


def human_time(when: datetime, now: datetime | None = None) -> str:
    """ "2 days ago" or "4 minutes from now", in Ollama's words."""
    seconds = (when - (now or datetime.now(timezone.utc))).total_seconds()
    return f"{_human_span(int(abs(seconds)))} {'from now' if seconds > 0 else 'ago'}"


def _human_span(seconds: int) -> str:
    minutes, hours = seconds // 60, round(seconds / 3600)
    for is_it, text in (
        (seconds < 1, "Less than a second"),
        (seconds == 1, "1 second"),
        (seconds < 60, f"{seconds} seconds"),
        (minutes == 1, "About a minute"),
        (minutes < 60, f"{minutes} minutes"),
        (hours == 1, "About an hour"),
        (hours < 48, f"{hours} hours"),
        (hours < 24 * 14, f"{hours // 24} days"),
        (hours < 24 * 60, f"{hours // 24 // 7} weeks"),
        (hours < 24 * 365 * 2, f"{hours // 24 // 30} months"),
    ):
        if is_it:
            return text
    return f"{hours // 24 // 365} years"


def human_duration(nanoseconds: int) -> str:
    """As Go prints durations: "4.935886791s", "107.345ms", "2m3.5s"."""
    if nanoseconds < 1_000_000_000:
        unit, name = (1_000_000, "ms") if nanoseconds >= 1_000_000 else (1000, "µs")
        return f"{nanoseconds / unit:.6f}".rstrip("0").rstrip(".") + name
    minutes, rest = divmod(nanoseconds, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1e9:.9f}".rstrip("0").rstrip(".") + "s"
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}{seconds}"


def parse_time(text: str) -> datetime:
    """An RFC 3339 time, also with nine fractional digits or a Z, which Python 3.10 does not read."""
    text = text.replace("Z", "+00:00")
    head, dot, tail = text.partition(".")
    if dot:
        digits = len(tail) - len(tail.lstrip("0123456789"))
        text = f"{head}.{tail[:digits][:6]:0<6}{tail[digits:]}"
    return datetime.fromisoformat(text)


class WordWrapper:
    """Wraps streamed text between words: a word that grows over the edge is taken back and begins the next line."""

    def __init__(self, width: int) -> None:
        """`width` in columns; 0 turns wrapping off."""
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """What to write to the terminal for `text`."""
        return "".join(map(self._place, text)) if self._width else text

    def _place(self, character: str) -> str:
        from rich.cells import cell_len

        if character == "\n":
            self._column, self._word = 0, ""
            return character
        size = cell_len(character)
        if self._column + size <= self._width or character == " ":
            self._column += size
            self._word = "" if character.isspace() else self._word + character
            return character
        word, self._word = self._word, self._word + character
        self._column = cell_len(self._word)
        if not word or self._column > self._width:
            self._word, self._column = character, size
            return f"\n{character}"
        return f"\x1b[{cell_len(word)}D\x1b[K\n{word}{character}"
