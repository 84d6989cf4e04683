"""What is told of a model in memory, put together from residency's entry and the link to its runner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Literal

from localllm.daemon.entry import Entry, Status
from localllm.daemon.link import RunnerLink
from localllm.types import EngineStats, LoadOptions, RunnerInfo

if TYPE_CHECKING:
    from localllm.store.library import StoredModel

State = Literal["loading", "ready", "stopping"]


@dataclass(frozen=True)
class ResidentModel:
    """One model in memory, or on its way in or out.

    `info` is known once it is ready. `num_queued` counts the requests beyond those that it decodes. `expires_at` is
    None for "never"; while the model is busy it is when it would end if nothing else came. `size_bytes` is an estimate
    and `fraction` how much of a load is done. `reason` says why it was loaded. `step_age` is how long ago a busy one
    finished its last step, in seconds.
    """

    model: StoredModel
    state: State
    info: RunnerInfo | None
    options: LoadOptions
    num_in_flight: int
    num_queued: int
    expires_at: datetime | None
    pid: int | None
    size_bytes: int
    fraction: float
    reason: str
    step_age: float | None = None
    is_pinned: bool = False
    stats: EngineStats | None = None


def describe(entry: Entry, link: RunnerLink | None, now: float) -> ResidentModel:
    """`now` is residency's clock."""
    states: dict[Status, State] = {Status.LOADING: "loading", Status.STOPPING: "stopping", Status.READY: "ready"}
    remaining = entry.expires_at(now) - now
    expires_at = None if math.isinf(remaining) else datetime.now(timezone.utc) + timedelta(seconds=remaining)
    num_running = min(len(entry.in_flight), entry.num_slots)
    return ResidentModel(
        model=entry.model,
        state="stopping" if entry.is_unloading else states[entry.status],
        info=entry.info,
        options=entry.plan.options,
        num_in_flight=num_running,
        num_queued=len(entry.in_flight) + len(entry.waiting) - num_running,
        expires_at=expires_at,
        pid=link.process.pid if link is not None and link.process is not None else None,
        size_bytes=entry.plan.size_bytes,
        fraction=entry.fraction if entry.status is Status.LOADING else 1.0,
        reason=entry.reason,
        step_age=link.silent_seconds if link is not None else None,
        is_pinned=entry.is_pinned,
        stats=link.stats if link is not None else None,
    )
