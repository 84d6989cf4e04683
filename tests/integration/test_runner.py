"""The real runner on the real model, spoken to as the daemon does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.fixtures.ggufs import write_gguf
from tests.fixtures.runners import OPTIONS, Runner, chat, raw, running

from localllm.protocol import messages as m
from localllm.protocol.messages import Cancel
from localllm.types import ChatRequest, SamplingParams


@pytest.fixture(scope="module")
def runner(chat_model: Path) -> Iterator[Runner]:
    with running(chat_model) as runner:
        yield runner


def test_a_loaded_runner_tells_its_effective_values(runner: Runner) -> None:
    assert isinstance(runner.first, m.Loaded)
    info = runner.first.info
    assert (info.num_slots, info.num_ctx, info.num_ctx_train, info.num_layers) == (16, 1024, 8192, 30)
    assert "CPU" in info.system_info


def test_a_question_gets_an_answer_that_makes_sense(runner: Runner) -> None:
    answer = runner.ask(chat("q", "How many days has a week?"))
    assert "7" in answer.text
    assert answer.finished is not None
    assert answer.finished.finish_reason in ("stop", "length")
    assert answer.finished.usage.num_prompt_tokens > 10
    assert answer.finished.timings.prefill_ns > 0


def test_the_same_request_gives_the_same_text_and_is_mostly_cached(runner: Runner) -> None:
    first = runner.ask(chat("same1", "Name three colours of the rainbow."))
    again = runner.ask(chat("same2", "Name three colours of the rainbow."))
    assert first.text == again.text
    assert first.finished is not None
    assert again.finished is not None
    assert again.finished.usage.num_cached_tokens == first.finished.usage.num_prompt_tokens - 1
    assert again.finished.usage.num_prompt_tokens == first.finished.usage.num_prompt_tokens


def test_a_second_turn_computes_only_what_is_new(runner: Runner) -> None:
    first = runner.ask(chat("turn1", "Say hello to my cat Felix."))
    second = runner.ask(chat("turn2", "Say hello to my cat Felix.", first.text, "And now to my dog."))
    assert first.finished is not None
    assert second.finished is not None
    assert second.finished.usage.num_cached_tokens >= first.finished.usage.num_prompt_tokens


def test_sixteen_requests_share_one_batch_and_nothing_else(runner: Runner) -> None:
    words = (
        *("amber", "bison", "cobalt", "dahlia", "ermine", "falcon", "ginger", "heron"),
        *("indigo", "jasper", "kestrel", "lotus", "maple", "nickel", "onyx", "pearl"),
    )
    requests = [raw(word, f"The secret word is {word}. I repeat: the secret word is", num_predict=12) for word in words]
    runner.frames.clear()
    for request in requests:
        runner.send(request)
    answers = runner.collect(*words)
    for word, answer in answers.items():
        assert word in answer.text
        assert not any(other in answer.text for other in words if other != word)
    widest = max(len({item.id for item in frame.items if isinstance(item, m.Text)}) for frame in runner.frames)
    assert widest >= 12, "the sequences were not decoded together"


def test_a_long_prompt_does_not_stop_somebody_elses_stream(chat_model: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=2, num_ctx=2048, target_itl_ms=1.0)
    with running(chat_model, options) as runner:
        runner.send(raw("stream", "Once upon a time", num_predict=200))
        while not any(isinstance(item, m.Text) for item in runner.frame().items):
            pass
        runner.frames.clear()
        runner.send(raw("long", "word " * 600, num_predict=1))
        while not any(isinstance(item, m.Done) and item.id == "long" for item in runner.frame().items):
            pass
        kinds = ["".join(sorted({type(item).__name__[0] for item in frame.items})) for frame in runner.frames]
        first, last = (f(i for i, kind in enumerate(kinds) if "P" in kind) for f in (min, max))
        during = runner.frames[first:last]
        texts = sum(isinstance(item, m.Text) for frame in during for item in frame.items)
        assert last - first > 10, "the prompt was not taken in pieces"
        assert texts >= (last - first) // 2, "the stream stood still while the prompt was computed"


def test_stop_strings_end_the_answer_and_are_not_shown(runner: Runner) -> None:
    answer = runner.ask(raw("stop", "Count: one two three four five six", num_predict=40, stop=("ten", "zzz")))
    assert answer.text.strip() == "seven eight nine"
    assert answer.finished is not None
    assert answer.finished.finish_reason == "stop"


def test_the_models_own_end_still_counts_with_a_stop_string_of_ones_own(runner: Runner) -> None:
    request = chat("end", "Say hi.", sampling=SamplingParams(temperature=0, num_predict=400, stop=("zzz",)))
    answer = runner.ask(request)
    assert answer.finished is not None
    assert answer.finished.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize("num_predict", [0, 1, 5])
def test_the_length_limit_is_exact(runner: Runner, num_predict: int) -> None:
    answer = runner.ask(raw(f"len{num_predict}", "Once upon a time", num_predict=num_predict))
    assert answer.finished is not None
    assert (answer.finished.finish_reason, answer.finished.usage.num_output_tokens) == ("length", num_predict)


def test_an_answer_ends_where_the_window_ends(chat_model: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=1, num_ctx=256)
    with running(chat_model, options) as runner:
        answer = runner.ask(raw("window", "la la la", num_predict=-1))
        assert answer.finished is not None
        usage = answer.finished.usage
        assert answer.finished.finish_reason == "length"
        assert usage.num_prompt_tokens + usage.num_output_tokens == 256


def test_logprobs_come_with_the_text_one_for_each_token(runner: Runner) -> None:
    request = msgspec.structs.replace(
        raw("lp", "Fünf 🎉 Feiern: 🎊🎉", num_predict=12, stop=("zzz",)), num_top_logprobs=3
    )
    runner.frames.clear()
    answer = runner.ask(request)
    deltas = [item.delta for frame in runner.frames for item in frame.items if isinstance(item, m.Text)]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert len(entries) == 12
    assert all(len(delta.logprobs) == delta.num_tokens for delta in deltas)
    assert b"".join(entry.piece for entry in entries).decode("utf-8", "replace") == answer.text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0].piece == entry.piece, "a greedy answer takes the likeliest"
        assert entry.top[0].logprob >= entry.top[1].logprob >= entry.top[2].logprob


def test_a_repeat_penalty_keeps_an_answer_from_going_round_in_circles(runner: Runner) -> None:
    prompt = "One cat, two dogs. " * 12
    params = SamplingParams(temperature=0, num_predict=16)
    circle = runner.ask(ChatRequest("circle", prompt=prompt, sampling=params)).text
    assert "two dogs. One cat, two dogs" in circle
    params = msgspec.structs.replace(params, repeat_penalty=1.8)
    answer = runner.ask(ChatRequest("line", prompt=prompt, sampling=params))
    assert answer.error is None
    assert "One cat, two dogs" not in answer.text


def test_a_token_that_the_model_does_not_have_fails_one_request(runner: Runner) -> None:
    params = SamplingParams(num_predict=1, logit_bias={10**6: 1.0})
    error = runner.ask(ChatRequest("bias", prompt="a", sampling=params)).error
    assert error is not None
    assert error.error.details == {"field": "logit_bias"}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_makes_a_sampled_answer_repeatable(runner: Runner, seed: int) -> None:
    params = SamplingParams(temperature=1.5, num_predict=12, seed=seed)
    texts = {
        runner.ask(ChatRequest(f"seed{seed}-{i}", prompt="Once upon a time", sampling=params)).text for i in range(2)
    }
    assert len(texts) == 1


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(runner: Runner) -> None:
    error = runner.ask(raw("long", "word " * 2000)).error
    assert error is not None
    assert error.error.code == "context_length_exceeded"
    assert error.error.details == {"num_prompt_tokens": 2001, "num_ctx": 1024}


def test_truncation_drops_the_oldest_messages_and_says_how_many(runner: Runner) -> None:
    request = chat("cut", "old " * 1100, "I see.", "How many days has a week?", truncate=True)
    answer = runner.ask(request)
    assert "7" in answer.text
    assert answer.finished is not None
    assert answer.finished.usage.num_dropped_messages == 2


def test_tokens_can_be_had_back_and_continued(runner: Runner) -> None:
    first = runner.ask(msgspec.structs.replace(raw("ctx1", "My name is Zorblax."), return_tokens=True))
    assert first.finished is not None
    tokens = first.finished.tokens
    usage = first.finished.usage
    assert len(tokens) == usage.num_prompt_tokens + usage.num_output_tokens
    follow = msgspec.structs.replace(raw("ctx2", " My name, again, is"), context_tokens=tokens)
    second = runner.ask(follow)
    assert "Zorblax" in second.text
    assert second.finished is not None
    assert second.finished.usage.num_cached_tokens >= len(tokens) - 1


def test_a_cancelled_request_frees_its_slot(chat_model: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=1, num_ctx=4096, num_batch=64)
    with running(chat_model, options) as runner:
        runner.send(raw("prefill", "word " * 4000))
        while not any(isinstance(item, m.Prefill) for item in runner.frame().items):
            pass
        runner.send(raw("next", "The capital of France is", num_predict=3))
        runner.channel.send(Cancel("prefill"))
        answers = runner.collect("prefill", "next")
        cancelled = answers["prefill"].finished
        assert cancelled is not None
        assert cancelled.finish_reason == "cancelled"
        assert "Paris" in answers["next"].text
        runner.send(raw("queued", "word " * 100, num_predict=1))
        runner.channel.send(Cancel("queued"))
        runner.channel.send(Cancel("nobody"))
        assert runner.collect("queued")["queued"].finished is not None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for more than"),
        ("{{ lipsum.__globals__.os.system('touch /tmp/never') }}", "failed"),
        ("{{ raise_exception('only users here') }}", "only users here"),
    ],
)
def test_a_hostile_or_strict_template_fails_one_request_only(chat_model: Path, template: str, reason: str) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=1)
    with running(chat_model, options, template) as runner:
        error = runner.ask(chat("hostile", "hi")).error
        assert error is not None
        assert error.error.code == "template_error"
        assert reason in error.error.message
        assert "Paris" in runner.ask(raw("fine", "The capital of France is", num_predict=3)).text


def test_a_file_that_llama_cpp_cannot_load_is_refused_in_words(tmp_path: Path) -> None:
    with running(write_gguf(tmp_path / "no-model.gguf", arch="nosucharch")) as runner:
        assert isinstance(runner.first, m.LoadFailed)
        assert "nosucharch" in runner.first.error.message


def test_the_end_of_the_channel_ends_the_process_even_in_mid_step(chat_model: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, num_parallel=1, num_ctx=4096)
    with running(chat_model, options) as runner:
        runner.send(raw("busy", "word " * 3000))
        runner.channel._socket.shutdown(socket.SHUT_RDWR)
        assert runner.process.wait(2) == 0
