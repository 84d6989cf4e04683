"""PARAMETERs of a Modelfile: their types, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.errors import InvalidRequest
from localllm.store.parameters import parameter_text, typed_parameters


def typed(*pairs: tuple[str, str]) -> dict[str, Any]:
    return typed_parameters(pairs, lambda text: pytest.fail(text))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num_ctx", "4096", 4096),
        ("seed", "-1", -1),
        ("temperature", "0.8", 0.8),
        ("temperature", "1", 1),
        ("top_p", "1e-3", 0.001),
        ("top_p", ".5", 0.5),
        ("use_mmap", "true", True),
        ("use_mmap", "F", False),
        ("stop", "<|eot|>", ["<|eot|>"]),
        ("mirostat", "2", 2),
        ("kv_cache_type", "q8_0", "q8_0"),
        ("logit_bias", '{"5": -1}', {"5": -1}),
    ],
)
def test_types(name: str, text: str, value: Any) -> None:
    (found,) = typed((name, text)).values()
    assert (found, type(found)) == (value, type(value))


def test_stops_add_up_and_of_others_the_last_counts() -> None:
    pairs = [("stop", "a"), ("top_k", "1"), ("stop", "b"), ("top_k", "2")]
    assert typed(*pairs) == {"stop": ["a", "b"], "top_k": 2}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("num_ctx", "x", "invalid int value [x]"),
        ("num_ctx", "4.5", "invalid int value [4.5]"),
        ("num_ctx", "1_000", "invalid int value [1_000]"),
        ("num_ctx", "99999999999999999999", "invalid int value [99999999999999999999]"),
        ("temperature", "warm", "invalid float value [warm]"),
        ("temperature", "nan", "invalid float value [nan]"),
        ("use_mmap", "yes", "invalid bool value [yes]"),
        ("temprature", "1", "unknown parameter 'temprature'"),
        ("tfs_z", "1", "unknown parameter 'tfs_z'"),
    ],
)
def test_what_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        typed((name, text))
    assert caught.value.message == message


def test_deprecated_ones_are_skipped_with_a_warning() -> None:
    warnings: list[str] = []
    assert typed_parameters([("low_vram", "true"), ("f16_kv", "nonsense"), ("top_k", "1")], warnings.append) == {
        "top_k": 1
    }
    assert warnings == ["parameter low_vram is deprecated and skipped", "parameter f16_kv is deprecated and skipped"]


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (1.0, "1"), (0.8, "0.8"), (True, "true"), ("<a>", "<a>"), ({"5": -1}, '{"5": -1}')]
)
def test_values_are_written_as_they_are_read(value: Any, text: str) -> None:
    assert parameter_text(value) == text
