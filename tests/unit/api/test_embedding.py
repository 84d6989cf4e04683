"""Vectors and scores, as a client on a socket sees them."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest
from tests.unit.api.harness import Daemon

from localllm.errors import ContextExceeded
from localllm.types import LoadWishes


class TestEmbed:
    async def test_a_batch(self, daemon: Daemon) -> None:
        reply = (await daemon.post("/api/embed", model="embedder", input=["a", "b"])).json()
        assert reply.pop("total_duration") > 0
        assert reply == {
            "model": "embedder",
            "embeddings": [[0.0, 0.5], [1.0, 0.5]],
            "load_duration": 5,
            "prompt_eval_count": 8,
        }
        wish = daemon.supervisor.wish
        assert (wish.inputs, wish.truncate, wish.dimensions, wish.query) == (("a", "b"), True, None, None)

    async def test_one_text_and_every_field(self, daemon: Daemon) -> None:
        body = {"truncate": False, "dimensions": 1, "keep_alive": "1m", "options": {"num_ctx": 64}, "pooling": "last"}
        await daemon.post("/api/embed", model="tiny", input="a", **body)
        wish, call = daemon.supervisor.wish, daemon.supervisor.calls[-1]
        assert (wish.inputs, wish.truncate, wish.dimensions, wish.pooling) == (("a",), False, 1, "last")
        assert (call.keep_alive, call.wishes) == (60.0, LoadWishes(num_ctx=64))

    @pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": None}])
    async def test_nothing_to_embed_only_loads(self, daemon: Daemon, body: dict[str, Any]) -> None:
        reply = (await daemon.post("/api/embed", model="embedder", **body)).json()
        assert reply["embeddings"] == []
        assert len(daemon.supervisor.loads) == 1
        assert daemon.supervisor.calls == []

    async def test_an_empty_text_in_a_list_is_a_text(self, daemon: Daemon) -> None:
        assert len((await daemon.post("/api/embed", model="embedder", input=[""])).json()["embeddings"]) == 1

    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            ({"model": ""}, 404, "model '' not found"),
            ({"model": "nobody", "input": "a"}, 404, 'model "nobody" not found, try pulling it first'),
            ({"model": "../x", "input": "a"}, 400, "invalid model name"),
            ({"model": "embedder", "input": 5}, 400, "invalid input type"),
            ({"model": "embedder", "input": ["a", 5]}, 400, "invalid input type"),
            ({"model": "embedder", "input": "a", "dimensions": -1}, 400, '"dimensions": must be at least 1'),
            ({"model": "embedder", "input": "a", "options": {"num_ctx": "x"}}, 500, "must be of type integer"),
            ({"model": "embedder", "input": "a", "pooling": "max"}, 400, "pooling"),
            ({"model": "tiny", "input": "a"}, 400, '"tiny" does not support embeddings: it was made to generate text'),
            ({"model": "ranker", "input": "a"}, 400, '"ranker" does not support embeddings: it ranks'),
        ],
    )
    async def test_mistakes(self, daemon: Daemon, body: dict[str, Any], status: int, message: str) -> None:
        response = await daemon.post("/api/embed", **body)
        assert response.status_code == status
        assert message in response.json()["error"]
        assert daemon.supervisor.calls == daemon.supervisor.loads == []

    async def test_a_refusal_of_the_runner_keeps_its_numbers(self, daemon: Daemon) -> None:
        daemon.supervisor.script = [ContextExceeded("the input length exceeds the context length", num_ctx=4)]
        response = await daemon.post("/api/embed", model="embedder", input="a", truncate=False)
        assert response.status_code == 400
        assert "context length" in response.json()["error"]

    async def test_leaving_cancels(self, daemon: Daemon) -> None:
        daemon.supervisor.script = [asyncio.Event()]
        _, writer = await daemon.connect("/api/embed", model="embedder", input="a")
        await asyncio.wait_for(daemon.supervisor.has_begun.wait(), 10)
        writer.close()
        await asyncio.wait_for(daemon.supervisor.was_cancelled.wait(), 10)


class TestOlderRoute:
    async def test_one_flat_vector(self, daemon: Daemon) -> None:
        assert (await daemon.post("/api/embeddings", model="embedder", prompt="a")).json() == {"embedding": [0.0, 0.5]}
        assert daemon.supervisor.wish.truncate is False

    async def test_no_prompt_only_loads(self, daemon: Daemon) -> None:
        assert (await daemon.post("/api/embeddings", model="embedder")).json() == {"embedding": []}
        assert len(daemon.supervisor.loads) == 1

    async def test_the_model_is_required(self, daemon: Daemon) -> None:
        response = await daemon.post("/api/embeddings", prompt="a")
        assert (response.status_code, response.json()["error"]) == (400, "model is required")


class TestOpenAI:
    async def test_a_batch(self, daemon: Daemon) -> None:
        reply = (await daemon.post("/v1/embeddings", model="embedder", input=["a", "b"], user="me")).json()
        assert reply == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [0.0, 0.5]},
                {"object": "embedding", "index": 1, "embedding": [1.0, 0.5]},
            ],
            "model": "embedder",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        }
        assert daemon.supervisor.wish.truncate is False

    async def test_base64_is_little_endian_floats(self, daemon: Daemon) -> None:
        body = {"model": "embedder", "input": "a", "encoding_format": "base64", "dimensions": 2}
        reply = (await daemon.post("/v1/embeddings", **body)).json()
        assert struct.unpack("<2f", base64.b64decode(reply["data"][0]["embedding"])) == (0.0, 0.5)
        assert daemon.supervisor.wish.dimensions == 2

    @pytest.mark.parametrize(
        ("input", "inputs"),
        [
            ("", ("",)),
            ("a", ("a",)),
            ([5, 6], ((5, 6),)),
            ([[5, 6], [7]], ((5, 6), (7,))),
        ],
    )
    async def test_forms_of_input(self, daemon: Daemon, input: Any, inputs: Any) -> None:
        assert (await daemon.post("/v1/embeddings", model="embedder", input=input)).status_code == 200
        assert daemon.supervisor.wish.inputs == inputs

    @pytest.mark.parametrize(
        ("body", "param", "message"),
        [
            ({"input": None}, "input", "invalid input"),
            ({"input": []}, "input", "invalid input"),
            ({"input": 5}, "input", '"input": must be a string, a list of token ids, or a list of these'),
            ({"input": ["a", -1]}, "input[1]", '"input[1]": must be a string or a list of token ids'),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", "must be float or base64"),
            ({"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
            ({"input": "a", "model": "tiny"}, "model", '"tiny" does not support embeddings'),
            ({"input": "a", "model": ""}, "model", "model is required"),
        ],
    )
    async def test_mistakes(self, daemon: Daemon, body: dict[str, Any], param: str, message: str) -> None:
        response = await daemon.post("/v1/embeddings", **({"model": "embedder"} | body))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert message in error["message"]


class TestRerank:
    async def test_the_best_comes_first(self, daemon: Daemon) -> None:
        reply = (await daemon.post("/v1/rerank", model="ranker", query="q", documents=["a", {"text": "b"}, "c"])).json()
        assert reply.pop("id").startswith("rerank-")
        assert reply == {
            "object": "list",
            "model": "ranker",
            "results": [
                {"index": 1, "relevance_score": 1.0},
                {"index": 0, "relevance_score": 0.875},
                {"index": 2, "relevance_score": 0.875},
            ],
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        }
        assert (daemon.supervisor.wish.query, daemon.supervisor.wish.inputs) == ("q", ("a", "b", "c"))

    async def test_a_few_and_their_texts(self, daemon: Daemon) -> None:
        body = {"query": "q", "documents": ["a", "b"], "top_n": 1, "return_documents": True}
        reply = (await daemon.post("/v1/rerank", model="ranker", **body)).json()
        assert reply["results"] == [{"index": 1, "relevance_score": 1.0, "document": {"text": "b"}}]

    @pytest.mark.parametrize(
        ("body", "param", "message"),
        [
            ({"query": ""}, "query", "is required"),
            ({"documents": []}, "documents", "is required"),
            ({"documents": ["a", 5]}, "documents[1]", "must be a string, or an object with a text"),
            ({"top_n": 0}, "top_n", "must be at least 1"),
            ({"model": "embedder"}, "model", '"embedder" does not support reranking'),
            ({"model": "tiny"}, "model", '"tiny" does not support reranking'),
        ],
    )
    async def test_mistakes(self, daemon: Daemon, body: dict[str, Any], param: str, message: str) -> None:
        response = await daemon.post("/v1/rerank", **({"model": "ranker", "query": "q", "documents": ["a"]} | body))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert message in error["message"]
