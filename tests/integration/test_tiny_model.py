"""The small model that other tests may run: llama.cpp has to accept what the builder writes."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.ggufs import TEMPLATE
from tests.fixtures.tiny_models import write_tiny_llama

from localllm.llama.model import Model
from localllm.store.gguf import read_header
from localllm.types import LoadOptions


def test_llama_cpp_and_the_header_reader_agree_on_it(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    model, header = (
        Model(str(path), LoadOptions(num_ctx=64, num_parallel=1, num_threads=1, num_threads_batch=1)),
        read_header(path),
    )
    assert (model.num_layers, model.num_ctx_train) == (header.num_layers, header.context_length) == (2, 256)
    assert model.chat_template == header.chat_template == TEMPLATE
    assert model.size_bytes == header.tensor_bytes
    assert model.num_vocab == len(header.read_array("tokenizer.ggml.tokens"))
