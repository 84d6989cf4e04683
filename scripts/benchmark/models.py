"""The models that are measured: SmolLM2 in two quantisations, and one of random weights in the shape of a 1B Llama."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from localllm.store.library import ModelStore

_QUANTIZE = (
    "import sys, llama_cpp as lib; p = lib.llama_model_quantize_default_params();"
    "p.ftype = getattr(lib, 'LLAMA_FTYPE_MOSTLY_' + sys.argv[3]); p.allow_requantize = True;"
    "sys.exit(lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
)


def model_file(cache: Path, name: str) -> Path:
    """The file of "smollm2:Q4_0", "smollm2:Q4_K_M" or "random-1b:Q4_K_M", made once."""
    family, quantisation = name.split(":")
    target = cache / f"{family}-{quantisation}.gguf"
    if not target.exists():
        source = _smollm2(cache)
        if family == "random-1b":
            source = _random_llama(cache, source)
        partial = target.with_suffix(".partial")
        command = [sys.executable, "-c", _QUANTIZE, str(source), str(partial), quantisation]
        subprocess.run(command, check=True, capture_output=True)
        partial.rename(target)
        if family == "random-1b":
            source.unlink()
    return target


def _smollm2(cache: Path) -> Path:
    async def pull() -> None:
        async for event in store.pull("smollm2"):
            if not event.total:
                print(event.status, file=sys.stderr)

    store = ModelStore(cache / "models")
    asyncio.run(pull())
    return store.resolve("smollm2").model_path


def _random_llama(cache: Path, tokenizer: Path) -> Path:
    """Llama 3.2 1B's shape with SmolLM2's vocabulary, padded to 128,256 tokens."""
    width, heads, kv_heads, layers, feed_forward, vocabulary = 2048, 32, 8, 16, 8192, 128_256
    path = cache / "random-1b.f16.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"context_length": 8192, "embedding_length": width, "block_count": layers}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(width // heads)
    _copy_tokenizer(gguf.GGUFReader(tokenizer), writer, vocabulary)
    rng = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float16]:
        values: npt.NDArray[np.float16] = (
            rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        ).astype(np.float16)
        return values

    kv_width = width // heads * kv_heads
    writer.add_tensor("token_embd.weight", matrix(vocabulary, width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{block}.ffn_norm.weight", np.ones(width, np.float32))
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", kv_width, width),
            ("attn_v", kv_width, width),
            ("attn_output", width, width),
            ("ffn_gate", feed_forward, width),
            ("ffn_up", feed_forward, width),
            ("ffn_down", width, feed_forward),
        ):
            writer.add_tensor(f"{block}.{name}.weight", matrix(rows, columns))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, vocabulary: int) -> None:
    fields = {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    tokens = list(fields["tokenizer.ggml.tokens"])
    types = list(fields["tokenizer.ggml.token_type"])
    padding = vocabulary - len(tokens)
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    if "tokenizer.ggml.pre" in fields:
        writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(padding)])
    writer.add_token_types(types + [int(gguf.TokenType.UNUSED)] * padding)
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(fields["tokenizer.chat_template"])
