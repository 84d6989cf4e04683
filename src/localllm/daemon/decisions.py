"""What residency is told and what it answers: plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from localllm.errors import ErrorInfo
from localllm.types import LoadOptions, LoadWishes

if TYPE_CHECKING:
    from localllm.store.library import StoredModel


@dataclass(frozen=True)
class LoadPlan:
    """How a model would be loaded. `size_bytes` is the estimate of all the memory that its runner takes.

    `num_ctx_max` is the longest window that makes sense for the model; longer wishes count as this one.
    """

    options: LoadOptions
    size_bytes: int
    num_ctx_max: int
    num_layers: int = 0

    @property
    def shape(self) -> str:
        """Slots and window, for people."""
        return f"{self.options.num_parallel} × {self.options.num_ctx} tokens"


@dataclass(frozen=True)
class Stay:
    """How long an idle model stays, in seconds (None: for ever), and whether it may be sent away for another one."""

    keep_alive: float | None
    is_pinned: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """Somebody wants a model. `key` is equal for all names of the same weights; `name` is for messages.

    `arrived_at` is in seconds of residency's clock. `keep_alive` is in seconds, None for ever, UNSET for "as it is".
    `is_retry`: a runner has died under it before.
    """

    id: str
    key: str
    name: str
    model: StoredModel
    wishes: LoadWishes
    keep_alive: float | msgspec.UnsetType | None
    arrived_at: float
    priority: int = 0
    is_retry: bool = False


@dataclass(frozen=True)
class StartLoad:
    """Start runner number `runner` and let it load. Answered by on_loaded, on_load_failed or on_exited."""

    runner: int
    key: str
    name: str
    model: StoredModel
    options: LoadOptions
    size_bytes: int
    reason: str


@dataclass(frozen=True)
class Grant:
    """The request may go to the runner. Answered by on_released, in any case."""

    request_id: str
    runner: int


@dataclass(frozen=True)
class Refuse:
    """The request has ended with an error, before or after it was granted. Nothing more is to be said about it."""

    request_id: str
    error: ErrorInfo


@dataclass(frozen=True)
class Requeue:
    """The request's runner died before it said a word about it: it waits again, for another Grant or a Refuse."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """End the runner; `is_forced` means without giving it time. Answered by on_exited."""

    runner: int
    reason: str
    is_forced: bool = False


@dataclass(frozen=True)
class Retune:
    """Let the runner compute with so many threads. Needs no answer."""

    runner: int
    num_threads: int


Effect = StartLoad | Grant | Refuse | Requeue | Stop | Retune


def differences(plan: LoadPlan, wishes: LoadWishes, *, has_gpu: bool = True) -> str:
    """Why a model that was loaded by `plan` cannot serve `wishes`, in words; empty when it can.

    A smaller window is served by a larger one. `num_batch` and `use_mmap` change how fast a load or a prompt is, never
    an answer: they count when a model is loaded anyway and are no reason to load it again. Without a GPU, neither do
    wishes about one.
    """
    options = plan.options
    if wishes.num_ctx is not None and min(wishes.num_ctx, plan.num_ctx_max) > options.num_ctx:
        return f"num_ctx {wishes.num_ctx} is more than the loaded {options.num_ctx}"
    if wishes.num_thread and wishes.num_thread != options.num_threads:
        return f"num_thread {wishes.num_thread} is not the loaded {options.num_threads}"
    if wishes.kv_cache_type and wishes.kv_cache_type != options.kv_cache_type:
        return f"kv_cache_type {wishes.kv_cache_type} is not the loaded {options.kv_cache_type}"
    if not has_gpu:
        return ""
    is_explicit = wishes.num_gpu is not None and wishes.num_gpu >= 0
    if is_explicit and gpu_layers(wishes.num_gpu, plan.num_layers) != options.num_gpu_layers:
        return f"num_gpu {wishes.num_gpu} is not the loaded {options.num_gpu_layers}"
    if wishes.main_gpu is not None and wishes.main_gpu != options.main_gpu:
        return f"main_gpu {wishes.main_gpu} is not the loaded {options.main_gpu}"
    return ""


def gpu_layers(wish: int | None, num_layers: int) -> int:
    """Layers for a GPU; -1 means all of them: asked for, left open, or more than there are (with the output layer)."""
    return -1 if wish is None or wish < 0 or wish > num_layers else wish
