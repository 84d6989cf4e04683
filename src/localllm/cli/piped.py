"""What another process says to a command on standard input."""

from __future__ import annotations

import os
import select
import stat
import sys

from localllm.cli import output

# How long a silent standard input that may never end is given when there is a prompt without it.
PATIENCE_SECONDS = 2.0
REMARK_SECONDS = 3.0


def read_piped(*, has_prompt: bool) -> str:
    """All of standard input, or nothing when that is a terminal.

    A command that is started by a script, a service or a build often inherits an input that nobody writes to and
    nobody closes. With a prompt of its own it does not wait for one of those.
    """
    if sys.stdin.isatty():
        return ""
    if has_prompt and not _is_readable(PATIENCE_SECONDS) and not _is_meant_for_us():
        output.notice(
            "Warning: standard input is open, but nothing came: going on without it (< /dev/null avoids the wait)"
        )
        return ""
    if not _is_readable(REMARK_SECONDS):
        output.remark("Waiting for standard input to end (Ctrl+D)...")
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _is_readable(seconds: float) -> bool:
    """True when there is something to read, or the end, within the time."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):
        return True


def _is_meant_for_us() -> bool:
    """False for a socket, and for a pipe that our parent has too: a shell keeps no end of the pipes that it lays.

    Where the system does not tell what the parent has, a pipe is taken for ours.
    """
    mine = os.fstat(sys.stdin.fileno())
    if stat.S_ISSOCK(mine.st_mode):
        return False
    return (mine.st_dev, mine.st_ino) not in _files_of(os.getppid())


def _files_of(pid: int) -> set[tuple[int, int]]:
    """Device and inode of all that the process has open, as far as this system shows it."""
    found: set[tuple[int, int]] = set()
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return found
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found
