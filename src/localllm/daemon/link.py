"""The daemon's end of one runner: from the order to load until the process is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from localllm.daemon.contention import SpareCpus
from localllm.daemon.decisions import StartLoad
from localllm.daemon.runner_process import RunnerProcess, describe_exit
from localllm.errors import ErrorInfo, LoadFailed
from localllm.protocol.channel import FrameTooLarge
from localllm.protocol.messages import (
    Cancel,
    Chat,
    Command,
    Done,
    Embed,
    Embedded,
    Event,
    Failed,
    Load,
    Loaded,
    LoadProgress,
    Output,
    Outputs,
    Prefill,
    SetThreads,
    Stats,
    Text,
    Unload,
)
from localllm.types import ChatRequest, Delta, Embeddings, EmbedRequest, EngineStats, Finished, RunnerInfo

_CHECKS_PER_STALL = 4


class Granted(msgspec.Struct, frozen=True):
    """The model is resident and the request was sent. The nanoseconds say how long each took to come about."""

    load_ns: int
    queue_ns: int


Item = Granted | Prefill | Delta | Finished | Embeddings


class Ticket:
    """A live request: `mailbox` gets its items in order, the last one being Finished, Embeddings or an error.

    `request` is None for a mere load. `link` is set once it was granted, `prefill` once some of its prompt is computed,
    `is_touched` once there is a piece of its answer: until then, another runner may begin anew.
    """

    __slots__ = ("arrived_ns", "id", "is_touched", "link", "mailbox", "prefill", "request")

    def __init__(self, id: str, request: ChatRequest | EmbedRequest | None) -> None:
        self.id = id
        self.request = request
        self.arrived_ns = time.monotonic_ns()
        self.mailbox: asyncio.Queue[Item | ErrorInfo] = asyncio.Queue()
        self.link: RunnerLink | None = None
        self.prefill: Prefill | None = None
        self.is_touched = False


class Listener(Protocol):
    """Whoever decides what a runner's news mean. The number of the runner comes first."""

    def on_progress(self, runner: int, fraction: float) -> None: ...

    def on_loaded(self, runner: int, info: RunnerInfo) -> None: ...

    def on_load_failed(self, runner: int, error: ErrorInfo) -> None: ...

    def on_done(self, request_id: str) -> None: ...

    def on_hung(self, runner: int, seconds: float) -> None: ...

    def on_stats(self, runner: int) -> None: ...


