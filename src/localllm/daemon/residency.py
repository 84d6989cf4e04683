"""PURE: which models are loaded, who waits for what, who has to go.

Events come in through the `on_…` methods, each with the time in seconds of one monotonic clock; each returns the
effects to carry out, in order. There is at most one runner per model at a time. Every request that came in gets exactly
one Grant or Refuse, and a granted one may still be refused later when its runner dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from localllm.daemon import failures, refusals
from localllm.daemon.decisions import Effect, Grant, LoadPlan, Refuse, Request, Retune, StartLoad, Stay, Stop
from localllm.daemon.entry import FIRST_REASON, Entry, Running, Status
from localllm.daemon.room import Room, find_victims, pinned_by_others, room_of
from localllm.daemon.standing import Standing, eta_seconds, standings
from localllm.errors import ErrorInfo
from localllm.types import LoadOptions, LoadWishes, RunnerInfo

if TYPE_CHECKING:
    from localllm.store.library import StoredModel

# A request that needs room or other load options lets the requests for loaded models pass for this long, no longer.
PATIENCE_SECONDS = 30.0
_SMOOTHING = 0.2

# How to load a model so that all of the wishes are served, given that much memory in bytes.
Planner = Callable[["StoredModel", Sequence[LoadWishes], int], LoadPlan]
# A plan that takes less memory, for a load that failed by the given one; None when there is none.
Shrinker = Callable[["StoredModel", LoadPlan], LoadPlan | None]


class Residency:
    def __init__(
        self,
        plan: Planner,
        *,
        max_models: int,
        max_queue: int,
        stay: Callable[[StoredModel], Stay],
        load_timeout: float | None = None,
        patience: float = PATIENCE_SECONDS,
        shrink: Shrinker = lambda _model, _plan: None,
    ) -> None:
        """`max_queue` requests may wait for one model beside those that it decodes; the times are in seconds.

        `stay` says how long a model stays about which no request says anything.
        """
        self._plan = plan
        self._shrink = shrink
        self._max_models = max_models
        self._max_queue = max_queue
        self._stay = stay
        self._load_timeout = load_timeout
        self._patience = patience
        self._capacity = 0
        self._entries: dict[str, Entry] = {}
        self._last_runner = 0
        self._is_draining = False

    # ---- reading: informs, never decides ----

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def entries(self) -> list[Entry]:
        """The models that have a runner."""
        return [entry for entry in self._entries.values() if entry.has_runner]

    def standings(self) -> list[Standing]:
        return list(standings(self._entries.values()))

    def eta_seconds(self, key: str) -> float:
        """When the turn of one more request for this model would come; loads are not counted."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else eta_seconds(entry, len(entry.in_flight) + len(entry.waiting))

    def can_serve(self, key: str, wishes: LoadWishes) -> bool:
        """Whether the model is loaded so that a request needs no planning."""
        entry = self._entries.get(key)
        return entry is not None and entry.status is Status.READY and not entry.differs(wishes)

    def wake_at(self, now: float) -> float:
        """The next time at which on_tick has something to do; infinite when only an event can change anything."""
        times = (t for e in self._entries.values() for t in e.deadlines(self._load_timeout, self._patience, now))
        return min(times, default=math.inf)

    # ---- events ----

    def on_capacity(self, num_bytes: int) -> None:
        """How much memory all models together may take, those that are loaded included."""
        self._capacity = num_bytes

    def on_request(self, request: Request, now: float) -> list[Effect]:
        entry = self._entries.get(request.key)
        if self._is_draining:
            return [Refuse(request.id, refusals.shutting_down())]
        if entry is None or not self.can_serve(request.key, request.wishes):
            num_bytes, num_models = self._reach(request.key)
            plan = self._plan(request.model, [request.wishes], num_bytes)
            if plan.size_bytes > num_bytes:
                return [Refuse(request.id, refusals.too_large(request.name, plan, num_bytes))]
            if num_models < 1:
                return [Refuse(request.id, refusals.all_pinned(request.name, self._max_models))]
            if entry is None:
                entry = self._entries[request.key] = self._new_entry(request, plan)
            elif not entry.has_runner:
                entry.name, entry.model = request.name, request.model
        refusal = self._refusal(entry, now)
        if refusal is not None:
            return [Refuse(request.id, refusal)]
        entry.enqueue(request)
        return self._settle(now)

    def _new_entry(self, request: Request, plan: LoadPlan) -> Entry:
        stay = self._stay(request.model)
        return Entry(request.key, request.name, request.model, plan, stay.keep_alive, stay.is_pinned)

    def _reach(self, key: str) -> tuple[int, int]:
        """Bytes and places that the model could have if all went that may go."""
        num_bytes, num_models = pinned_by_others(self.entries(), key)
        return max(0, self._capacity - num_bytes), self._max_models - num_models

    def _refusal(self, entry: Entry, now: float) -> ErrorInfo | None:
        if len(entry.waiting) + len(entry.in_flight) >= entry.num_slots + self._max_queue:
            return refusals.queue_full(entry.name, self._max_queue, entry.mean_seconds / entry.num_slots)
        delay = entry.crashes.ready_at(now) - now
        if entry.status is Status.ABSENT and delay > failures.MAX_BACKOFF_WAIT_SECONDS:
            return refusals.crash_loop(entry.name, entry.crashes.num_recent(now), delay, entry.crashes.last_words)
        return None

    def on_progress(self, runner: int, fraction: float, now: float) -> None:
        entry = self._of(runner)
        if entry is not None:
            entry.fraction, entry.progress_at = fraction, now

    def on_loaded(self, runner: int, info: RunnerInfo, now: float) -> list[Effect]:
        entry = self._of(runner)
        if entry is None or entry.status is not Status.LOADING:
            return []
        entry.status, entry.info, entry.idle_since = Status.READY, info, now
        return self._settle(now)

    def on_load_failed(self, runner: int, error: ErrorInfo, now: float) -> list[Effect]:
        """The runner said that it cannot load. For want of memory, a smaller load is tried, once.

        Otherwise whoever this load was for is refused, and the next request tries again.
        """
        entry = self._of(runner)
        if entry is None or entry.status is not Status.LOADING:
            return []
        smaller = self._smaller(entry) if failures.may_shrink(error) else None
        effects = failures.fail_load(entry, error) if smaller is None else failures.shrink(entry, error, smaller)
        return [*effects, self._stop(entry, "its load failed"), *self._settle(now)]

    def on_exited(self, runner: int, words: str, now: float, untouched: Collection[str] = ()) -> list[Effect]:
        """The process is gone, as asked for or not. `words` says how and with which last lines.

        `untouched` are the requests that it had and of whose answers nobody has heard: they may be tried once more.
        """
        entry = self._of(runner)
        if entry is None:
            return []
        effects = self._mourn(entry, words, now, untouched) if entry.status is not Status.STOPPING else []
        entry.status, entry.info, entry.is_unloading = Status.ABSENT, None, False
        return [*effects, *self._settle(now)]

    def on_hung(self, runner: int, seconds: float, now: float, untouched: Collection[str] = ()) -> list[Effect]:
        """The runner has work and has said nothing for `seconds`: it counts as dead. `untouched` as in on_exited."""
        entry = self._of(runner)
        if entry is None or entry.status is not Status.READY:
            return []
        effects = self._mourn(entry, f"gave no sign of life for {seconds:.0f} s", now, untouched)
        return [*effects, self._stop(entry, "it hangs", is_forced=True), *self._settle(now)]

    def on_released(self, request_id: str, now: float) -> list[Effect]:
        """The request has ended or its client has left, wherever it was. Unknown ids are ignored."""
        for entry in self._entries.values():
            running = entry.in_flight.pop(request_id, None)
            if running is not None:
                entry.mean_seconds += _SMOOTHING * (now - running.since - entry.mean_seconds)
                entry.idle_since = now
                return self._settle(now)
            if any(r.id == request_id for r in entry.waiting):
                entry.waiting = [r for r in entry.waiting if r.id != request_id]
                return self._settle(now)
        return []

    def on_threads(self, num_threads: int, runner: int | None = None) -> list[Effect]:
        """The automatic number of threads is another one now, for all runners or for one."""
        concerned = (entry for entry in self.entries() if runner in (None, entry.runner))
        return [Retune(entry.runner, num_threads) for entry in concerned if entry.retune(num_threads)]

    def on_unload(self, key: str, now: float) -> tuple[bool, list[Effect]]:
        """End the model's runner once it is idle. False when it has none."""
        entry = self._entries.get(key)
        if entry is None or not entry.has_runner:
            return False, []
        if entry.status is Status.LOADING:
            entry.keep_alive = 0.0
        elif entry.status is Status.READY:
            entry.is_unloading = True
        return True, self._settle(now)

    def on_tick(self, now: float) -> list[Effect]:
        """Time has passed: see wake_at."""
        effects: list[Effect] = []
        for entry in self.entries():
            if self._load_timeout is None or entry.status is not Status.LOADING:
                continue
            if now - entry.progress_at >= self._load_timeout:
                effects += failures.fail_load(entry, refusals.load_stalled(entry.name, self._load_timeout))
                effects.append(self._stop(entry, "its load makes no progress", is_forced=True))
        return [*effects, *self._settle(now)]

    def on_drain(self, now: float) -> list[Effect]:
        """No new work from now on; what runs may finish, what waits is refused."""
        self._is_draining = True
        effects: list[Effect] = []
        for entry in self._entries.values():
            effects += [Refuse(r.id, refusals.shutting_down()) for r in entry.waiting]
            entry.waiting.clear()
        return [*effects, *self._settle(now)]

    def on_kill(self, now: float) -> list[Effect]:
        """The time to finish is over: what still runs is refused and all runners end at once."""
        effects = self.on_drain(now)
        for entry in self.entries():
            effects += [Refuse(id, refusals.shutting_down()) for id in entry.in_flight]
            entry.in_flight.clear()
            effects.append(self._stop(entry, "the daemon stops", is_forced=True))
        return effects

    # ---- decisions ----

    def _of(self, runner: int) -> Entry | None:
        return next((e for e in self._entries.values() if e.runner == runner and e.has_runner), None)

    def _settle(self, now: float) -> list[Effect]:
        """Look at everything once more: the only place that grants, loads and stops because of a change."""
        effects: list[Effect] = []
        room = room_of(self.entries(), self._capacity, self._max_models)
        for entry in self._entries.values():
            entry.is_claimed = entry.is_unloading
        for entry in sorted((e for e in self._entries.values() if e.waiting), key=lambda e: self._turn(e, now)):
            if entry.status is Status.READY:
                effects += self._grant(entry, now)
            elif entry.status is Status.ABSENT and entry.crashes.ready_at(now) <= now:
                effects += self._make_resident(entry, room, now)
        for entry in self.entries():
            reason = self._reason_to_stop(entry, now)
            if reason:
                effects.append(self._stop(entry, reason))
        self._forget(now)
        return effects

    def _is_overdue(self, entry: Entry, now: float) -> bool:
        return now - entry.waiting[0].arrived_at >= self._patience

    def _turn(self, entry: Entry, now: float) -> tuple[bool, int, float]:
        head = entry.waiting[0]
        return not self._is_overdue(entry, now), head.priority, head.arrived_at

    def _grant(self, entry: Entry, now: float) -> list[Effect]:
        """Serve all that the loaded options can serve, unless it is the turn of one that they cannot."""
        if entry.differs(entry.waiting[0].wishes) and self._is_overdue(entry, now):
            entry.is_claimed = True
        if entry.is_claimed:
            return []
        served = [r for r in entry.waiting if not entry.differs(r.wishes)]
        entry.waiting = [r for r in entry.waiting if entry.differs(r.wishes)]
        for request in served:
            entry.in_flight[request.id] = Running(request, now)
            if request.keep_alive is not msgspec.UNSET and not entry.is_pinned:
                entry.keep_alive = request.keep_alive
        return [Grant(r.id, entry.runner) for r in served]

    def _make_resident(self, entry: Entry, room: Room, now: float) -> list[Effect]:
        effects = self._make_plan(entry, room)
        if not entry.waiting:
            return effects
        size = entry.plan.size_bytes
        if room.fits_now(size):
            room.take_now(size)
            return [*effects, self._start(entry, now)]
        if not room.fits_soon(size):
            is_overdue = self._is_overdue(entry, now)
            victims = find_victims(self.entries(), size, room, now, can_wait=is_overdue)
            if victims is None and not is_overdue:
                return effects
            for victim in victims or ():
                victim.is_claimed = True
                if victim.is_idle:
                    effects.append(self._stop(victim, f"room is needed for {entry.name}"))
                room.bytes_soon += victim.plan.size_bytes
                room.models_soon += 1
        room.take_soon(size)
        return effects

    def _make_plan(self, entry: Entry, room: Room) -> list[Effect]:
        """Plan for all that wait and for what was served before, or for less if that is too large.

        The plan depends on how much memory is free: without, then with what idle models hold, then with all.
        Refuses those that have become impossible because the machine has less memory than when they came.
        """
        effects: list[Effect] = []
        if entry.fallback is not None:
            entry.plan = entry.fallback
            return effects
        reach, _ = self._reach(entry.key)
        idle_bytes = sum(e.plan.size_bytes for e in self.entries() if e.is_idle and not e.is_pinned)
        while entry.waiting:
            waiting = [r.wishes for r in entry.waiting]
            for wishes in ([*waiting, *entry.wishes], waiting, waiting[:1]):
                for num_bytes in (room.bytes_soon, room.bytes_soon + idle_bytes, reach):
                    entry.plan = self._plan(entry.model, wishes, max(0, num_bytes))
                    if entry.plan.size_bytes <= num_bytes:
                        return effects
            head = entry.waiting.pop(0)
            effects.append(Refuse(head.id, refusals.too_large(head.name, entry.plan, reach)))
        return effects

    def _start(self, entry: Entry, now: float) -> StartLoad:
        self._last_runner += 1
        entry.runner, entry.status = self._last_runner, Status.LOADING
        entry.fraction, entry.progress_at = 0.0, now
        entry.wishes = (_as_wishes(entry.plan.options),)
        entry.is_reduced, entry.fallback = entry.fallback is not None, None
        options, size = entry.plan.options, entry.plan.size_bytes
        return StartLoad(entry.runner, entry.key, entry.name, entry.model, options, size, entry.reason)

    def _reason_to_stop(self, entry: Entry, now: float) -> str:
        if entry.status is Status.LOADING and not entry.waiting:
            return "the daemon stops" if self._is_draining else "nobody waits for it any more"
        if not entry.is_idle:
            return ""
        if self._is_draining:
            return "the daemon stops"
        if entry.is_unloading:
            return "it was told to"
        if entry.waiting and (difference := entry.differs(entry.waiting[0].wishes)):
            return difference
        return "its keep-alive is over" if now >= entry.expires_at(now) else ""

    def _stop(self, entry: Entry, reason: str, *, is_forced: bool = False) -> Stop:
        """With requests waiting this is the first half of a reload; otherwise the model's past is forgotten."""
        entry.status = Status.STOPPING
        if entry.fallback is not None and entry.waiting:
            return Stop(entry.runner, reason, is_forced)
        if entry.waiting and not entry.is_unloading:
            entry.reason = reason
        else:
            entry.keep_alive, entry.wishes, entry.reason = self._stay(entry.model).keep_alive, (), FIRST_REASON
        return Stop(entry.runner, reason, is_forced)

    def _smaller(self, entry: Entry) -> LoadPlan | None:
        """How to try once more what could not be loaded."""
        return None if entry.is_reduced or self._is_draining else self._shrink(entry.model, entry.plan)

    def _mourn(self, entry: Entry, words: str, now: float, untouched: Collection[str]) -> list[Effect]:
        smaller = self._smaller(entry) if entry.status is Status.LOADING else None
        retried = () if self._is_draining else untouched
        return failures.mourn(entry, words, now, untouched=retried, smaller=smaller)

    def _forget(self, now: float) -> None:
        for key, entry in list(self._entries.items()):
            if not (entry.has_runner or entry.waiting):
                entry.fallback = None
            if not (entry.has_runner or entry.waiting or entry.crashes.num_recent(now)):
                del self._entries[key]

    def check_integrity(self) -> None:
        """Raises AssertionError when the state contradicts itself. For tests."""
        ids = [id for e in self._entries.values() for id in _ids(e)]
        assert len(ids) == len(set(ids)), "a request is in two places"
        for entry in self._entries.values():
            assert entry.status is Status.READY or not entry.in_flight, "a request runs without a runner"
        runners = self.entries()
        assert len(runners) <= self._max_models, "too many models are loaded"


def _ids(entry: Entry) -> Iterable[str]:
    return [*entry.in_flight, *(r.id for r in entry.waiting)]


def _as_wishes(options: LoadOptions) -> LoadWishes:
    """What a later load has to offer so that whoever was served by `options` still is."""
    return LoadWishes(num_ctx=options.num_ctx)
