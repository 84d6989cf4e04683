"""Every kind of memory gives, whatever was reused, shared or shifted, what a plain decode of the same tokens gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.fixtures import tiny_models
from tests.fixtures.runners import Runner, running

from localllm.llama.context import Context, DecodeResult
from localllm.llama.model import Model
from localllm.protocol.messages import SetThreads, Unload
from localllm.types import ChatRequest, Finished, LoadOptions, SamplingParams

OPTIONS = LoadOptions(num_ctx=256, num_parallel=4, num_threads=1, num_threads_batch=1, kv_ram_bytes=64 << 20)
ANSWER_TOKENS = 12
# Logits of one token differ by this much with the shape of the batch that it is computed in; those of one vocabulary
# spread over about 10.
BOUND = 0.05

KINDS: dict[str, Callable[[Path], Path]] = {
    "attention": tiny_models.write_tiny_llama,
    "sliding window": tiny_models.write_tiny_gemma3,
    "recurrent": tiny_models.write_tiny_mamba,
    "hybrid": tiny_models.write_tiny_lfm2,
    "delta net": tiny_models.write_tiny_qwen3next,
}


@pytest.fixture(params=KINDS, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


class Plain:
    """One sequence at a time, from nothing: the prompt in one batch, then token by token."""

    def __init__(self, path: Path) -> None:
        options = msgspec.structs.replace(OPTIONS, num_ctx=1024, num_parallel=1)
        self._model = Model(str(path), options)
        self._context = Context(self._model, options)

    def doubt(self, tokens: Sequence[int], num_prompt: int) -> float:
        """How much less likely than the likeliest token the answer's are at worst, in logits; 0 if it is greedy."""
        self._context.cut(0, 0)
        worst = 0.0
        chunk, position = list(tokens[:num_prompt]), 0
        for token in tokens[num_prompt:]:
            self._context.batch.clear()
            (row,) = self._context.batch.add(0, chunk, position, num_outputs=1)
            assert self._context.decode() is DecodeResult.OK
            logits = self._context.logits(row)
            allowed = [logits[other] for other in range(len(logits)) if other not in self._model.eog_tokens]
            worst = max(worst, float(max(allowed) - logits[token]))
            position += len(chunk)
            chunk = [token]
        return worst


def tokens(seed: int, count: int) -> list[int]:
    """BOS and random bytes."""
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, 259) for _ in range(count - 1))]


def request(id: str, prompt: list[int], count: int = ANSWER_TOKENS) -> ChatRequest:
    sampling = SamplingParams(temperature=0, num_predict=count, ignore_eos=True)
    return ChatRequest(
        id, prompt="", context_tokens=tuple(prompt), add_special=False, sampling=sampling, return_tokens=True
    )


def ask(runner: Runner, *requests: ChatRequest) -> list[Finished]:
    for each in requests:
        runner.send(each)
    answers = runner.collect(*(each.id for each in requests))
    finished = [answers[each.id].finished for each in requests]
    assert all(f is not None for f in finished), [answers[each.id].error for each in requests]
    return [f for f in finished if f is not None]


def test_what_was_computed_before_changes_no_answer(model: Path) -> None:
    plain = Plain(model)
    whole = tokens(1, 100)
    with running(model, OPTIONS) as runner:

        def check(id: str, prompt: list[int]) -> Finished:
            (finished,) = ask(runner, request(id, prompt))
            assert plain.doubt(finished.tokens, len(prompt)) < BOUND, id
            return finished

        first = check("first", whole)
        assert first.usage.num_cached_tokens == 0
        assert check("again", whole).usage.num_cached_tokens == 99
        grown = [*first.tokens, *tokens(2, 20)[1:]]
        assert check("grown", grown).usage.num_cached_tokens >= 99
        check("shortened", whole[:60])
        check("branched", [*whole[:60], *tokens(3, 40)[1:]])
        for number in range(6):
            check(f"stranger {number}", tokens(10 + number, 90))
        check("after strangers", grown)
        assert check("and again", grown).usage.num_cached_tokens == len(grown) - 1


