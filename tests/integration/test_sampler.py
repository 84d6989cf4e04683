"""How tokens are chosen from logits: the real vocabulary, and logits that the test writes itself."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localllm.errors import InvalidRequest
from localllm.llama.candidates import largest
from localllm.llama.context import Context
from localllm.llama.model import Model
from localllm.llama.sampler import Sampler
from localllm.types import LoadOptions, SamplingParams

NUM_CTX = 256
Row = npt.NDArray[np.float32]


@dataclass
class Bench:
    """A model and a batch of one row, whose logits are the test's to write."""

    model: Model
    context: Context
    row: int

    def write(self, logits: Row) -> None:
        self.context.logits(self.row)[:] = logits

    def random(self, seed: int, *, sharpness: float = 3.0) -> Row:
        return (np.random.default_rng(seed).standard_normal(self.model.num_vocab) * sharpness).astype(np.float32)

    def sampler(
        self, params: SamplingParams, prompt: tuple[int, ...] = (), num_top_logprobs: int | None = None
    ) -> Sampler:
        return Sampler(self.model, params, prompt, NUM_CTX, num_top_logprobs=num_top_logprobs)

    def draw(self, params: SamplingParams, logits: Row, count: int = 1, prompt: tuple[int, ...] = ()) -> list[int]:
        sampler = self.sampler(params, prompt)
        tokens = []
        for _ in range(count):
            self.write(logits)
            tokens.append(sampler.sample(self.context, self.row))
        sampler.close()
        return tokens


@pytest.fixture(scope="module")
def bench(chat_model: Path) -> Iterator[Bench]:
    options = LoadOptions(num_ctx=NUM_CTX, num_parallel=1, num_threads=1, num_threads_batch=1)
    model = Model(str(chat_model), options)
    context = Context(model, options)
    context.batch.clear()
    (row,) = context.batch.add(0, [1], 0, num_outputs=1)
    context.decode()
    yield Bench(model, context, row)


def peaks(bench: Bench, **logits: float) -> Row:
    """All tokens equally unlikely but for those named t<id>."""
    row = np.full(bench.model.num_vocab, -20.0, np.float32)
    for name, logit in logits.items():
        row[int(name[1:])] = logit
    return row


EVERYTHING = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=1.0),
    SamplingParams(top_k=3, min_p=0.05),
    SamplingParams(top_k=100, typical_p=0.8),
    SamplingParams(top_k=1000, top_p=0.95),
    SamplingParams(top_k=0, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repeat_penalty=1.3),
    SamplingParams(repeat_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.4),
    SamplingParams(repeat_penalty=1.2, repeat_last_n=-1),
    SamplingParams(logit_bias={7: 30.0, 100: -5.0}, ignore_eos=True),
    SamplingParams(dry_multiplier=2.0, dry_penalty_last_n=-1),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.05),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(mirostat=1),
    SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3),
]


@pytest.mark.parametrize("params", EVERYTHING, ids=lambda p: ",".join(f"{k}" for k in changed(p)) or "defaults")
def test_choosing_candidates_beforehand_changes_no_token(bench: Bench, params: SamplingParams) -> None:
    params = SamplingParams(**{**changed(params), "seed": 5})
    prompt = (7, 8, 9, 7, 8, 100, 7, 8)
    quick, plain = bench.sampler(params, prompt), bench.sampler(params, prompt)
    plain._num_likeliest = None
    for step in range(60):
        bench.write(bench.random(step % 7))
        expected = plain.sample(bench.context, bench.row)
        bench.write(bench.random(step % 7))
        assert quick.sample(bench.context, bench.row) == expected


