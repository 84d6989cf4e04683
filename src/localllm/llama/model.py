"""A loaded model: weights and vocabulary."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

import llama_cpp as lib

from localllm.errors import LoadFailed, LoadOutOfMemory
from localllm.llama import library
from localllm.types import LoadOptions

# How ggml and the C++ library say that there is no memory left, on the machine or on a device.
_NO_MEMORY = re.compile(r"alloc|out of memory|mmap failed: Cannot allocate", re.IGNORECASE)


class Model:
    """Weights, tokeniser and metadata of one GGUF file.

    Safe to share between threads after construction: everything here only reads. Freed by the end of the process, which
    is how a runner ends.
    """

    def __init__(
        self, path: str, options: LoadOptions, on_progress: Callable[[float], None] = lambda _fraction: None
    ) -> None:
        """Load `path`; `on_progress` gets fractions from 0 to 1. Raises LoadFailed with the library's own words."""
        library.init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = options.num_gpu_layers
        params.main_gpu = options.main_gpu
        params.load_mode = lib.LLAMA_LOAD_MODE_AUTO if options.use_mmap else lib.LLAMA_LOAD_MODE_NONE

        def report(fraction: float, _user_data: ctypes.c_void_p) -> bool:
            on_progress(fraction)
            return True

        callback = lib.llama_progress_callback(report)
        params.progress_callback = callback
        self.handle = lib.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            words = library.last_errors() or "no reason given"
            if _NO_MEMORY.search(words):
                raise LoadOutOfMemory(f"llama.cpp could not load the model: {words}", hint="Free some memory.")
            raise LoadFailed(
                f"llama.cpp could not load the model: {words}",
                hint="The file may be damaged, or newer than this llama.cpp: `localllm show` tells its architecture.",
            )
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.num_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self.num_ctx_train = int(lib.llama_model_n_ctx_train(self.handle))
        self.num_layers = int(lib.llama_model_n_layer(self.handle))
        self.num_embedding = int(lib.llama_model_n_embd_out(self.handle))
        self.size_bytes = int(lib.llama_model_size(self.handle))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        count = ctypes.c_int32()
        suppressed = lib.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        self.suppressed_tokens = frozenset(suppressed[: count.value]) if count.value else frozenset()
        self.eog_tokens = frozenset(t for t in range(self.num_vocab) if lib.llama_vocab_is_eog(self.vocab, t))

    @property
    def pooling_type(self) -> int | None:
        """llama.cpp's number of how the model sums up its input; None for one that was made to generate text."""
        architecture = self.metadata("general.architecture")
        value = self.metadata(f"{architecture}.pooling_type")
        if value is None and self.metadata(f"{architecture}.attention.causal") == "false":
            return int(lib.LLAMA_POOLING_TYPE_NONE)
        return int(value) if value is not None else None

    def metadata(self, key: str) -> str | None:
        """A value of the file's header that is no list, as text."""
        buffer = ctypes.create_string_buffer(256)
        size = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    @property
    def chat_template(self) -> str:
        """The Jinja source inside the model file, or "" when it has none."""
        source = lib.llama_model_chat_template(self.handle, None)
        return "" if source is None else str(source.decode("utf-8", "replace"))

    @property
    def bos_text(self) -> str:
        return self._special_text(lib.llama_vocab_bos(self.vocab))

    @property
    def eos_text(self) -> str:
        return self._special_text(lib.llama_vocab_eos(self.vocab))

    def infill(self, prefix: str, suffix: str) -> str | None:
        """The prompt for what belongs between the two; None for a model that has not learnt to fill in."""
        marks = [f(self.vocab) for f in (lib.llama_vocab_fim_pre, lib.llama_vocab_fim_suf, lib.llama_vocab_fim_mid)]
        if any(mark < 0 for mark in marks):
            return None
        before, between, middle = map(self._special_text, marks)
        return f"{before}{prefix}{between}{suffix}{middle}"

    def _special_text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`, control tokens recognised. `add_special` puts BOS or EOS where the model wants them."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            tokens = (lib.llama_token * capacity)()
            count = lib.llama_tokenize(self.vocab, data, len(data), tokens, capacity, add_special, True)
            if count >= 0:
                return list(tokens[:count])
            assert -count > capacity, "the tokeniser refused a buffer that it had asked for"
            capacity = -count

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """The tokens by which a model for reranking is asked how well `document` answers `query`."""
        template = lib.llama_model_chat_template(self.handle, b"rerank")
        if template is not None:
            text = template.decode("utf-8", "replace")
            parts = {"{query}": query, "{document}": document}
            filled = "".join(parts.get(part, part) for part in re.split(r"({query}|{document})", text))
            return self.tokenize(filled, add_special=False)
        bos, eos, sep = (
            int(get(self.vocab)) for get in (lib.llama_vocab_bos, lib.llama_vocab_eos, lib.llama_vocab_sep)
        )
        end = [eos if eos >= 0 else sep] if lib.llama_vocab_get_add_eos(self.vocab) else []
        return [
            *([bos] if lib.llama_vocab_get_add_bos(self.vocab) else []),
            *self.tokenize(query, add_special=False),
            *end,
            *([sep] if lib.llama_vocab_get_add_sep(self.vocab) else []),
            *self.tokenize(document, add_special=False),
            *end,
        ]

    def piece(self, token: int, *, special: bool) -> bytes:
        """The bytes that `token` stands for, which need not be whole characters. Control tokens only if `special`."""
        key = (token, special)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._read_piece(token, special)
        return piece

    def _read_piece(self, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)
