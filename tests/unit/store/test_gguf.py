"""The header reader: right about good files, and never fooled, slow or greedy with bad ones."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fixtures.ggufs import BROKEN, TEMPLATE, write_gguf

from localllm.errors import InvalidModelFile
from localllm.store.gguf import ArrayInfo, human_number, read_header


def test_what_a_model_is(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", template=TEMPLATE))
    assert (header.architecture, header.context_length, header.embedding_length) == ("llama", 2048, 64)
    assert (header.num_layers, header.num_heads, header.num_kv_heads) == (2, 8, 4)
    assert (header.key_length, header.value_length) == (8, 8)
    assert (header.file_type, header.parameter_size, header.num_parameters) == ("F16", "6K", 6144)
    assert header.tensor_bytes == 6144 * 2
    assert header.chat_template == TEMPLATE
    assert (header.special_token("bos"), header.special_token("eot")) == (1, None)
    assert header.pooling_type is None


def test_an_embedding_model_says_how_it_pools(tmp_path: Path) -> None:
    assert read_header(write_gguf(tmp_path / "m.gguf", arch="bert", pooling=1)).pooling_type == 1


def test_long_arrays_are_skipped_and_read_on_demand(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf"))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArrayInfo)
    assert tokens.length == 3000
    assert header.read_array("tokenizer.ggml.tokens")[2999] == "<token 2999>"
    assert header.read_array("no.such.key") == []


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    data, reason = BROKEN[what]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile) as caught:
        read_header(path)
    assert reason in caught.value.message


def test_a_file_that_was_cut_off_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    part = tmp_path / "part.gguf"
    for length in (10, 30, 100, 5000, len(whole) // 2, len(whole) - 1):
        part.write_bytes(whole[:length])
        with pytest.raises(InvalidModelFile):
            read_header(part)


@pytest.mark.parametrize("what", ["2^60 tensors", "string of 2^40 bytes", "array of 2^60 numbers"])
def test_absurd_claims_cost_no_memory(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(BROKEN[what][0])
    tracemalloc.start()
    with pytest.raises(InvalidModelFile):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=8), cut=st.integers(0)
)
def test_damaged_headers_are_read_or_refused_and_nothing_else(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    source = tmp_path / "good.gguf"
    if not source.exists():
        write_gguf(source, template=TEMPLATE)
    data = bytearray(source.read_bytes())
    for position, value in changes:
        data[position] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data[: len(data) - cut % 4096])
    try:
        header = read_header(damaged)
    except InvalidModelFile:
        return
    # What was accepted must not fall apart later, whatever types the values have now.
    assert isinstance(header.file_type, str)
    assert isinstance(header.parameter_size, str)
    assert header.key_length + header.num_kv_heads + header.context_length >= 0
    assert isinstance(header.chat_template + header.architecture, str)


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (10**9, "1B"), (7_615_616_512, "7.6B"), (134_515_008, "134.52M"), (6144, "6K"), (10**12, "1T")],
)
def test_numbers_of_parameters_are_printed_as_ollama_does(number: int, text: str) -> None:
    assert human_number(number) == text