def changed(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    return {f: getattr(params, f) for f in params.__struct_fields__ if getattr(params, f) != getattr(default, f)}


@pytest.mark.parametrize("size", [49152, 49153, 1000, 64, 3])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("make", [np.sort, lambda row: np.zeros_like(row), lambda row: row])
def test_the_largest_are_all_found(size: int, count: int, make: Callable[[Row], Row]) -> None:
    row = make(np.random.default_rng(size).standard_normal(size).astype(np.float32))
    found = largest(row, count)
    if found is not None:
        assert sorted(row[found])[-count:] == sorted(row)[-count:]
        assert len(found) <= max(count, size // 64)


def test_greedy_takes_the_likeliest(bench: Bench) -> None:
    logits = bench.random(1)
    assert bench.draw(SamplingParams(temperature=0), logits, 3) == [int(logits.argmax())] * 3


def test_a_seed_repeats_and_another_differs(bench: Bench) -> None:
    logits = bench.random(2, sharpness=1.0)
    first, again, other = (bench.draw(SamplingParams(seed=seed), logits, 20) for seed in (1, 1, 2))
    assert first == again != other
    # The number that llama.cpp itself takes for "random".
    assert bench.draw(SamplingParams(seed=2**32 - 1), logits, 20) == bench.draw(
        SamplingParams(seed=2**32 - 1), logits, 20
    )


def test_penalties_lower_what_was_said(bench: Bench) -> None:
    logits = peaks(bench, t10=5.0, t11=4.5, t12=4.0)
    penalties: tuple[dict[str, Any], ...] = (
        {"repeat_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
    )
    for penalty in penalties:
        assert bench.draw(SamplingParams(temperature=0, **penalty), logits, 3) == [10, 11, 12]
    assert bench.draw(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=1), logits, 3) == [10, 11, 10]
    assert bench.draw(SamplingParams(temperature=0, repeat_penalty=1.5, repeat_last_n=0), logits, 2) == [10, 10]
    assert bench.draw(SamplingParams(temperature=0, repeat_penalty=1.5), logits, 1, prompt=(10,)) == [11]


def test_a_bias_favours_or_bans_a_token(bench: Bench) -> None:
    logits = peaks(bench, t10=5.0, t11=4.0)
    assert bench.draw(SamplingParams(temperature=0, logit_bias={99: 100.0}), logits) == [99]
    assert bench.draw(SamplingParams(temperature=0, logit_bias={10: -100.0}), logits) == [11]


def test_a_bias_for_a_token_that_is_none_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias.*49152.*0 to 49151"):
        bench.sampler(SamplingParams(logit_bias={49152: 1.0}))


def test_ignore_eos_never_ends(bench: Bench) -> None:
    (end, *_) = bench.model.eog_tokens
    logits = peaks(bench, t10=4.0)
    logits[end] = 50.0
    assert bench.draw(SamplingParams(temperature=0), logits) == [end]
    assert bench.draw(SamplingParams(temperature=0, ignore_eos=True), logits) == [10]


def test_dry_breaks_a_repetition_but_not_at_a_breaker(bench: Bench) -> None:
    params = SamplingParams(temperature=0, dry_multiplier=5.0, dry_allowed_length=2)
    text = tuple(bench.model.tokenize("red green blue yellow red green blue", add_special=False))
    yellow = text[3]
    logits = peaks(bench, t10=4.0)
    logits[yellow] = 5.0
    assert bench.draw(params, logits, prompt=text) == [10]
    assert bench.draw(SamplingParams(temperature=0), logits, prompt=text) == [yellow]
    breaking = SamplingParams(
        temperature=0, dry_multiplier=5.0, dry_allowed_length=2, dry_sequence_breakers=(" yellow",)
    )
    assert bench.draw(breaking, logits, prompt=text) == [yellow]


def test_xtc_leaves_out_the_top_choices(bench: Bench) -> None:
    logits = peaks(bench, t10=5.0, t11=4.9, t12=4.8)
    assert set(bench.draw(SamplingParams(seed=1, xtc_probability=1.0, xtc_threshold=0.1), logits, 20)) == {12}


def test_top_n_sigma_keeps_what_stands_out(bench: Bench) -> None:
    logits = bench.random(3)
    logits[10] = logits.max() + 5
    params = SamplingParams(seed=1, top_k=0, top_p=1.0, temperature=50.0, top_n_sigma=0.5)
    assert set(bench.draw(params, logits, 20)) == {10}
    assert len(set(bench.draw(SamplingParams(seed=1, top_k=0, top_p=1.0, temperature=50.0), logits, 20))) > 10


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_aims_at_a_surprise(bench: Bench, version: int) -> None:
    """A low target makes answers predictable, a high one does not."""
    logits = bench.random(4, sharpness=1.5)

    def draw(tau: float) -> int:
        params = SamplingParams(seed=3, temperature=1.0, mirostat=version, mirostat_tau=tau)  # type: ignore[arg-type]
        return len(set(bench.draw(params, logits, 200)[100:]))

    assert draw(1.0) < draw(6.0)


def test_logprobs_are_the_models_own_whatever_is_sampled(bench: Bench) -> None:
    logits = peaks(bench, t10=2.0, t11=2.0, t12=1.0, t13=0.0)
    params = SamplingParams(temperature=0, logit_bias={13: 50.0})
    sampler = bench.sampler(params, num_top_logprobs=3)
    bench.write(logits)
    assert sampler.sample(bench.context, bench.row) == 13
    assert isinstance(sampler.logprobs, collections.deque)
    (entry,) = sampler.logprobs
    total = sum(math.exp(x) for x in (2.0, 2.0, 1.0, 0.0))
    assert entry.piece == bench.model.piece(13, special=True)
    assert entry.logprob == pytest.approx(-math.log(total), abs=1e-3)
    assert [t.piece for t in entry.top] == [bench.model.piece(t, special=True) for t in (10, 11, 12)]
    assert [t.logprob for t in entry.top] == pytest.approx([2 - math.log(total)] * 2 + [1 - math.log(total)], abs=1e-3)


def test_logprobs_of_the_impossible_are_a_number(bench: Bench) -> None:
    logits = np.full(bench.model.num_vocab, -math.inf, np.float32)
    logits[10] = 1.0
    sampler = bench.sampler(SamplingParams(temperature=0), num_top_logprobs=2)
    bench.write(logits)
    sampler.sample(bench.context, bench.row)
    assert sampler.logprobs is not None
    assert [entry.logprob for entry in sampler.logprobs[0].top] == [0.0, -9999.0]