class RunnerLink:
    def __init__(self, start: StartLoad, listener: Listener, *, stall_seconds: float) -> None:
        """A runner with requests that says nothing for `stall_seconds` is reported as hung."""
        self.start = start
        self.started_ns = time.monotonic_ns()
        self.process: RunnerProcess | None = None
        self.is_stopping = False
        self.gone = asyncio.Event()
        self._listener = listener
        self._stall_seconds = stall_seconds
        self._tickets: dict[str, Ticket] = {}
        self.stats: EngineStats | None = None
        self.spare_cpus = SpareCpus()
        self._was_heard = False
        self._heard_at = time.monotonic()
        self._num_silent_checks = 0
        self._check: asyncio.TimerHandle | None = None

    async def run(self, command: Sequence[str]) -> str:
        """Start the process, load, and pass on what it says until it ends. Returns how it ended, in words.

        The caller sets `gone` when it has drawn its conclusions.
        """
        number, name = self.start.runner, self.start.name
        try:
            self.process = process = await RunnerProcess.spawn(command, name=name)
        except OSError as error:
            refusal = LoadFailed(f"a runner for {name} could not be started: {error}", hint="Free some resources.")
            self._listener.on_load_failed(number, refusal.info())
            return "could not be started"
        if self.is_stopping:
            process.hang_up()
        process.channel.send(Load(str(self.start.model.model_path.absolute()), self.start.options))
        words = ""
        try:
            await self._listen(process)
        except (FrameTooLarge, msgspec.MsgspecError) as error:
            process.kill()
            words = f"talked nonsense ({error})"
        finally:
            self._stop_checks()
        status = await process.ended()
        return words or describe_exit(status, process.last_lines)

    async def _listen(self, process: RunnerProcess) -> None:
        while (event := await process.channel.receive()) is not None:
            self._was_heard = True
            self._heard_at = time.monotonic()
            self._handle(event)

    def _handle(self, event: Event) -> None:
        number = self.start.runner
        if isinstance(event, Outputs):
            for item in event.items:
                self._route(item)
        elif isinstance(event, Stats):
            self.stats = event.stats
            self._listener.on_stats(number)
        elif isinstance(event, LoadProgress):
            self._listener.on_progress(number, event.fraction)
        elif isinstance(event, Loaded):
            self._listener.on_loaded(number, event.info)
        else:
            self._listener.on_load_failed(number, event.error)

    def _route(self, item: Output) -> None:
        """Late words about a request that has left find no ticket and are dropped."""
        ticket = self._tickets.get(item.id)
        if ticket is None:
            return
        if isinstance(item, Text):
            ticket.is_touched = True
            ticket.mailbox.put_nowait(item.delta)
        elif isinstance(item, Prefill):
            ticket.prefill = item
            ticket.mailbox.put_nowait(item)
        else:
            del self._tickets[item.id]
            ticket.mailbox.put_nowait(_ending(item))
            self._listener.on_done(item.id)

    def admit(self, ticket: Ticket) -> None:
        """The model is loaded and the request may go to it."""
        now = time.monotonic_ns()
        waited_from = max(self.started_ns, ticket.arrived_ns)
        ticket.link = self
        ticket.mailbox.put_nowait(Granted(load_ns=now - waited_from, queue_ns=waited_from - ticket.arrived_ns))
        if ticket.request is not None:
            if not self._tickets:
                self._start_checks()
            self._tickets[ticket.id] = ticket
            self._send(Chat(ticket.request) if isinstance(ticket.request, ChatRequest) else Embed(ticket.request))

    def dismiss(self, ticket: Ticket) -> None:
        """The request is over for its client; if it is not for the runner, tell that."""
        if self._tickets.pop(ticket.id, None) is not None:
            self._send(Cancel(ticket.id))

    def set_threads(self, num_threads: int) -> None:
        """May be called while the model loads: the runner then starts with them. One that is ending need not know."""
        if self.process is not None and not self.is_stopping:
            self._send(SetThreads(num_threads))

    def stop(self, *, is_forced: bool) -> None:
        """Begin to end the process; `run` returns when it is gone."""
        self.is_stopping = True
        if self.process is not None:
            if is_forced:
                self.process.kill()
            else:
                self._send(Unload())
            self.process.hang_up()

    def _send(self, command: Command) -> None:
        assert self.process is not None
        self.process.channel.send(command)

    # The watchdog counts silent checks instead of looking at the clock, so that a daemon which was itself suspended
    # gives the runner's words time to arrive.

    @property
    def silent_seconds(self) -> float | None:
        """How long ago a runner with requests finished its last step; None for one that has nothing to do."""
        return time.monotonic() - self._heard_at if self._tickets else None

    def _start_checks(self) -> None:
        self._num_silent_checks = 0
        self._was_heard = True
        self._heard_at = time.monotonic()
        if self._check is None:
            self._plan_check()

    def _plan_check(self) -> None:
        self._check = asyncio.get_running_loop().call_later(self._stall_seconds / _CHECKS_PER_STALL, self._look)

    def _stop_checks(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _look(self) -> None:
        self._check = None
        if not self._tickets:
            return
        self._num_silent_checks = 0 if self._was_heard else self._num_silent_checks + 1
        self._was_heard = False
        if self._num_silent_checks >= _CHECKS_PER_STALL:
            self._listener.on_hung(self.start.runner, self._stall_seconds)
        else:
            self._plan_check()


def _ending(item: Done | Embedded | Failed) -> Finished | Embeddings | ErrorInfo:
    if isinstance(item, Done):
        return item.finished
    return item.embeddings if isinstance(item, Embedded) else item.error
