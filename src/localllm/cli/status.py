"""The exit statuses of the command; docs/cli.md explains them."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    # Of `serve` alone: tells a command line that just started a daemon that somebody else was quicker.
    ADDRESS_IN_USE = 3
    # 128 plus the number of the signal, as shells count: SIGINT, and the SIGPIPE of a reader that left.
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
