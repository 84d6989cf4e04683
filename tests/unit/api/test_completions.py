"""/v1/completions without a runner."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.api.harness import DONE, NOTHING_GUESSED, Daemon

from localllm.daemon.supervisor import Granted
from localllm.types import Delta, TokenLogprob

PATH = "/v1/completions"


async def test_a_prompt_is_continued_with_no_chat_around_it(daemon: Daemon) -> None:
    reply = (await daemon.post(PATH, model="tiny", prompt="Once", max_tokens=5)).json()
    assert reply.pop("id").startswith("cmpl-") and reply.pop("created") > 0
    assert reply == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "fp_localllm",
        "choices": [{"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": NOTHING_GUESSED,
        },
    }
    request = daemon.supervisor.request
    assert (request.prompt, request.messages, request.sampling.num_predict) == ("Once", None, 5)
    await daemon.post(PATH, model="tiny", prompt="Once", suffix="end")
    assert (daemon.supervisor.request.suffix, daemon.supervisor.request.sampling.num_predict) == ("end", 16)


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("a", ["a"], [()]),
        (["a", "b"], ["a", "b"], [(), ()]),
        ([1, 2], [""], [(1, 2)]),
        ([[1], [2]], ["", ""], [(1,), (2,)]),
    ],
)
async def test_several_prompts_and_tokens(daemon: Daemon, prompt: Any, texts: list[str], tokens: list[Any]) -> None:
    reply = (await daemon.post(PATH, model="tiny", prompt=prompt, n=2)).json()
    asked = [call.request for call in daemon.supervisor.calls]
    assert [r.prompt for r in asked if r] == [text for text in texts for _ in range(2)]
    assert [r.context_tokens for r in asked if r] == [ids for ids in tokens for _ in range(2)]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(texts)))
    assert reply["usage"]["prompt_tokens"] == 7 * len(texts)
    assert len({r.id for r in asked if r}) == len(asked)


async def test_a_stream_with_echo(daemon: Daemon) -> None:
    *chunks, usage, done = await daemon.events(
        PATH, model="tiny", prompt="Say: ", stream=True, echo=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Say: Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 9, "[DONE]")


async def test_log_probabilities(daemon: Daemon) -> None:
    entry = TokenLogprob(b"He", -0.5, (TokenLogprob(b"He", -0.5),))
    daemon.supervisor.script = (Granted(1, 1), Delta("He", num_tokens=1, logprobs=(entry,)), DONE)
    reply = (await daemon.post(PATH, model="tiny", prompt="x", logprobs=1)).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["He"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"He": -0.5}],
        "text_offset": [0],
    }
    assert daemon.supervisor.request.num_top_logprobs == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"model": ""}, "model"),
        ({"model": "embedder"}, "model"),
    ],
)
async def test_mistakes_name_the_field(daemon: Daemon, body: dict[str, Any], param: str) -> None:
    response = await daemon.post(PATH, **{"model": "tiny", "prompt": "x"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert daemon.supervisor.calls == []
