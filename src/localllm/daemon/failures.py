"""PURE: what becomes of the requests of a runner that died, hangs or could not load its model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from localllm.daemon import refusals
from localllm.daemon.decisions import Effect, LoadPlan, Refuse, Requeue
from localllm.daemon.entry import Entry, Status
from localllm.errors import ErrorInfo, LoadOutOfMemory

# A model that will not be tried again for longer than this refuses at once instead of letting its requests wait.
MAX_BACKOFF_WAIT_SECONDS = 5.0


def mourn(
    entry: Entry, words: str, now: float, *, untouched: Collection[str], smaller: LoadPlan | None
) -> list[Effect]:
    """A runner died: a second death soon after will delay the load that follows.

    Requests whose ids are in `untouched` have heard nothing of their answer and wait for the next runner, each once:
    the death may be the doing of one of them. A load is tried once more, with the plan `smaller` if there is one.
    """
    entry.crashes.note(now, words)
    entry.reason = "its last runner died"
    if entry.status is Status.LOADING:
        error = refusals.died_loading(entry.name, words)
        return shrink(entry, error, smaller) if smaller is not None else fail_load(entry, error)
    can_wait = entry.crashes.ready_at(now) - now <= MAX_BACKOFF_WAIT_SECONDS
    effects: list[Effect] = []
    for id, running in entry.in_flight.items():
        if can_wait and id in untouched and not running.request.is_retry:
            entry.enqueue(replace(running.request, is_retry=True))
            effects.append(Requeue(id))
        else:
            effects.append(Refuse(id, refusals.crashed(entry.name, words)))
    entry.in_flight.clear()
    return effects


def may_shrink(error: ErrorInfo) -> bool:
    """Whether a smaller load could help: a damaged file stays damaged."""
    return error.code == LoadOutOfMemory.code


def shrink(entry: Entry, error: ErrorInfo, smaller: LoadPlan) -> list[Effect]:
    """The next load is by `smaller`; who insists on more than that is refused."""
    entry.reason = f"{smaller.shape}, because with {entry.plan.shape} it could not be loaded: {error.message}"
    entry.plan, entry.wishes, entry.fallback = smaller, (), smaller
    refused = [r for r in entry.waiting if entry.differs(r.wishes)]
    entry.waiting = [r for r in entry.waiting if not entry.differs(r.wishes)]
    return [Refuse(r.id, error) for r in refused]


def fail_load(entry: Entry, error: ErrorInfo) -> list[Effect]:
    """Refuse those that the failed load would have served; others get a load of their own."""
    failed = [r for r in entry.waiting if not entry.differs(r.wishes)]
    entry.waiting = [r for r in entry.waiting if entry.differs(r.wishes)]
    entry.wishes = ()
    return [Refuse(r.id, error) for r in failed]
