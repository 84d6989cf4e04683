"""Vectors instead of text: a context whose every decode sums up whole inputs."""

from __future__ import annotations

import llama_cpp as lib
import numpy as np
import numpy.typing as npt

from localllm.errors import LoadOutOfMemory
from localllm.llama import library
from localllm.llama.context import FLASH, Batch, DecodeError
from localllm.llama.model import Model
from localllm.types import LoadOptions, Pooling

Vector = npt.NDArray[np.float32]

# Tokens of several inputs that are computed together. Each attends to all of a batch before what is not its own is
# masked, so that more of them cost more each.
PACKED_TOKENS = 512
MAX_PACKED_INPUTS = 64
# A model that generates computes logits for each token along with its vector, and their memory.
_MAX_GENERATOR_TOKENS = 2048

_POOLING = {
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
}


def max_input_tokens(model: Model, options: LoadOptions) -> int:
    """How long one input may be: it has to fit the window, and one micro-batch."""
    limit = min(options.num_ctx, model.num_ctx_train or options.num_ctx)
    return limit if model.pooling_type is not None else min(limit, _MAX_GENERATOR_TOKENS)


def is_reranker(model: Model) -> bool:
    return model.pooling_type == int(lib.LLAMA_POOLING_TYPE_RANK)


class Embedder:
    """Belongs to one thread. Inputs that are computed together do not see each other."""

    def __init__(self, model: Model, options: LoadOptions, pooling: Pooling | None) -> None:
        """`pooling` None takes the model's own, or the mean where it names none. Raises LoadOutOfMemory."""
        capacity = max(max_input_tokens(model, options), PACKED_TOKENS)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = capacity
        params.n_seq_max = MAX_PACKED_INPUTS
        params.n_threads = params.n_threads_batch = options.num_threads_batch
        params.flash_attn_type = FLASH[options.flash_attention]
        params.kv_unified = True
        params.embeddings = True
        params.no_perf = True
        own = model.pooling_type
        if pooling is not None or own == lib.LLAMA_POOLING_TYPE_NONE:
            params.pooling_type = _POOLING[pooling or "mean"]
        self._handle = lib.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise LoadOutOfMemory(
                f"llama.cpp could not allocate a context for {capacity} tokens: "
                f"{library.last_errors() or 'no reason given'}",
                hint="Lower num_ctx.",
            )
        ranks = is_reranker(model)
        self._width = int((lib.llama_model_n_cls_out if ranks else lib.llama_model_n_embd_out)(model.handle))
        self._memory = lib.llama_get_memory(self._handle)
        self._batch = Batch(capacity)

    def set_threads(self, num_threads: int) -> None:
        lib.llama_set_n_threads(self._handle, num_threads, num_threads)

    def compute(self, inputs: list[list[int]]) -> list[Vector]:
        """A vector for each input, as the model gives it. Raises DecodeError.

        There are at most MAX_PACKED_INPUTS, of PACKED_TOKENS together; or one, of what max_input_tokens says.
        """
        if self._memory:
            lib.llama_memory_clear(self._memory, False)
        self._batch.clear()
        for index, tokens in enumerate(inputs):
            self._batch.add(index, tokens, 0, num_outputs=len(tokens))
        self._batch.native.n_tokens = self._batch.num_tokens
        code = lib.llama_decode(self._handle, self._batch.native)
        if code != 0:
            raise DecodeError(f"llama_decode returned {code}: {library.last_errors()}")
        return [self._vector(index) for index in range(len(inputs))]

    def _vector(self, index: int) -> Vector:
        pointer = lib.llama_get_embeddings_seq(self._handle, index)
        assert pointer, "llama.cpp gave no vector for an input"
        return np.array(pointer[: self._width], np.float32)
