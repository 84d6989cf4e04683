"""The header reader: right about good files, and never fooled, slow or greedy with bad ones."""

from __future__ import annotations

import os
import struct
import tracemalloc
from datetime import timedelta
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fixtures.ggufs import (
    ARRAY_VALUE,
    BROKEN,
    STRING_VALUE,
    TEMPLATE,
    header,
    string,
    tensor_entry,
    write_gguf,
)
from tests.fixtures.tiny_models import write_tiny_llama

from localllm.errors import InvalidModelFile
from localllm.store import gguf_reader
from localllm.store.gguf import ArrayInfo, human_number, read_header
from localllm.store.gguf_types import FILE_TYPES, TENSOR_TYPES


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


def test_tensors_and_tokens_are_where_the_gguf_package_finds_them(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.type, t.shape, t.offset, t.size) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape)), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    tokens = theirs.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert ours.read_array("tokenizer.ggml.tokens") == tokens.contents()


def test_long_arrays_are_skipped_and_read_on_demand(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf"))
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArrayInfo)
    assert tokens.length == 3000
    assert header.read_array("tokenizer.ggml.tokens")[2999] == "<token 2999>"
    assert header.read_array("no.such.key") == []


@pytest.mark.parametrize("window", [8, 9, 64, 1000])
def test_values_are_the_same_wherever_the_windows_of_reading_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", template=TEMPLATE)
    expected = read_header(path)
    monkeypatch.setattr(gguf_reader, "_WINDOW_BYTES", window)
    found = read_header(path)
    assert found == expected
    assert found.read_array("tokenizer.ggml.tokens") == expected.read_array("tokenizer.ggml.tokens")


def test_an_array_is_refused_when_the_file_was_cut_after_its_header_was_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    header = read_header(path)
    os.truncate(path, 1000)
    with pytest.raises(InvalidModelFile):
        header.read_array("tokenizer.ggml.tokens")


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (b"", "Q4_0"),
        (string(b"general.file_type") + struct.pack("<II", 4, 15), "Q4_K_M"),
        (string(b"general.file_type") + struct.pack("<II", 4, 9999), "Q4_0"),
    ],
)
def test_the_quantisation_is_the_files_word_or_that_of_most_weights(tmp_path: Path, metadata: bytes, name: str) -> None:
    path = tmp_path / "m.gguf"
    tensors = tensor_entry(b"norm", (32,), 0, 0) + tensor_entry(b"weights", (32, 32), 2, 128)
    path.write_bytes(header(2, 1 if metadata else 0, body=metadata + tensors) + bytes(1024))
    assert read_header(path).file_type == name


def test_the_numbers_of_types_are_those_of_the_gguf_package() -> None:
    for type in gguf.GGMLQuantizationType:
        # The package counts this one, which no file holds, with wider scales than ggml.
        if type.name != "Q8_1":
            assert TENSOR_TYPES[type.value] == (type.name, *gguf.GGML_QUANT_SIZES[type])
    names = {type.value: type.name.partition("_")[2] for type in gguf.LlamaFileType if type.name != "GUESSED"}
    assert {number: FILE_TYPES[number] for number in names} == {
        number: name.removesuffix("_MOE") for number, name in names.items()
    }


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


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("MAX_KEPT_BYTES", STRING_VALUE + string(bytes(600)), "more than 1000 bytes"),
        ("MAX_KEPT_BYTES", ARRAY_VALUE + struct.pack("<IQ", 0, 12) + bytes(12), "more than 1000 bytes"),
        ("MAX_SKIPPED_STRINGS", ARRAY_VALUE + struct.pack("<IQ", 8, 1025) + bytes(8 * 1025), "more than 1000 strings"),
    ],
)
def test_a_file_that_really_holds_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: bytes, reason: str
) -> None:
    monkeypatch.setattr(gguf_reader, limit, 1000)
    path = tmp_path / "m.gguf"
    path.write_bytes(header(num_metadata=2, body=string(b"a") + value + string(b"b") + value))
    with pytest.raises(InvalidModelFile) as caught:
        read_header(path)
    assert reason in caught.value.message


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(InvalidModelFile):
            read_header(path)


_POSITIONS = st.integers(0, 1200)
# One byte anywhere, or a length or count of 8 bytes that is on an edge of some kind.
_CHANGES = st.one_of(
    st.tuples(_POSITIONS, st.binary(min_size=1, max_size=1)),
    st.tuples(
        _POSITIONS,
        st.sampled_from([0, 1, 1025, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]).map(struct.Struct("<Q").pack),
    ),
)


@settings(max_examples=200, deadline=timedelta(seconds=2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(_CHANGES, min_size=1, max_size=8), cut=st.integers(0, 4096))
def test_damaged_headers_are_read_or_refused_and_nothing_else(
    tmp_path: Path, changes: list[tuple[int, bytes]], cut: int
) -> None:
    source = tmp_path / "good.gguf"
    if not source.exists():
        write_gguf(source, template=TEMPLATE)
    data = bytearray(source.read_bytes())
    for position, value in changes:
        data[position : position + len(value)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data[: len(data) - cut])
    try:
        header = read_header(damaged)
    except InvalidModelFile:
        return
    # What was accepted must not fall apart later, whatever types the values have now.
    assert isinstance(header.file_type, str)
    assert isinstance(header.parameter_size, str)
    assert header.key_length + header.num_kv_heads + header.context_length >= 0
    assert isinstance(header.chat_template + header.architecture, str)
    assert all(isinstance(header.read_array(key), list) for key in header.metadata)


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (10**9, "1B"), (7_615_616_512, "7.6B"), (134_515_008, "134.52M"), (6144, "6K"), (10**12, "1T")],
)
def test_numbers_of_parameters_are_printed_as_ollama_does(number: int, text: str) -> None:
    assert human_number(number) == text
