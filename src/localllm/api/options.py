"""Sampling and load options as clients and Modelfiles write them: names, types and defaults are Ollama's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from localllm.config import parse_duration
from localllm.daemon.supervisor import KeepAlive
from localllm.errors import InvalidOption, InvalidRequest
from localllm.store.parameters import BOOLEANS, FLOATS, INTEGERS, OBJECTS, TEXT_LISTS, TEXTS
from localllm.types import KVCacheType, LoadWishes, SamplingParams

_log = logging.getLogger(__name__)

_KV_TYPES: tuple[str, ...] = get_args(KVCacheType)
# llama.cpp compares each breaker with every word of the vocabulary, before the first token.
_MAX_BREAKERS = 16
_MAX_BIASES = 1024
_MIN_NUM_CTX = 4
_MAX_INT = 2**31 - 1
_MAX_SEED = 2**63 - 1
# Longer than anybody lives: taken as forever, because a date that far away cannot be written down.
_FOREVER_SECONDS = 100 * 365 * 86400.0

_KNOWN = INTEGERS | FLOATS | BOOLEANS | TEXT_LISTS | TEXTS | OBJECTS
# Not about sampling or loading: see turn.
_ELSEWHERE = frozenset({"pin", "priority"})
_SAMPLING = frozenset(SamplingParams.__struct_fields__)
_LOAD = frozenset(LoadWishes.__struct_fields__)


def parse_options(
    defaults: Mapping[str, Any], options: Mapping[str, Any], fallbacks: Mapping[str, Any] | None = None
) -> tuple[SamplingParams, LoadWishes]:
    """Typed options: those of a request before those of a Modelfile (`defaults`) before `fallbacks` before Ollama's.

    Unknown names are ignored with a warning. Raises InvalidOption for a value of the wrong type, or one that the
    samplers cannot work with.
    """
    known: dict[str, Any] = {}
    for name, value in {**(fallbacks or {}), **defaults, **options}.items():
        if value is None:
            continue
        if name in _KNOWN:
            known[name] = _typed(name, value)
        elif name not in _ELSEWHERE:
            _log.warning("unknown option %.40r is ignored", name)
    return _sampling(known), _wishes(known)


def _sampling(known: Mapping[str, Any]) -> SamplingParams:
    values = {name: value for name, value in known.items() if name in _SAMPLING}
    for name in ("seed", "num_predict"):
        if values.get(name, 0) < 0:
            del values[name]
    params = SamplingParams(**values)
    _check(params)
    return params


def _check(params: SamplingParams) -> None:
    if params.mirostat not in (0, 1, 2):
        _refuse("mirostat", "0, 1 or 2")
    if params.repeat_penalty <= 0:
        _refuse("repeat_penalty", "more than 0 (1 is none)")
    if params.dry_allowed_length < 0:
        _refuse("dry_allowed_length", "at least 0")
    if len(params.dry_sequence_breakers) > _MAX_BREAKERS:
        _refuse("dry_sequence_breakers", f"of at most {_MAX_BREAKERS} strings")


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
    if name in TEXT_LISTS:
        return _texts(name, value)
    if name == "kv_cache_type":
        return value if value in _KV_TYPES else _refuse(name, f"one of {', '.join(_KV_TYPES)}")
    if name == "logit_bias":
        return _biases(value)
    if name in BOOLEANS:
        return value if isinstance(value, bool) else _refuse(name, "of type boolean")
    if not _is_number(value):
        return _refuse(name, "of type float32" if name in FLOATS else "of type integer")
    return float(value) if name in FLOATS else _integer(name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _integer(name: str, value: float) -> int:
    limit = _MAX_SEED if name == "seed" else _MAX_INT
    return int(value) if -limit <= value <= limit else _refuse(name, f"between {-limit} and {limit}")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        _refuse(name, "of type array")
    if not all(isinstance(text, str) for text in value):
        _refuse(name, "of an array of strings")
    return tuple(text for text in value if text)


def _biases(value: Any) -> dict[int, float]:
    """Token ids, which JSON can only write as strings, and what is added to their logits."""
    if not isinstance(value, dict) or not all(str(token).isdecimal() and _is_number(value[token]) for token in value):
        _refuse("logit_bias", "an object of numbers by token id")
    if len(value) > _MAX_BIASES:
        _refuse("logit_bias", f"for at most {_MAX_BIASES} tokens")
    return {_integer("logit_bias", int(token)): float(bias) for token, bias in value.items()}


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
