"""Options and keep_alive in the forms that clients send."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from localllm.api.options import parse_keep_alive, parse_options
from localllm.errors import InvalidOption, InvalidRequest
from localllm.types import LoadWishes, SamplingParams


def test_nothing_asked_for_is_ollamas_defaults() -> None:
    assert parse_options({}, {}) == (SamplingParams(), LoadWishes())


def test_every_option_finds_its_place() -> None:
    sampling, wishes = parse_options(
        {},
        {
            "temperature": 1,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "typical_p": 0.9,
            "repeat_last_n": -1,
            "repeat_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "seed": 42,
            "num_predict": 9,
            "stop": ["a", "b"],
            "num_ctx": 100,
            "num_batch": 64,
            "num_gpu": 0,
            "main_gpu": 1,
            "num_thread": 3,
            "use_mmap": False,
        },
    )
    assert sampling == SamplingParams(1.0, 5, 0.5, 0.1, 0.9, -1, 1.1, 0.2, 0.3, 42, 9, stop=("a", "b"))
    assert wishes == LoadWishes(100, 64, 0, 1, 3, False)


@pytest.mark.parametrize(
    ("options", "sampling", "wishes"),
    [
        ({"seed": -1, "num_predict": -1}, SamplingParams(), LoadWishes()),
        ({"num_predict": -2}, SamplingParams(), LoadWishes()),
        ({"num_predict": 0, "top_k": 40.9}, SamplingParams(num_predict=0, top_k=40), LoadWishes()),
        ({"num_gpu": -1, "num_thread": 0, "num_ctx": 0}, SamplingParams(), LoadWishes()),
        ({"num_ctx": 1}, SamplingParams(), LoadWishes(num_ctx=4)),
        ({"temperature": None}, SamplingParams(), LoadWishes()),
        ({"seed": 2**40}, SamplingParams(seed=2**40), LoadWishes()),
    ],
)
def test_special_values(options: dict[str, Any], sampling: SamplingParams, wishes: LoadWishes) -> None:
    assert parse_options({}, options) == (sampling, wishes)


def test_options_that_ollama_has_given_up_or_never_had() -> None:
    options = {
        "ignore_eos": True,
        "logit_bias": {"5": -100, "17": 2.5},
        "mirostat": 2,
        "mirostat_tau": 4,
        "mirostat_eta": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["."],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "top_n_sigma": 1,
    }
    sampling, _ = parse_options({}, options)
    expected = {**options, "logit_bias": {5: -100.0, 17: 2.5}, "dry_sequence_breakers": (".",)}
    assert {name: getattr(sampling, name) for name in options} == expected


def test_a_request_goes_before_a_modelfile_before_fallbacks() -> None:
    fallbacks = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.3}
    sampling, _ = parse_options({"temperature": 0.1, "top_p": 0.2}, {"temperature": 0.7}, fallbacks)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.2, 0.3)


def test_unknown_options_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_options({}, {"tfs_z": 1}) == (SamplingParams(), LoadWishes())
    assert "'tfs_z'" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_ctx", "8", "of type integer"),
        ("top_k", True, "of type integer"),
        ("temperature", "hot", "of type float32"),
        ("top_p", True, "of type float32"),
        ("use_mmap", 1, "of type boolean"),
        ("stop", "x", "of type array"),
        ("stop", ["x", 1], "of an array of strings"),
        ("ignore_eos", "yes", "of type boolean"),
        ("mirostat", 3, "0, 1 or 2"),
        ("mirostat_tau", float("inf"), "of type float32"),
        ("repeat_penalty", 0, "more than 0 (1 is none)"),
        ("dry_allowed_length", -1, "at least 0"),
        ("dry_sequence_breakers", [f"{i}" for i in range(17)], "of at most 16 strings"),
        ("logit_bias", [[5, 1]], "an object of numbers by token id"),
        ("logit_bias", {"five": 1}, "an object of numbers by token id"),
        ("logit_bias", {"5": "much"}, "an object of numbers by token id"),
        ("logit_bias", {"-5": 1}, "an object of numbers by token id"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "for at most 1024 tokens"),
        ("num_ctx", 1e12, "between -2147483647 and 2147483647"),
    ],
)
def test_wrong_types_are_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options({}, {name: value})
    assert caught.value.message == f'option "{name}" must be {expected}'


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, msgspec.UNSET),
        (msgspec.UNSET, msgspec.UNSET),
        (0, 0.0),
        ("0", 0.0),
        (1.5, 1.5),
        (300, 300.0),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        (-1, None),
        ("-1", None),
        ("-1s", None),
        (1e300, None),
        ("999999999h", None),
    ],
)
def test_keep_alive(value: Any, seconds: Any) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", 'time: invalid duration "abc"'),
        ("", 'time: invalid duration ""'),
        ("5 m", 'time: invalid duration "5 m"'),
        (True, "Unsupported type: 'bool'"),
        ([], "Unsupported type: 'list'"),
    ],
)
def test_keep_alive_mistakes(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_keep_alive(value)
    assert caught.value.message == message