def test_fifty_requests_at_once_do_not_see_each_other(model: Path) -> None:
    plain = Plain(model)
    common = tokens(1, 80)
    prompts = [[*common, *tokens(2 + number, 10 + number)[1:]] for number in range(25)]
    prompts += [tokens(100 + number, 30 + number) for number in range(25)]
    with running(model, OPTIONS) as runner:
        finished = ask(runner, *(request(str(number), prompt) for number, prompt in enumerate(prompts)))
    for prompt, end in zip(prompts, finished, strict=True):
        assert plain.doubt(end.tokens, len(prompt)) < BOUND


def test_files_outlive_the_process_and_change_no_answer(model: Path, tmp_path: Path) -> None:
    plain = Plain(model)
    options = msgspec.structs.replace(
        OPTIONS, num_ctx=1024, kv_disk_bytes=1 << 30, kv_folder=str(tmp_path), num_parallel=1
    )
    prompt = tokens(1, 600)
    with running(model, options) as runner:
        (first,) = ask(runner, request("first", prompt))
        runner.channel.send(Unload())
    with running(model, options) as runner:
        grown = [*first.tokens, *tokens(2, 20)[1:]]
        (second,) = ask(runner, request("second", grown))
    assert second.usage.num_cached_tokens >= len(prompt) - 1
    assert plain.doubt(second.tokens, len(grown)) < BOUND


def test_a_pool_for_all_slots_gives_the_same_answers(model: Path) -> None:
    plain = Plain(model)
    options = msgspec.structs.replace(OPTIONS, kv_unified=True)
    common = tokens(1, 60)
    prompts = [[*common, *tokens(2 + number, 30)[1:]] for number in range(4)]
    # Four of these have no room beside each other in a pool of 256 cells: some must wait or begin anew.
    prompts += [tokens(20 + number, 110) for number in range(4)]
    with running(model, options) as runner:
        finished = ask(runner, *(request(str(number), prompt, 30) for number, prompt in enumerate(prompts)))
    for prompt, end in zip(prompts, finished, strict=True):
        assert plain.doubt(end.tokens, len(prompt)) < BOUND


def test_an_answer_goes_on_beyond_the_window_only_when_asked(model: Path) -> None:
    plain = Plain(model)
    prompt = tokens(1, 100)
    bounded, shifted = request("bounded", prompt, 400), request("shifted", prompt, 400)
    shifted = msgspec.structs.replace(shifted, shift=True)
    with running(model, OPTIONS) as runner:
        runner.send(shifted)
        runner.send(bounded)
        answers = runner.collect("shifted", "bounded")
        end = answers["bounded"].finished
        assert end is not None
        assert (end.usage.num_output_tokens, end.usage.num_dropped_tokens) == (156, 0)
        assert plain.doubt(end.tokens, len(prompt)) < BOUND
        if model.stem in ("recurrent", "hybrid", "delta net"):
            failure = answers["shifted"].error
            assert failure is not None
            assert failure.error.details == {"field": "shift"}
            return
        beyond = answers["shifted"].finished
        assert beyond is not None
        # Twice 126 of the 252 tokens after the first four made room.
        assert (beyond.usage.num_output_tokens, beyond.usage.num_dropped_tokens) == (400, 252)
        # What is left of it in the memory is no beginning of anything.
        (again,) = ask(runner, request("again", list(beyond.tokens)[:200]))
        assert plain.doubt(again.tokens, 200) < BOUND


def test_the_number_of_threads_may_change_between_two_tokens(model: Path) -> None:
    plain = Plain(model)
    prompt = tokens(1, 50)
    with running(model, OPTIONS) as runner:
        runner.send(request("long", prompt, 150))
        runner.frame()
        for num_threads in (2, 1, 2):
            runner.channel.send(SetThreads(num_threads))
        end = runner.collect("long")["long"].finished
    assert end is not None
    assert plain.doubt(end.tokens, len(prompt)) < BOUND
