from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fixtures.fake_daemon import FakeDaemon, Reply, not_found
from tests.unit.cli.conftest import Run

SHOWN: dict[str, Any] = {
    "license": "Apache License\n\n   Version 2.0\n\nTERMS AND CONDITIONS",
    "modelfile": "FROM /x",
    "parameters": 'stop                           "<|im_end|>"\ntemperature                    0.2',
    "template": "{{ .Prompt }}",
    "system": "Be brief.",
    "details": {"family": "llama", "parameter_size": "135M", "quantization_level": "Q4_1"},
    "model_info": {
        "general.architecture": "llama",
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
        "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"],
    },
    "tensors": [{"name": "token_embd.weight", "type": "Q8_0", "shape": [576, 49152]}],
    "capabilities": ["completion", "tools"],
}

SECTIONS = """\
  Model
    architecture        llama
    parameters          135M
    context length      8192
    embedding length    576
    quantization        Q4_1

  Capabilities
    completion
    tools

  Parameters
    stop           "<|im_end|>"
    temperature    0.2

"""

TEXTS = """\
  System
    Be brief.

  License
    Apache License
    Version 2.0
    ...

"""


@pytest.fixture(autouse=True)
def shown(daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", Reply(SHOWN))


def test_sections(run: Run, daemon: FakeDaemon) -> None:
    assert run("show", "smollm2").out == SECTIONS + TEXTS
    assert daemon.bodies("/api/show") == [{"model": "smollm2", "verbose": False}]


@pytest.mark.parametrize("flag", ["--verbose", "-v"])
def test_verbose_adds_metadata_and_tensors(run: Run, daemon: FakeDaemon, flag: str) -> None:
    result = run("show", "smollm2", flag)
    assert "    tokenizer.ggml.tokens     [a, b, c, ...+2 more]\n" in result.out
    assert "  Tensors\n    token_embd.weight    Q8_0    [576, 49152]\n" in result.out
    assert daemon.bodies("/api/show") == [{"model": "smollm2", "verbose": True}]


def test_a_projector_has_a_section(run: Run, daemon: FakeDaemon) -> None:
    projector = {
        "general.architecture": "clip",
        "general.parameter_count": 623_000_000,
        "clip.vision.projection_dim": 768,
    }
    daemon.on("POST", "/api/show", Reply({**SHOWN, "projector_info": projector}))
    section = "  Projector\n    architecture    clip\n    parameters      623.00M\n    dimensions      768\n\n"
    assert section in run("show", "m").out


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--license", f"{SHOWN['license']}\n"),
        ("--modelfile", "FROM /x\n"),
        ("--parameters", f"{SHOWN['parameters']}\n"),
        ("--system", "Be brief."),
        ("--template", "{{ .Prompt }}"),
    ],
)
def test_one_part_is_printed_as_it_is(run: Run, flag: str, text: str) -> None:
    assert run("show", "m", flag).out == text


def test_json_is_what_the_daemon_said(run: Run) -> None:
    assert json.loads(run("show", "m", "--json").out) == SHOWN
    assert json.loads(run("show", "m", "--json", "--system").out) == "Be brief."


def test_a_model_that_is_not_here_is_an_error(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("nobody"))
    result = run("show", "nobody")
    assert (result.status, result.out, result.err) == (1, "", "Error: model 'nobody' not found\n")


def test_a_reply_with_little_in_it_is_no_trouble(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", Reply({"details": {"family": "bert"}, "model_info": {}, "capabilities": []}))
    assert run("show", "m").out == "  Model\n    architecture    bert\n\n"
    assert run("show", "m", "--license").out == "\n"
