"""Carries out what residency decides: starts and ends runners, sends requests to them, passes their words on.

All of it runs in the event loop's thread and every decision is made in one synchronous go, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from localllm.config import Config
from localllm.daemon import machine
from localllm.daemon.contention import CpuTimes
from localllm.daemon.decisions import Effect, Grant, LoadPlan, Refuse, Request, Requeue, Retune, StartLoad, Stay, Stop
from localllm.daemon.link import Granted, Item, RunnerLink, Ticket
from localllm.daemon.machine import Machine
from localllm.daemon.memory import automatic_threads, plan_load, smaller_load
from localllm.daemon.metrics import Metrics
from localllm.daemon.residency import Residency
from localllm.daemon.resident import ResidentModel, describe
from localllm.daemon.runner_process import RUNNER_COMMAND
from localllm.daemon.standing import Standing
from localllm.errors import ErrorInfo, InvalidRequest, RequestCancelled, Unsupported, from_info
from localllm.log import new_request_id
from localllm.types import (
    ChatRequest,
    Embeddings,
    EmbedRequest,
    Finished,
    LoadWishes,
    RunnerInfo,
)

if TYPE_CHECKING:
    from localllm.store.library import StoredModel

__all__ = ["Granted", "Item", "KeepAlive", "ResidentModel", "Standing", "Supervisor"]

DEFAULT_MAX_MODELS = 3
# A step of the engine takes half a second at most where the estimates hold; this is for a machine that swaps.
STALL_SECONDS = 180.0
# How often, at most, to look how many cores there are.
CORES_SECONDS = 5.0

KeepAlive = float | msgspec.UnsetType | None
_log = logging.getLogger(__name__)


class Supervisor:
    def __init__(
        self,
        config: Config,
        *,
        command: Sequence[str] = RUNNER_COMMAND,
        probe: Callable[[], Machine] = machine.probe,
        cpu_times: Callable[[int], CpuTimes | None] = machine.cpu_times,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`command` starts a runner; `probe` tells what the machine has to give, `cpu_times` who computes on it."""
        self._config = config
        self._command = (*command, "--debug") if config.debug else tuple(command)
        self._probe = probe
        self._cpu_times = cpu_times
        self._stall_seconds = stall_seconds
        self._residency = Residency(
            self._plan,
            max_models=config.max_loaded_models or DEFAULT_MAX_MODELS,
            max_queue=config.max_queue,
            stay=self._stay,
            load_timeout=config.load_timeout or None,
            shrink=lambda model, plan: smaller_load(model.header, plan),
        )
        self.metrics = Metrics()
        self._machine = Machine(0, 1)
        self._cores_looked_at = -math.inf
        self._tickets: dict[str, Ticket] = {}
        self._links: dict[int, RunnerLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # ---- for the API ----

    async def start(self) -> None:
        """Learn what the machine has. Must come before any request."""
        self._machine = await asyncio.to_thread(self._probe)
        self._cores_looked_at = time.monotonic()
        num_cores, num_bytes = self._machine.num_cores, self._machine.available_bytes
        _log.info("%d cores and %.1f GiB of memory for models", num_cores, num_bytes / 2**30)

    async def generate(
        self,
        model: StoredModel,
        request: ChatRequest,
        wishes: LoadWishes,
        keep_alive: KeepAlive,
    ) -> AsyncGenerator[Item, None]:
        """Granted once the model is loaded and has the request, then Prefill and Delta as they come, at last Finished.

        When the runner dies before the first Delta, Granted comes once more, from another runner.

        `keep_alive`: seconds that the model stays afterwards, None for ever, UNSET for as before. Closing the generator
        at any point cancels the request wherever it is. Raises LocalLLMError before the first item or between items.
        """
        async with aclosing(self._items(model, request, wishes, keep_alive)) as items:
            async for item in items:
                yield item

    async def embed(
        self, model: StoredModel, request: EmbedRequest, wishes: LoadWishes, keep_alive: KeepAlive
    ) -> tuple[Granted, Embeddings]:
        """Vectors or scores. Cancelling the caller cancels the request. Raises as `generate`."""
        granted = Granted(0, 0)
        async with aclosing(self._items(model, request, wishes, keep_alive)) as items:
            async for item in items:
                if isinstance(item, Granted):
                    granted = item
                elif isinstance(item, Embeddings):
                    return granted, item
        raise RequestCancelled("the request was cancelled before its answer was complete")

    async def _items(
        self, model: StoredModel, request: ChatRequest | EmbedRequest, wishes: LoadWishes, keep_alive: KeepAlive
    ) -> AsyncGenerator[Item, None]:
        with self.metrics.request(model.name.display) as clock:
            ticket = await self._enter(model, Ticket(request.id, request), wishes, keep_alive)
            try:
                while True:
                    item = await ticket.mailbox.get()
                    if isinstance(item, ErrorInfo):
                        raise from_info(item)
                    clock.note(item)
                    yield item
                    if isinstance(item, Finished | Embeddings):
                        return
            finally:
                self._leave(ticket)

    async def load(self, model: StoredModel, wishes: LoadWishes, keep_alive: KeepAlive) -> None:
        """Make the model resident; it stays for its keep-alive. Raises as `generate`."""
        ticket = await self._enter(model, Ticket(new_request_id(), None), wishes, keep_alive)
        try:
            item = await ticket.mailbox.get()
            if isinstance(item, ErrorInfo):
                raise from_info(item)
        finally:
            self._leave(ticket)

    async def unload(self, model: StoredModel) -> bool:
        """End the model's runner: at once, and waiting for it, when it is idle, else when its requests are done.

        False when it was not loaded.
        """
        key = _key(model)
        was_loaded, effects = self._residency.on_unload(key, time.monotonic())
        self._apply(effects)
        for link in [link for link in self._links.values() if link.start.key == key and link.is_stopping]:
            await link.gone.wait()
        return was_loaded

    def resident(self) -> list[ResidentModel]:
        now = time.monotonic()
        return [describe(entry, self._links.get(entry.runner), now) for entry in self._residency.entries()]

    def standings(self) -> list[Standing]:
        """Where each live request stands."""
        return [self._with_prefill(standing) for standing in self._residency.standings()]

    def _with_prefill(self, standing: Standing) -> Standing:
        ticket = self._tickets.get(standing.id)
        if ticket is None or ticket.prefill is None:
            return standing
        prefill = ticket.prefill
        return dataclasses.replace(standing, prefill=(prefill.num_computed_tokens, prefill.num_prompt_tokens))

    def eta_seconds(self, model: StoredModel) -> float:
        """A guess at when the turn of one more request for the model would come."""
        return self._residency.eta_seconds(_key(model))

    @property
    def is_draining(self) -> bool:
        return self._residency.is_draining

    async def drain(self, timeout: float | None) -> None:
        """Refuse new work, let what runs finish for `timeout` seconds (None: as long as it takes), end all runners.

        May be called again, with less patience, while it runs.
        """
        self._apply(self._residency.on_drain(time.monotonic()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        if self._tasks:
            self._apply(self._residency.on_kill(time.monotonic()))
            await asyncio.wait(self._tasks)
        if self._timer is not None:
            self._timer.cancel()

    # ---- requests ----

    async def _enter(self, model: StoredModel, ticket: Ticket, wishes: LoadWishes, keep_alive: KeepAlive) -> Ticket:
        """Hand the request to residency. From here on `_leave` is owed, unless this raises."""
        if model.adapter_paths:
            raise Unsupported(f"{model.name.display} has adapters, which are not supported", hint="Merge them first.")
        self._look_at_cores()
        key = _key(model)
        if not self._residency.can_serve(key, wishes):
            pids = [link.process.pid for link in self._links.values() if link.process is not None]
            self._residency.on_capacity(await asyncio.to_thread(self._survey, model, pids))
        if ticket.id in self._tickets:
            raise InvalidRequest(f"a request with the id {ticket.id} runs already", hint="Use another id.")
        self._tickets[ticket.id] = ticket
        now = time.monotonic()
        priority = ticket.request.priority if ticket.request is not None else 0
        request = Request(ticket.id, key, model.name.display, model, wishes, keep_alive, now, priority)
        try:
            self._apply(self._residency.on_request(request, now))
        except BaseException:
            del self._tickets[ticket.id]
            raise
        return ticket

    def _look_at_cores(self) -> None:
        """With a request, now and then: a container's share or our affinity may have changed since the last look."""
        now = time.monotonic()
        if now >= self._cores_looked_at + CORES_SECONDS:
            self._cores_looked_at = now
            task = asyncio.create_task(self._count_cores())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _count_cores(self) -> None:
        found = await asyncio.to_thread(self._probe)
        if found.num_cores != self._machine.num_cores:
            _log.info("%d cores instead of %d may be used now", found.num_cores, self._machine.num_cores)
            self._machine = dataclasses.replace(self._machine, num_cores=found.num_cores)
            self._apply(self._residency.on_threads(automatic_threads(found.num_cores, self._config)))

    def _leave(self, ticket: Ticket) -> None:
        """Whatever way the request has ended, nothing of it is left afterwards. Harmless when all is done already."""
        if ticket.link is not None:
            ticket.link.dismiss(ticket)
        if self._tickets.pop(ticket.id, None) is not None:
            self._apply(self._residency.on_released(ticket.id, time.monotonic()))

    # ---- what runners report (see link.Listener) ----

    def on_progress(self, runner: int, fraction: float) -> None:
        self._residency.on_progress(runner, fraction, time.monotonic())

    def on_loaded(self, runner: int, info: RunnerInfo) -> None:
        link = self._links[runner]
        _log.info("%s is loaded after %.1f s", link.start.name, (time.monotonic_ns() - link.started_ns) / 1e9)
        self._apply(self._residency.on_loaded(runner, info, time.monotonic()))

    def on_load_failed(self, runner: int, error: ErrorInfo) -> None:
        _log.error("%s could not be loaded: %s", self._links[runner].start.name, error.message)
        self._apply(self._residency.on_load_failed(runner, error, time.monotonic()))

    def on_done(self, request_id: str) -> None:
        self._tickets.pop(request_id, None)
        self._apply(self._residency.on_released(request_id, time.monotonic()))

    def on_hung(self, runner: int, seconds: float) -> None:
        _log.error("the runner of %s has said nothing for %.0f s", self._links[runner].start.name, seconds)
        untouched = self._untouched(self._links[runner])
        self._apply(self._residency.on_hung(runner, seconds, time.monotonic(), untouched))

    def _untouched(self, link: RunnerLink) -> set[str]:
        """The requests that the runner has and has said nothing about."""
        return {ticket.id for ticket in self._tickets.values() if ticket.link is link and not ticket.is_touched}

    def on_stats(self, runner: int) -> None:
        link = self._links[runner]
        times = None if link.process is None else self._cpu_times(link.process.pid)
        if times is not None:
            most = automatic_threads(self._machine.num_cores, self._config)
            self._apply(self._residency.on_threads(min(most, link.spare_cpus.observe(times)), runner))

    # ---- effects ----

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Grant):
                self._links[effect.runner].admit(self._tickets[effect.request_id])
            elif isinstance(effect, Refuse):
                self._refuse(effect)
            elif isinstance(effect, Requeue):
                self._requeue(effect)
            elif isinstance(effect, StartLoad):
                self._start_runner(effect)
            elif isinstance(effect, Retune):
                link = self._links[effect.runner]
                _log.info("%s computes with %d threads now", link.start.name, effect.num_threads)
                link.set_threads(effect.num_threads)
            else:
                self._stop_runner(effect)
        self._set_timer()

    def _refuse(self, effect: Refuse) -> None:
        ticket = self._tickets.pop(effect.request_id)
        ticket.mailbox.put_nowait(effect.error)
        if ticket.link is not None:
            ticket.link.dismiss(ticket)

    def _requeue(self, effect: Requeue) -> None:
        ticket = self._tickets[effect.request_id]
        assert ticket.link is not None, "only what was granted can lose its runner"
        _log.info("request %s waits for another runner of %s", ticket.id, ticket.link.start.name)
        self.metrics.retries.labels(ticket.link.start.name).inc()
        ticket.link.dismiss(ticket)
        ticket.link = ticket.prefill = None

    def _start_runner(self, effect: StartLoad) -> None:
        options = effect.options
        _log.info(
            "loading %s (%s): %d × %d tokens, %d threads, about %.1f GiB",
            *(effect.name, effect.reason, options.num_parallel, options.num_ctx, options.num_threads),
            effect.size_bytes / 2**30,
        )
        link = RunnerLink(effect, self, stall_seconds=self._stall_seconds)
        self._links[effect.runner] = link
        self.metrics.runner_starts.labels(effect.name).inc()
        # In a context of its own: the runner's log lines are not those of the request that made it start.
        context = contextvars.Context()
        task = context.run(asyncio.get_running_loop().create_task, self._run(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, link: RunnerLink) -> None:
        words = "was lost by the daemon"
        try:
            words = await link.run(self._command)
        except Exception:
            _log.exception("the runner of %s could not be followed", link.start.name)
        finally:
            if not link.is_stopping:
                _log.error("the runner of %s %s", link.start.name, words)
            self.metrics.on_runner_gone(link.start.name, link.stats, is_failure=not link.is_stopping)
            del self._links[link.start.runner]
            untouched = self._untouched(link)
            self._apply(self._residency.on_exited(link.start.runner, words, time.monotonic(), untouched))
            link.gone.set()

    def _stop_runner(self, effect: Stop) -> None:
        link = self._links[effect.runner]
        _log.info("unloading %s: %s", link.start.name, effect.reason)
        link.stop(is_forced=effect.is_forced)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        moment = self._residency.wake_at(now)
        if moment < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._apply(self._residency.on_tick(time.monotonic()))

    # ---- memory ----

    def _survey(self, model: StoredModel, pids: Sequence[int]) -> int:
        """What all models together may take: what is free, and what our runners hold already.

        Also reads the model's header, which keeps it, so that planning need not wait for a disk: not for the loop's
        thread. Raises InvalidModelFile.
        """
        _ = model.header
        return self._probe().available_bytes + sum(machine.private_bytes(pid) for pid in pids)

    def _plan(self, model: StoredModel, wishes: Sequence[LoadWishes], free_bytes: int) -> LoadPlan:
        config = self._config.for_model(model.name.display)
        return plan_load(model.header, wishes, config, Machine(free_bytes, self._machine.num_cores))

    def _stay(self, model: StoredModel) -> Stay:
        config = self._config.for_model(model.name.display)
        return Stay(None if config.pin else config.keep_alive, config.pin)


def _key(model: StoredModel) -> str:
    """Equal for all names that need the same files: they share one runner."""
    return "|".join(map(str, (model.model_path, *model.projector_paths, *model.adapter_paths)))
