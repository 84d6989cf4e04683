"""The words of every refusal, in one place, and the numbers behind them."""

from __future__ import annotations

import math

from localllm.daemon.decisions import LoadPlan
from localllm.errors import ErrorInfo, LoadFailed, ModelTooLarge, Overloaded, QueueFull, RunnerCrashed, ShuttingDown

MAX_RETRY_SECONDS = 60


def too_large(name: str, plan: LoadPlan, capacity: int) -> ErrorInfo:
    options = plan.options
    return ModelTooLarge(
        f"{name} needs about {_gib(plan.size_bytes)} of memory with {options.num_parallel} × {options.num_ctx} tokens "
        f"of context, and there are {_gib(capacity)} for all models together",
        hint="Take a smaller quantisation, a smaller num_ctx (LOCALLLM_CONTEXT_LENGTH) or fewer slots "
        "(LOCALLLM_NUM_PARALLEL).",
        required_bytes=plan.size_bytes,
        available_bytes=capacity,
        num_ctx=options.num_ctx,
        num_parallel=options.num_parallel,
    ).info()


def all_pinned(name: str, max_models: int) -> ErrorInfo:
    return ModelTooLarge(
        f"{name} cannot be loaded: all {max_models} places are taken by pinned models",
        hint="Stop one of them, or raise LOCALLLM_MAX_LOADED_MODELS.",
    ).info()


def queue_full(name: str, max_queue: int, seconds_per_place: float) -> ErrorInfo:
    """The text is the one that clients of Ollama look for, two spaces and all."""
    return QueueFull(
        "server busy, please try again.  maximum pending requests exceeded",
        hint=f"{max_queue} requests wait for {name} already; LOCALLLM_MAX_QUEUE allows more.",
        retry_after=max(1, min(MAX_RETRY_SECONDS, math.ceil(seconds_per_place))),
        max_queue=max_queue,
    ).info()


def shutting_down() -> ErrorInfo:
    return ShuttingDown("the daemon is stopping", hint="Try again when it is back.", retry_after=5).info()


def crash_loop(name: str, num_crashes: int, delay: float, last_words: str) -> ErrorInfo:
    seconds = math.ceil(delay)
    return Overloaded(
        f"the runner of {name} died {num_crashes} times in a short while (the last one {last_words}); "
        f"it will be started again in {seconds} s",
        hint="The daemon's log has the whole story; a smaller num_ctx helps if memory ran out.",
        retry_after=seconds,
    ).info()


def load_stalled(name: str, seconds: float) -> ErrorInfo:
    return LoadFailed(
        f"loading {name} made no progress for {seconds:.0f} s and was given up",
        hint="LOCALLLM_LOAD_TIMEOUT allows more, for a slow disk.",
    ).info()


def died_loading(name: str, words: str) -> ErrorInfo:
    return LoadFailed(
        f"the runner of {name} {words} while it loaded the model",
        hint="The daemon's log may say more; a damaged file can be repaired by pulling the model again.",
    ).info()


def crashed(name: str, words: str) -> ErrorInfo:
    return RunnerCrashed(
        f"the runner of {name} {words} while it answered",
        hint="Send the request again: the model will be loaded anew.",
    ).info()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
