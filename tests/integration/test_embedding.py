"""The real runner on models that make vectors and scores, spoken to as the daemon does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.fixtures.bert import Bert
from tests.fixtures.ggufs import write_tiny_bert
from tests.fixtures.runners import Runner, raw, running
from tests.fixtures.tiny_models import write_tiny_llama

from localllm.errors import ErrorInfo
from localllm.protocol import messages as m
from localllm.protocol.messages import Cancel, Embed
from localllm.types import Embeddings, EmbedRequest, LoadOptions

OPTIONS = LoadOptions(num_ctx=512, num_parallel=1, num_threads=2, num_threads_batch=2)
EXPECTED: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "fixtures" / "all_minilm.json").read_text())
Vector = npt.NDArray[np.float32]


def finish(runner: Runner, *ids: str) -> dict[str, Embeddings | ErrorInfo | None]:
    """The terminal message of each request; None for a cancelled one."""
    endings: dict[str, Embeddings | ErrorInfo | None] = {}
    while len(endings) < len(ids):
        for item in runner.frame().items:
            if isinstance(item, m.Embedded):
                endings[item.id] = item.embeddings
            elif isinstance(item, m.Failed):
                endings[item.id] = item.error
            elif isinstance(item, m.Done):
                endings[item.id] = None
    return endings


def ask(runner: Runner, request: EmbedRequest) -> Embeddings | ErrorInfo | None:
    runner.channel.send(Embed(request))
    return finish(runner, request.id)[request.id]


def vectors(runner: Runner, *inputs: Any, **fields: Any) -> list[Vector]:
    result = ask(runner, EmbedRequest("v", inputs, **fields))
    assert isinstance(result, Embeddings), result
    return [np.frombuffer(vector, "<f4") for vector in result.vectors]


def error(runner: Runner, *inputs: Any, **fields: Any) -> ErrorInfo:
    result = ask(runner, EmbedRequest("e", inputs, **fields))
    assert isinstance(result, ErrorInfo), result
    return result


@pytest.fixture(scope="module")
def minilm(embedding_model: Path) -> Iterator[Runner]:
    with running(embedding_model, OPTIONS) as runner:
        yield runner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = write_tiny_bert(tmp_path_factory.mktemp("tiny") / "bert.gguf", pooling=gguf.PoolingType.MEAN)
    with running(path, msgspec.structs.replace(OPTIONS, num_ctx=32)) as runner:
        yield runner


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = write_tiny_bert(tmp_path_factory.mktemp("ranker") / "bert.gguf", pooling=gguf.PoolingType.RANK)
    with running(path, msgspec.structs.replace(OPTIONS, num_ctx=32)) as runner:
        yield runner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = write_tiny_llama(tmp_path_factory.mktemp("llama") / "llama.gguf")
    with running(path, msgspec.structs.replace(OPTIONS, num_ctx=64)) as runner:
        yield runner


class TestRealModel:
    def test_the_vectors_are_those_of_the_model_that_was_converted(self, minilm: Runner) -> None:
        result = ask(minilm, EmbedRequest("all", tuple(e["text"] for e in EXPECTED)))
        assert isinstance(result, Embeddings)
        assert result.usage.num_prompt_tokens == sum(e["num_tokens"] for e in EXPECTED)
        for vector, expected in zip(result.vectors, EXPECTED, strict=True):
            assert np.frombuffer(vector, "<f4") @ np.array(expected["vector"]) > 0.9999

    def test_what_is_stored_is_what_the_reference_computes(self, embedding_model: Path) -> None:
        assert Bert(embedding_model).embed(EXPECTED[0]["text"]) == pytest.approx(EXPECTED[0]["vector"], abs=1e-6)

    def test_neighbours_in_a_batch_change_nothing(self, minilm: Runner) -> None:
        texts = [f"Sentence number {i} is about {'cats and dogs ' * (i % 9)}." for i in range(150)]
        together = vectors(minilm, *texts)
        for index in (0, 63, 64, 149):
            (alone,) = vectors(minilm, texts[index])
            assert alone @ together[index] > 0.9999

    def test_a_long_text_is_cut_at_its_end(self, minilm: Runner) -> None:
        cut, same, other = vectors(minilm, "cat " * 600, "cat " * 510, "dog " * 600)
        assert cut @ same > 0.9999
        assert cut @ other < 0.99

    def test_requests_share_batches_and_a_small_one_does_not_wait_for_a_large_one(self, minilm: Runner) -> None:
        minilm.channel.send(Embed(EmbedRequest("large", ("some words of no weight",) * 1000)))
        minilm.channel.send(Embed(EmbedRequest("small", ("a question",))))
        order: list[str] = []
        while len(order) < 2:
            order += [item.id for item in minilm.frame().items if isinstance(item, m.Embedded)]
        assert order == ["small", "large"]


class TestVectors:
    def test_all_have_unit_length_also_when_they_are_cut(self, tiny: Runner) -> None:
        (whole,) = vectors(tiny, "abc")
        (part,) = vectors(tiny, "abc", dimensions=4)
        assert np.linalg.norm(whole) == pytest.approx(1)
        assert part == pytest.approx(whole[:4] / np.linalg.norm(whole[:4]))

    def test_token_ids_are_taken_as_they_are(self, tiny: Runner) -> None:
        text, tokens = vectors(tiny, "!a", (2, 5, 133, 3))
        assert text == pytest.approx(tokens, abs=1e-5)

    def test_an_empty_text_and_no_text_at_all(self, tiny: Runner) -> None:
        assert len(vectors(tiny, "")) == 1
        assert vectors(tiny) == []

    def test_too_long_is_an_error_with_both_numbers_when_it_may_not_be_cut(self, tiny: Runner) -> None:
        found = error(tiny, "a", "b c " * 40, truncate=False)
        assert found.code == "context_length_exceeded"
        assert "the input length exceeds the context length" in found.message
        assert found.details == {"num_prompt_tokens": 82, "num_ctx": 32, "field": "input[1]"}

    def test_nothing_is_left_after_truncation(self, tmp_path: Path) -> None:
        path = write_tiny_bert(tmp_path / "bert.gguf", pooling=gguf.PoolingType.MEAN)
        with running(path, msgspec.structs.replace(OPTIONS, num_ctx=2)) as runner:
            assert "input after truncation exceeds maximum context length" in error(runner, "abc").message

    def test_mistakes_fail_one_request(self, tiny: Runner) -> None:
        assert error(tiny, "a", dimensions=33).details == {"field": "dimensions"}
        assert error(tiny, "a", (5, 10**6)).details == {"field": "input[1]"}
        assert error(tiny, "a", query="b").code == "unsupported"
        refused = tiny.ask(raw("text", "a")).error
        assert refused is not None and refused.error.code == "unsupported"
        assert len(vectors(tiny, "a")) == 1

    def test_a_cancelled_request_ends_soon(self, tiny: Runner) -> None:
        tiny.channel.send(Embed(EmbedRequest("long", ("abc",) * 20000)))
        tiny.channel.send(Cancel("long"))
        tiny.channel.send(Cancel("nobody"))
        assert finish(tiny, "long") == {"long": None}


class TestScores:
    def test_a_score_for_each_document_between_nothing_and_one(self, ranker: Runner) -> None:
        scores = vectors(ranker, "abc", "xyz", "abc", query="def")
        assert all(score.shape == (1,) and 0 < score[0] < 1 for score in scores)
        assert scores[0] == pytest.approx(scores[2], abs=1e-5)
        assert scores[0] != pytest.approx(scores[1], abs=1e-5)

    def test_the_query_counts(self, ranker: Runner) -> None:
        (one,), (other,) = vectors(ranker, "abc", query="def"), vectors(ranker, "abc", query="ghi")
        assert one != pytest.approx(other, abs=1e-5)

    def test_a_document_is_cut_to_fit(self, ranker: Runner) -> None:
        assert len(vectors(ranker, "a b " * 40, query="def")) == 1

    def test_a_ranker_makes_no_vectors(self, ranker: Runner) -> None:
        assert "it ranks" in error(ranker, "abc").message


class TestGenerators:
    def test_a_model_for_text_makes_vectors_only_when_told_how(self, llama: Runner) -> None:
        refused = error(llama, "abc")
        assert refused.code == "unsupported" and "pooling" in refused.hint
        (mean,), (last,) = vectors(llama, "abc", pooling="mean"), vectors(llama, "abc", pooling="last")
        assert np.linalg.norm(mean) == pytest.approx(1)
        assert mean @ last < 0.999

    def test_text_and_vectors_are_made_side_by_side(self, llama: Runner) -> None:
        (alone,), text = vectors(llama, "abc", pooling="mean"), llama.ask(raw("alone", "Once upon")).text
        llama.send(raw("both", "Once upon"))
        llama.channel.send(Embed(EmbedRequest("v", ("abc",) * 50, pooling="mean")))
        said, found, is_done = "", None, False
        while not is_done or found is None:
            for item in llama.frame().items:
                if isinstance(item, m.Text):
                    said += item.delta.content
                elif isinstance(item, m.Embedded):
                    found = item.embeddings.vectors
                elif isinstance(item, m.Done):
                    is_done = True
        assert said == text
        assert np.frombuffer(found[-1], "<f4") @ alone > 0.9999
