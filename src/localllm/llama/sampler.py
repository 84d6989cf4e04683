"""How the next token of one sequence is chosen: a chain of llama.cpp's samplers, in the order of its own tools."""

from __future__ import annotations

import collections
import ctypes
import math
import secrets
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np
import numpy.typing as npt

from localllm.errors import InvalidRequest
from localllm.llama.candidates import Candidates, Logits, largest
from localllm.llama.constraint import Constraint
from localllm.llama.context import Context
from localllm.llama.model import Model
from localllm.types import SamplingParams, TokenLogprob

# llama.cpp takes this number for "a random seed".
_RANDOM_SEED = 0xFFFFFFFF
# A look back over more tokens than this makes choosing candidates beforehand slower than looking at all.
_MAX_ADJUSTED = 256
# Candidates of mirostat's first version, as in llama.cpp's tools.
_MIROSTAT_CANDIDATES = 100
# JSON has no infinity; this is what OpenAI says for "not at all".
_MIN_LOGPROB = -9999.0


class Sampler:
    """The sampler chain of one sequence. Belongs to the engine's thread; `close` frees it.

    `logprobs` gets an entry for each sampled token when they are asked for; whoever shows them takes them from there.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
        prompt: Sequence[int],
        num_ctx: int,
        *,
        num_top_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """`prompt` feeds the repetition penalties, which look back over prompt and answer alike.

        Raises InvalidRequest for a logit_bias of a token that the model does not have.
        """
        self.seed = secrets.randbits(32) if params.seed is None else params.seed % _RANDOM_SEED
        self.logprobs: collections.deque[TokenLogprob] | None = (
            None if num_top_logprobs is None else collections.deque()
        )
        self._constraint = constraint
        self._num_top_logprobs = num_top_logprobs or 0
        self._model = model
        self._params = params
        self._is_greedy = params.temperature <= 0
        biases = _biases(model, params)
        self._biased = frozenset(biases)
        penalty_last_n = _look_back(params.repeat_last_n, num_ctx) if _penalises(params) else 0
        dry_last_n = _look_back(params.dry_penalty_last_n, num_ctx) if params.dry_multiplier else 0
        self._recent: collections.deque[int] = collections.deque(maxlen=max(penalty_last_n, dry_last_n))
        # How many of the likeliest tokens the chain looks at, once it has adjusted some; None when at all of them.
        self._num_likeliest = self._count_likeliest()
        self._candidates = Candidates()
        chain_params = lib.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain = lib.llama_sampler_chain_init(chain_params)
        self._add_adjustments(biases, penalty_last_n, dry_last_n)
        if self._is_greedy:
            self._add(lib.llama_sampler_init_greedy())
        elif params.mirostat:
            self._add_mirostat()
        else:
            self._add_distribution()
        for token in prompt[-max(penalty_last_n, dry_last_n) :] if self._recent.maxlen else ():
            self._accept(token)

    def sample(self, context: Context, row: int) -> int:
        """Choose and accept a token from the logits of batch row `row`."""
        logits = context.logits(row)
        logprobs = _log_softmax(logits) if self.logprobs is not None else None
        if self._constraint is not None:
            self._constraint.mask(logits)
        token = self._choose(logits)
        if token is None:
            token = int(lib.llama_sampler_sample(self._chain, context.handle, row))
            self._recent.append(token)
        else:
            self._accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(self._describe(logprobs, token))
        return token

    def close(self) -> None:
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _choose(self, logits: Logits) -> int | None:
        """The token that the chain would choose, found by letting it see only those that have a chance.

        Adjustments move no token but those named in a bias or seen recently. So whatever survives top-k is one of
        these, or one of the k likeliest of the others. None when the chain must see all tokens.
        """
        adjusted = self._biased.union(self._recent)
        if self._num_likeliest is None or len(adjusted) > _MAX_ADJUSTED:
            return None
        if self._is_greedy and not adjusted:
            return int(logits.argmax())
        found = largest(logits, self._num_likeliest + len(adjusted))
        if found is None:
            return None
        if adjusted:
            found = np.union1d(found, np.fromiter(adjusted, np.intp, len(adjusted)))
        return self._candidates.choose(self._chain, logits, found)

    def _accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._chain, token)
        self._recent.append(token)

    def _count_likeliest(self) -> int | None:
        params = self._params
        if self._is_greedy:
            return 1
        if params.mirostat or params.top_n_sigma > 0 or params.top_k <= 0:
            return None
        return params.top_k

    def _add(self, sampler: object) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)

    def _add_adjustments(self, biases: dict[int, float], penalty_last_n: int, dry_last_n: int) -> None:
        """What raises and lowers single tokens before anything is left out. Neutral links are left out."""
        params, num_vocab = self._params, self._model.num_vocab
        if biases:
            array = (lib.llama_logit_bias * len(biases))(*biases.items())
            self._add(lib.llama_sampler_init_logit_bias(num_vocab, len(biases), array))
        if penalty_last_n:
            strengths = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
            self._add(lib.llama_sampler_init_penalties(num_vocab, penalty_last_n, *strengths))
        if dry_last_n:
            breakers = [text.encode() for text in params.dry_sequence_breakers]
            array = (ctypes.c_char_p * len(breakers))(*breakers)
            shape = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, dry_last_n)
            self._add(lib.llama_sampler_init_dry(self._model.vocab, *shape, array, len(breakers)))

    def _add_mirostat(self) -> None:
        params = self._params
        self._add(lib.llama_sampler_init_temp(params.temperature))
        target = (params.mirostat_tau, params.mirostat_eta)
        if params.mirostat == 1:
            shape = (self._model.num_vocab, self.seed, *target, _MIROSTAT_CANDIDATES)
            self._add(lib.llama_sampler_init_mirostat(*shape))
        else:
            self._add(lib.llama_sampler_init_mirostat_v2(self.seed, *target))

    def _add_distribution(self) -> None:
        """Narrow down first, then temperature, then draw. Neutral links are left out."""
        params = self._params
        if params.top_n_sigma > 0:
            self._add(lib.llama_sampler_init_top_n_sigma(params.top_n_sigma))
        if params.top_k > 0:
            self._add(lib.llama_sampler_init_top_k(params.top_k))
        if params.typical_p < 1.0:
            self._add(lib.llama_sampler_init_typical(params.typical_p, 1))
        if params.top_p < 1.0:
            self._add(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(lib.llama_sampler_init_min_p(params.min_p, 1))
        if params.xtc_probability > 0.0:
            self._add(lib.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 1, self.seed))
        self._add(lib.llama_sampler_init_temp(params.temperature))
        self._add(lib.llama_sampler_init_dist(self.seed))

    def _describe(self, logprobs: Logits, token: int) -> TokenLogprob:
        def entry(token: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
            return TokenLogprob(self._model.piece(token, special=True), max(float(logprobs[token]), _MIN_LOGPROB), top)

        return entry(token, tuple(entry(other) for other in _likeliest(logprobs, self._num_top_logprobs)))


def _biases(model: Model, params: SamplingParams) -> dict[int, float]:
    """What is added to the logits of single tokens. Raises InvalidRequest for one that the model does not have."""
    for token in params.logit_bias:
        if not 0 <= token < model.num_vocab:
            raise InvalidRequest(
                f'"logit_bias" names the token {token}, and the model has the tokens 0 to {model.num_vocab - 1}',
                hint="Token ids belong to one model; another has other ones.",
                field="logit_bias",
            )
    forbidden = model.suppressed_tokens | (model.eog_tokens if params.ignore_eos else frozenset())
    return {**params.logit_bias, **dict.fromkeys(forbidden, -math.inf)}


def _penalises(params: SamplingParams) -> bool:
    return params.repeat_penalty != 1.0 or bool(params.presence_penalty) or bool(params.frequency_penalty)


def _look_back(num_tokens: int, num_ctx: int) -> int:
    return num_ctx if num_tokens < 0 else min(num_tokens, num_ctx)


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), np.float32)


def _likeliest(logprobs: Logits, count: int) -> list[int]:
    """The `count` likeliest tokens, the likeliest first."""
    if not count:
        return []
    found: npt.NDArray[np.intp] | None = largest(logprobs, count)
    found = np.arange(len(logprobs)) if found is None else found
    return [int(token) for token in found[np.argsort(-logprobs[found], kind="stable")][:count]]
