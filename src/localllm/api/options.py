"""Sampling and load options as clients and Modelfiles write them: names, types and defaults are Ollama's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from localllm.config import parse_duration
from localllm.daemon.supervisor import KeepAlive
from localllm.errors import InvalidOption, InvalidRequest
from localllm.types import LoadWishes, SamplingParams

_log = logging.getLogger(__name__)

_INTEGERS = frozenset(
    {"num_keep", "seed", "num_predict", "top_k", "repeat_last_n", "num_ctx", "num_batch", "num_gpu", "main_gpu"}
    | {"num_thread", "draft_num_predict"}
)
_FLOATS = frozenset(
    {"temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}
)
_MIN_NUM_CTX = 4
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**63 - 1
# Longer than anybody lives: taken as forever, because a date that far away cannot be written down.
_FOREVER_SECONDS = 100 * 365 * 86400.0

_SAMPLING = frozenset(SamplingParams.__struct_fields__)
_LOAD = frozenset(LoadWishes.__struct_fields__)


def parse_options(
    defaults: Mapping[str, Any], options: Mapping[str, Any], fallbacks: Mapping[str, Any] | None = None
) -> tuple[SamplingParams, LoadWishes]:
    """Typed options: those of a request before those of a Modelfile (`defaults`) before `fallbacks` before Ollama's.

    Unknown names are ignored with a warning. Raises InvalidOption for a value of the wrong type.
    """
    known: dict[str, Any] = {}
    for name, value in {**(fallbacks or {}), **defaults, **options}.items():
        if value is None:
            continue
        if name in _INTEGERS or name in _FLOATS or name in ("stop", "use_mmap"):
            known[name] = _typed(name, value)
        else:
            _log.warning("unknown option %.40r is ignored", name)
    return _sampling(known), _wishes(known)


def _sampling(known: Mapping[str, Any]) -> SamplingParams:
    values = {name: value for name, value in known.items() if name in _SAMPLING}
    for name in ("seed", "num_predict"):
        if values.get(name, 0) < 0:
            del values[name]
    return SamplingParams(**values)


def _wishes(known: Mapping[str, Any]) -> LoadWishes:
    """What Ollama writes for "you choose" becomes None."""
    values = {name: value for name, value in known.items() if name in _LOAD}
    if "num_ctx" in values:
        values["num_ctx"] = max(_MIN_NUM_CTX, values["num_ctx"]) if values["num_ctx"] > 0 else None
    for name in ("num_batch", "num_thread"):
        if values.get(name, 1) <= 0:
            del values[name]
    for name in ("num_gpu", "main_gpu"):
        if values.get(name, 0) < 0:
            del values[name]
    return LoadWishes(**values)


def _typed(name: str, value: Any) -> Any:
    if name == "stop":
        return _stops(value)
    if name == "use_mmap":
        return value if isinstance(value, bool) else _refuse(name, "of type boolean")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _FLOATS:
        return float(value) if is_number else _refuse(name, "of type float32")
    return _integer(name, value) if is_number else _refuse(name, "of type integer")


def _integer(name: str, value: float) -> int:
    limit = _MAX_SEED if name == "seed" else _MAX_INT
    return int(value) if -limit <= value <= limit else _refuse(name, f"between {-limit} and {limit}")


def _stops(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        _refuse("stop", "of type array")
    if not all(isinstance(stop, str) for stop in value):
        _refuse("stop", "of an array of strings")
    return tuple(stop for stop in value if stop)


def _refuse(name: str, expected: str) -> Any:
    raise InvalidOption(f'option "{name}" must be {expected}', field=name)


def parse_keep_alive(value: Any) -> KeepAlive:
    """A number of seconds, or a duration such as "5m"; negative means forever. Raises InvalidRequest.

    Numbers in quotes are accepted, which Ollama refuses: clients that read settings from a form send them.
    """
    if value is msgspec.UNSET or value is None:
        return msgspec.UNSET
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidRequest(f"Unsupported type: '{type(value).__name__}'", hint=_DURATION_HINT, field="keep_alive")
    if isinstance(value, str):
        return _parse_duration(value)
    return None if value < 0 or value > _FOREVER_SECONDS else float(value)


_DURATION_HINT = 'Write keep_alive like "5m", 300 or -1.'


def _parse_duration(text: str) -> float | None:
    try:
        seconds = parse_duration(text)
    except InvalidRequest:
        raise InvalidRequest(f'time: invalid duration "{text}"', hint=_DURATION_HINT, field="keep_alive") from None
    return None if seconds is None or seconds > _FOREVER_SECONDS else seconds
