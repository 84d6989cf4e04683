"""One runner as an operating-system process: start it, hear it, end it.

It inherits one end of a socketpair. The end of that channel is the end of the runner, in both directions: it exits as
soon as we hang up (or are killed), and we take its hanging up for its death. Signals are for one that does not obey.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from localllm.protocol.channel import AsyncChannel
from localllm.protocol.messages import Command, Event

RUNNER_COMMAND = (sys.executable, "-m", "localllm.runner")
NUM_LAST_LINES = 20
MAX_LINE_BYTES = 4096
# What an error message shows of them.
NUM_SHOWN_LINES = 5
MAX_SHOWN_CHARACTERS = 200
# How long an obedient runner may take to exit, and then one that was sent SIGTERM.
HANG_UP_SECONDS = 3.0
TERMINATE_SECONDS = 2.0

_log = logging.getLogger(__name__)


class RunnerProcess:
    """Created by `spawn`. `ended` must be awaited in the end: it reaps the process."""

    def __init__(self, process: Process, channel: AsyncChannel[Command, Event], name: str) -> None:
        self.channel = channel
        self._process = process
        self._name = name
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._pump = asyncio.create_task(self._read_output(), name=f"output of runner {process.pid}")

    @classmethod
    async def spawn(cls, command: Sequence[str], *, name: str) -> RunnerProcess:
        """Start `command` with `--fd N` added; `name` is for the log. Raises OSError when the system refuses."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                # `python -m` puts the working directory first on its path: nothing that lies there may be imported.
                cwd="/",
                env=_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, await AsyncChannel.open(ours, Event), name)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The last lines that it wrote to stdout or stderr."""
        return list(self._last_lines)

    def hang_up(self) -> None:
        """Tell the runner to end. Whoever receives from the channel then sees its end."""
        self.channel.hang_up()

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait until the process is gone, with more and more force; returns its exit status, negative for a signal."""
        self.hang_up()
        for force, seconds in ((signal.SIGTERM, HANG_UP_SECONDS), (signal.SIGKILL, TERMINATE_SECONDS)):
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
                break
            except asyncio.TimeoutError:
                _log.warning("runner %d (%s) does not end: sending %s", self.pid, self._name, force.name)
                self._send_signal(force)
        status = await self._process.wait()
        await self._finish_output()
        return status

    async def _finish_output(self) -> None:
        # A process that the runner may have left behind could hold the pipe open for ever.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pump, 1.0)

    def _send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read_output(self) -> None:
        """Log what the runner prints and keep the end of it. Always reads, so that the runner never blocks on us."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._note(line)
            if len(rest) > MAX_LINE_BYTES:
                self._note(rest)
                rest = b""
        self._note(rest)

    def _note(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if line:
            self._last_lines.append(line)
            _log.info("runner %d (%s): %s", self.pid, self._name, line)


def describe_exit(status: int, last_lines: Sequence[str]) -> str:
    """How a process ended, as the end of a sentence about it: "was killed by SIGABRT (last words: …)"."""
    notes = []
    if status == -signal.SIGKILL:
        notes.append("perhaps because memory ran out")
    if last_lines:
        shown = " | ".join(line[-MAX_SHOWN_CHARACTERS:] for line in last_lines[-NUM_SHOWN_LINES:])
        notes.append(f"last words: {shown}")
    words = f"ended with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
    return f"{words} ({'; '.join(notes)})" if notes else words


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment() -> dict[str, str]:
    """Ours, with relative entries of PYTHONPATH made absolute, since the runner starts in another directory.

    llama.cpp's abort would start a debugger on its own process to print a backtrace, which delays the end of a runner
    by seconds or, where the debugger is stopped, for ever.
    """
    environment = dict(os.environ)
    environment.setdefault("GGML_NO_BACKTRACE", "1")
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(part).absolute()) for part in path.split(os.pathsep) if part
        )
    return environment
