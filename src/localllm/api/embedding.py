"""/api/embed, /api/embeddings, /v1/embeddings and /v1/rerank: vectors and scores instead of text."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localllm.api import access, generation
from localllm.api.generation import Services
from localllm.api.options import parse_keep_alive, parse_options
from localllm.api.streaming import WhileConnected
from localllm.api.turn import turn_of
from localllm.api.wire import decode, invalid, json_response, read_body
from localllm.api.wire_embedding import (
    Document,
    EmbedBody,
    EmbeddingsBody,
    EmbeddingsReply,
    EmbedReply,
    Inputs,
    OpenAIEmbedding,
    OpenAIEmbeddings,
    OpenAIEmbeddingsBody,
    Ranked,
    RerankBody,
    RerankReply,
    VectorBody,
    VectorUsage,
    base64_text,
    floats,
    parse_documents,
    parse_inputs,
    parse_texts,
)
from localllm.errors import InvalidRequest, ModelNotFound, Unsupported
from localllm.store.library import StoredModel
from localllm.types import Embeddings, EmbedRequest

# llama.cpp's number of the pooling that ends in a score.
_RANK = 4


@dataclass(frozen=True)
class _Result:
    """Durations in nanoseconds, as clients see them."""

    embeddings: Embeddings
    load_ns: int
    total_ns: int


class EmbeddingRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models

    # ---- routes ----

    async def embed(self, request: Request) -> Response:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), EmbedBody)
        if body.dimensions < 0:
            raise invalid("dimensions", "must be at least 1")
        if not body.model:
            raise ModelNotFound("model '' not found", field="model")
        inputs = parse_texts(body.input)
        model = await self._find(body.model)
        wish = self._wish(request, inputs, body, truncate=body.truncate, dimensions=body.dimensions or None)
        result = await self._run(request, model, body, wish, started_ns)
        return json_response(
            EmbedReply(
                model=body.model,
                embeddings=[floats(vector) for vector in result.embeddings.vectors],
                total_duration=result.total_ns,
                load_duration=result.load_ns,
                prompt_eval_count=result.embeddings.usage.num_prompt_tokens,
            )
        )

    async def embeddings(self, request: Request) -> Response:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), EmbeddingsBody)
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        model = await self._find(body.model)
        wish = self._wish(request, (body.prompt,) if body.prompt else (), body, truncate=False)
        result = await self._run(request, model, body, wish, started_ns)
        vectors = result.embeddings.vectors
        return json_response(EmbeddingsReply(embedding=floats(vectors[0]) if vectors else []))

    async def openai(self, request: Request) -> Response:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), OpenAIEmbeddingsBody)
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        if body.encoding_format not in ("float", "base64"):
            raise invalid("encoding_format", "must be float or base64")
        dimensions = None if body.dimensions is UNSET else body.dimensions
        if dimensions is not None and dimensions < 1:
            raise invalid("dimensions", "must be at least 1")
        inputs = parse_inputs(body.input)
        model = await self._models.find(body.model)
        wish = self._wish(request, inputs, body, truncate=body.truncate, dimensions=dimensions)
        result = await self._run(request, model, body, wish, started_ns)
        encode = base64_text if body.encoding_format == "base64" else floats
        data = [
            OpenAIEmbedding(index=index, embedding=encode(vector))
            for index, vector in enumerate(result.embeddings.vectors)
        ]
        return json_response(OpenAIEmbeddings(data=data, model=body.model, usage=_usage(result)))

    async def rerank(self, request: Request) -> Response:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), RerankBody)
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        if not body.query:
            raise invalid("query", "is required")
        if not body.documents:
            raise invalid("documents", "is required")
        if body.top_n is not UNSET and body.top_n < 1:
            raise invalid("top_n", "must be at least 1")
        documents = parse_documents(body.documents)
        model = await self._models.find(body.model)
        wish = self._wish(request, documents, body, truncate=body.truncate, query=body.query)
        result = await self._run(request, model, body, wish, started_ns)
        scores = [floats(vector)[0] for vector in result.embeddings.vectors]
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            Ranked(
                index=index,
                relevance_score=scores[index],
                document=Document(text=documents[index]) if body.return_documents else UNSET,
            )
            for index in best_first[: len(scores) if body.top_n is UNSET else body.top_n]
        ]
        id = f"rerank-{secrets.token_hex(12)}"
        return json_response(RerankReply(id=id, model=body.model, results=results, usage=_usage(result)))

    # ---- what they have in common ----

    async def _find(self, name: str) -> StoredModel:
        """Raises ModelNotFound in the words that Ollama has for these routes, and as ModelFinder."""
        try:
            return await self._models.find(name)
        except ModelNotFound as error:
            message = f'model "{name}" not found, try pulling it first'
            raise ModelNotFound(message, hint=error.hint, field="model") from None

    @staticmethod
    def _wish(
        request: Request,
        inputs: Inputs,
        body: VectorBody,
        *,
        truncate: bool,
        dimensions: int | None = None,
        query: str | None = None,
    ) -> EmbedRequest:
        return EmbedRequest(
            id=generation.new_id(),
            inputs=inputs,
            query=query,
            truncate=truncate,
            dimensions=dimensions,
            pooling=None if body.pooling is UNSET else body.pooling,
            priority=turn_of(body).priority_for(request),
            client=generation.client_of(request),
        )

    async def _run(
        self, request: Request, model: StoredModel, body: VectorBody, wish: EmbedRequest, started_ns: int
    ) -> _Result:
        """The vectors; without inputs, the model is only loaded. Raises InvalidRequest for a model that cannot."""
        _check_capability(model, body.model, wish)
        keep_alive = parse_keep_alive(body.keep_alive)
        _, wishes = parse_options(model.parameters, body.options)
        async with WhileConnected(request.receive):
            if wish.inputs:
                with access.metered(model) as meter:
                    granted, embeddings = await self._supervisor.embed(model, wish, wishes, keep_alive)
                    meter(embeddings)
                load_ns = granted.load_ns
            else:
                await self._supervisor.load(model, wishes, keep_alive)
                embeddings, load_ns = Embeddings(()), time.perf_counter_ns() - started_ns
        return _Result(embeddings, load_ns, time.perf_counter_ns() - started_ns)


def _check_capability(model: StoredModel, name: str, wish: EmbedRequest) -> None:
    """Said before the model is loaded, which may take long and push out another."""
    ranks = model.header.pooling_type == _RANK
    if wish.query is not None and not ranks:
        raise Unsupported(
            f'"{name}" does not support reranking', hint="Use a model that was made for it.", field="model"
        )
    if wish.query is None and ranks:
        raise Unsupported(f'"{name}" does not support embeddings: it ranks', hint="Use /v1/rerank.", field="model")
    if wish.query is None and "embedding" not in model.capabilities and wish.pooling is None:
        raise Unsupported(
            f'"{name}" does not support embeddings: it was made to generate text',
            hint='Use a model for embeddings, or add "pooling": "mean" or "last" to the request.',
            field="model",
        )


def _usage(result: _Result) -> VectorUsage:
    num_tokens = result.embeddings.usage.num_prompt_tokens
    return VectorUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
