"""The options of sampling and loading by their names and types, and how a Modelfile writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from localllm.errors import InvalidRequest

INTEGERS = frozenset(
    {"num_keep", "seed", "num_predict", "top_k", "repeat_last_n", "num_ctx", "num_batch", "num_gpu", "main_gpu"}
    | {"num_thread", "draft_num_predict", "mirostat", "dry_allowed_length", "dry_penalty_last_n"}
)
FLOATS = frozenset(
    {"temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}
    | {"mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "xtc_probability", "xtc_threshold"}
    | {"top_n_sigma"}
)
BOOLEANS = frozenset({"use_mmap", "ignore_eos"})
TEXT_LISTS = frozenset({"stop", "dry_sequence_breakers"})
TEXTS = frozenset({"kv_cache_type"})
OBJECTS = frozenset({"logit_bias"})
# They no longer mean anything, and old Modelfiles have them.
DEPRECATED = frozenset({"penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock"})

_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_TRUE, _FALSE = {"1", "t", "T", "TRUE", "true", "True"}, {"0", "f", "F", "FALSE", "false", "False"}
_MAX_INT = 2**63 - 1


def typed_parameters(pairs: Iterable[tuple[str, str]], warn: Callable[[str], None]) -> dict[str, Any]:
    """The values of PARAMETER instructions: a list's add up, of others the last one counts.

    `warn` is told of each that is skipped because it has no meaning any more. Raises InvalidRequest in Ollama's words.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in DEPRECATED:
            warn(f"parameter {name} is deprecated and skipped")
        elif name in TEXT_LISTS:
            values[name] = [*values.get(name, []), text]
        else:
            values[name] = _typed(name, text)
    return values


def _typed(name: str, text: str) -> Any:
    if name in INTEGERS:
        if _INTEGER.fullmatch(text) and abs(number := int(text)) <= _MAX_INT:
            return number
        raise _invalid("int", name, text)
    if name in FLOATS:
        if _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
            return int(value) if value.is_integer() else value
        raise _invalid("float", name, text)
    if name in BOOLEANS:
        if text in _TRUE | _FALSE:
            return text in _TRUE
        raise _invalid("bool", name, text)
    if name in OBJECTS:
        return _object(name, text)
    if name in TEXTS:
        return text
    raise InvalidRequest(f"unknown parameter '{name}'", hint="docs/modelfile.md lists them.", field=name)


def _object(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _invalid("object", name, text)
    return value


def _invalid(kind: str, name: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"invalid {kind} value [{text}]", hint=f"It is the value of PARAMETER {name}.", field=name)


def each_parameter(parameters: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Names and values in the order of names; a list has an entry for each of its items."""
    for name, value in sorted(parameters.items()):
        for item in value if isinstance(value, list | tuple) else [value]:
            yield name, item


def parameter_text(value: Any) -> str:
    """A value as a Modelfile writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False)
