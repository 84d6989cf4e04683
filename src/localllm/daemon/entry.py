"""PURE: the state that residency keeps of each model."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from localllm.daemon.backoff import CrashHistory
from localllm.daemon.decisions import LoadPlan, Request, differences
from localllm.types import LoadWishes, RunnerInfo

if TYPE_CHECKING:
    from localllm.store.library import StoredModel


FIRST_REASON = "it was asked for"


class Status(enum.Enum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Running:
    """A granted request, and when it was granted."""

    request: Request
    since: float


@dataclass(eq=False)
class Entry:
    """One model: its runner, if there is one, and the requests that have it or wait for it.

    `plan` is that of the current runner, or the one that was last considered. `in_flight` are the granted requests by
    their ids. `is_claimed`: somebody else's turn has come, so nothing more is granted and the
    runner ends when it is idle; `is_unloading` is the same, because it was told to. `wishes` is what the last load was
    for, as long as the next one should serve that too; `reason` is why there is, or has to be, a load.
    `is_pinned`: it never makes room for others. `fallback` is the smaller plan of the load that has to follow one that
    failed; `is_reduced`: so was this one.
    """

    key: str
    name: str
    model: StoredModel
    plan: LoadPlan
    keep_alive: float | None
    is_pinned: bool = False
    status: Status = Status.ABSENT
    runner: int = 0
    info: RunnerInfo | None = None
    reason: str = FIRST_REASON
    fraction: float = 0.0
    progress_at: float = 0.0
    idle_since: float = 0.0
    is_claimed: bool = False
    is_unloading: bool = False
    wishes: tuple[LoadWishes, ...] = ()
    waiting: list[Request] = field(default_factory=list)
    in_flight: dict[str, Running] = field(default_factory=dict)
    fallback: LoadPlan | None = None
    is_reduced: bool = False
    mean_seconds: float = 1.0
    crashes: CrashHistory = field(default_factory=CrashHistory)

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: (r.priority, r.arrived_at))

    @property
    def num_slots(self) -> int:
        return self.info.num_slots if self.info is not None else self.plan.options.num_parallel

    @property
    def has_runner(self) -> bool:
        return self.status is not Status.ABSENT

    @property
    def is_idle(self) -> bool:
        return self.status is Status.READY and not self.in_flight

    @property
    def has_gpu(self) -> bool:
        return self.info is None or self.info.num_gpu_layers > 0 or self.plan.options.num_gpu_layers == 0

    def differs(self, wishes: LoadWishes) -> str:
        return differences(self.plan, wishes, has_gpu=self.has_gpu)

    def retune(self, num_threads: int) -> bool:
        """Take on the automatic number of threads; False when it changes nothing."""
        options = self.plan.options
        if options.has_fixed_threads or options.num_threads == num_threads:
            return False
        options = msgspec.structs.replace(options, num_threads=num_threads, num_threads_batch=num_threads)
        self.plan = replace(self.plan, options=options)
        return True

    def expires_at(self, now: float) -> float:
        """When the runner ends if nobody asks for it any more; infinite means never."""
        if self.keep_alive is None:
            return math.inf
        return (self.idle_since if self.is_idle else now) + self.keep_alive

    def deadlines(self, load_timeout: float | None, patience: float, now: float) -> Iterator[float]:
        """The times at which this model needs a look although nothing has happened."""
        if self.status is Status.LOADING and load_timeout is not None:
            yield self.progress_at + load_timeout
        if self.is_idle:
            yield self.expires_at(now)
        if self.waiting:
            yield from (t for t in (self.crashes.ready_at(now), self.waiting[0].arrived_at + patience) if t > now)
