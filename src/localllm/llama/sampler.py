"""How the next token of one sequence is chosen: a chain of llama.cpp's samplers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import llama_cpp as lib

from localllm.llama.context import Context
from localllm.types import SamplingParams


class Sampler:
    """The sampler chain of one sequence. Belongs to the engine's thread; `close` frees it."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], num_ctx: int) -> None:
        """`prompt` feeds the repetition penalties, which look back over prompt and answer alike."""
        self.seed = secrets.randbits(32) if params.seed is None else params.seed & 0xFFFFFFFF
        chain_params = lib.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain = lib.llama_sampler_chain_init(chain_params)
        look_back = num_ctx if params.repeat_last_n < 0 else params.repeat_last_n
        self._add_penalties(params, look_back)
        if params.temperature <= 0:
            self._add(lib.llama_sampler_init_greedy())
        else:
            self._add_distribution(params)
        for token in prompt[-look_back:] if self._penalises(params, look_back) else ():
            lib.llama_sampler_accept(self._chain, token)

    def sample(self, context: Context, index: int) -> int:
        """Choose and accept a token from the logits of batch row `index`."""
        return int(lib.llama_sampler_sample(self._chain, context.handle, index))

    def close(self) -> None:
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    @staticmethod
    def _penalises(params: SamplingParams, look_back: int) -> bool:
        neutral = params.repeat_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty
        return look_back > 0 and not neutral

    def _add(self, sampler: object) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)

    def _add_penalties(self, params: SamplingParams, look_back: int) -> None:
        if self._penalises(params, look_back):
            self._add(
                lib.llama_sampler_init_penalties(
                    look_back, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
                )
            )

    def _add_distribution(self, params: SamplingParams) -> None:
        """llama.cpp's own order: narrow down first, then temperature, then draw. Neutral links are left out."""
        if params.top_k > 0:
            self._add(lib.llama_sampler_init_top_k(params.top_k))
        if params.typical_p < 1.0:
            self._add(lib.llama_sampler_init_typical(params.typical_p, 1))
        if params.top_p < 1.0:
            self._add(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(lib.llama_sampler_init_min_p(params.min_p, 1))
        self._add(lib.llama_sampler_init_temp(params.temperature))
        self._add(lib.llama_sampler_init_dist(self.seed))
