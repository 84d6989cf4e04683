"""The one place of the command line that prints and asks: data to stdout, everything else to stderr.

Nothing but plain text goes to what is not a terminal; NO_COLOR and TERM=dumb are honoured on terminals.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from localllm.cli.status import Status
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_GREY, _RESET = "\x1b[90m", "\x1b[0m"
# What a terminal obeys instead of showing it: a model's words must not move its cursor or set its title.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]

ShowEvent = Callable[[Mapping[str, Any]], None]


# ---- the streams ----


def prepare() -> None:
    """Make the standard streams usable whatever the locale is and whichever of them is closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def can_converse() -> bool:
    """A person types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def is_watched() -> bool:
    """Somebody reads stderr."""
    return sys.stderr.isatty()


def can_redraw(stream: TextIO | None) -> bool:
    """A terminal that obeys escape sequences."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


# ---- stdout ----


def clean(text: str) -> str:
    """`text` as it may be shown where stdout goes: without control characters on a terminal, untouched elsewhere."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def write(text: str) -> None:
    """A piece of data, at once."""
    write_styled(clean(text))


def line(text: str = "") -> None:
    write(f"{text}\n")


def write_styled(text: str) -> None:
    """Text that may hold escape sequences of ours. Ends the process quietly when nobody reads any more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
        sys.exit(Status.OUTPUT_CLOSED)
    except OSError as error:
        _abandon_stdout()
        raise LocalLLMError(f"the output cannot be written: {error.strerror}") from None


def _abandon_stdout() -> None:
    """What could not be written is still in the buffer, and Python would try and complain again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    line(json.dumps(value, indent=2, ensure_ascii=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns with a gap of four, as Ollama prints them."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        line("    ".join(cells) + "    ")


def dim(text: str) -> str:
    """Grey on a terminal with colours."""
    return f"{_GREY}{text}{_RESET}" if can_redraw(sys.stdout) and not os.environ.get("NO_COLOR") else text


def wrap_width(margin: int) -> int:
    """Columns to wrap at, `margin` less than the terminal has; 0 where stdout is nothing to wrap on."""
    return max(shutil.get_terminal_size().columns - margin, 0) if can_redraw(sys.stdout) else 0


# ---- stderr ----


def notice(text: str) -> None:
    """Something for a person to read, not for a script."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def remark(text: str) -> None:
    """A notice that only somebody who watches needs."""
    if is_watched():
        notice(text)


def print_error(error: LocalLLMError) -> None:
    notice(f"Error: {error.message}")
    if error.hint:
        notice(f"Hint: {error.hint}")


def end_interrupted_line() -> None:
    """Leave the line on which the terminal has echoed a Ctrl+C."""
    if sys.stdin.isatty():
        remark("")


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr while the block runs, for a person who waits."""
    if not (can_redraw(sys.stderr) and sys.stdout.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def pull_display() -> Iterator[ShowEvent]:
    """Shows the events of a pull on stderr: bars with size, speed and time left; nothing where nobody watches."""
    if not is_watched():
        yield lambda event: None
    elif not can_redraw(sys.stderr):
        yield _StatusLines().show
    else:
        with _progress() as progress:
            yield _Bars(progress).show


class _StatusLines:
    """For a terminal that cannot redraw: each status once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, event: Mapping[str, Any]) -> None:
        status = str(event.get("status", ""))
        if status not in self._shown:
            self._shown.add(status)
            notice(status)


class _Bars:
    """A bar for each file, a line for each status without a size."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._lines = _StatusLines()

    def show(self, event: Mapping[str, Any]) -> None:
        status, total, completed = str(event.get("status", "")), event.get("total"), event.get("completed") or 0
        if not total:
            self._lines.show(event)
            return
        if status not in self._tasks:
            renamed = self._renamed(total, completed)
            self._tasks[status] = self._progress.add_task(status) if renamed is None else renamed
        self._progress.update(self._tasks[status], description=status, total=total, completed=completed)

    def _renamed(self, total: int, completed: int) -> TaskID | None:
        """The bar of a file that now has another name: one whose digest is known only when all of it is here."""
        last = self._progress.tasks[-1] if self._progress.tasks else None
        return last.id if last and not last.finished and completed == total == last.total else None


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        redirect_stdout=False,
    )


# ---- stdin ----


def ask(prompt: str) -> str:
    """A line that a person types. Raises EOFError for Ctrl+D and KeyboardInterrupt for Ctrl+C."""
    return input(prompt)
