"""/v1/chat/completions and /v1/models, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation
from localllm.api.errors import openai_event
from localllm.api.generation import Ended, Job, Services
from localllm.api.openai_request import check_choices, options_of, think_of, to_messages
from localllm.api.options import parse_keep_alive, parse_options
from localllm.api.streaming import SSE, StreamingReply, WhileConnected
from localllm.api.wire import decode, json_bytes, json_response, read_body
from localllm.api.wire_openai import (
    ChatCompletionBody,
    Choice,
    Completion,
    ModelCard,
    ModelCards,
    PromptTokensDetails,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
    Usage,
)
from localllm.errors import InvalidRequest
from localllm.store.library import StoredModel
from localllm.types import ChatRequest, Delta, ToolCall

FINGERPRINT = "fp_localllm"
# OpenAI's defaults, where neither the request nor the Modelfile says anything else.
FALLBACKS = {"temperature": 1.0, "top_p": 1.0}


class OpenAIRoutes:
    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._supervisor = services.supervisor
        self._models = services.models

    async def chat(self, request: Request) -> Response | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), ChatCompletionBody)
        job = await self._job(request, body, started_ns)
        completion = _NewCompletion(job.name)
        if body.stream:
            chunks = self._chunks(job, completion, include_usage=body.stream_options.include_usage)
            return StreamingReply(chunks, SSE, openai_event)
        async with WhileConnected(request.receive):
            answer = await generation.answer(self._supervisor, job)
        return json_response(completion.whole(answer.delta, answer.ended))

    async def _job(self, request: Request, body: ChatCompletionBody, started_ns: int) -> Job:
        keep_alive, think = parse_keep_alive(body.keep_alive), think_of(body)
        check_choices(body)
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        if not body.messages:
            raise InvalidRequest("[] is too short - 'messages'", field="messages")
        messages = to_messages(body.messages)
        model = await self._models.find(body.model)
        generation.check_capability(model, body.model, "chat")
        sampling, wishes = parse_options(model.parameters, options_of(body), FALLBACKS)
        chat = ChatRequest(
            id=generation.new_id(),
            messages=(*generation.preamble(model, messages), *messages),
            tools=() if body.tool_choice == "none" else generation.parse_tools(model, body.tools),
            think=generation.choose_think(model, body.model, think),
            sampling=sampling,
            client=generation.client_of(request),
        )
        return Job(body.model, model, chat, wishes, keep_alive, started_ns)

    async def _chunks(self, job: Job, new: _NewCompletion, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.events(self._supervisor, job)) as stream:
            async for event in stream:
                if isinstance(event, Ended):
                    for chunk in new.last_chunks(event, include_usage=include_usage):
                        yield _event(chunk)
                else:
                    for chunk in new.chunks(event):
                        yield _event(chunk)
        yield b"data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        models = await asyncio.to_thread(self._store.list)
        return json_response(ModelCards(data=[_card(model, model.name.display) for model in models]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if not name:
            return await self.models(request)
        return json_response(_card(await self._models.find(name), name))


def _card(model: StoredModel, id: str) -> ModelCard:
    return ModelCard(id=id, created=int(model.modified_at.timestamp()), owned_by=model.name.namespace)


def _event(chunk: Completion) -> bytes:
    return b"data: " + json_bytes(chunk) + b"\n\n"


class _NewCompletion:
    """Makes one answer: whole, or as chunks that belong together by their id."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._role: str | Any = "assistant"
        self._num_tool_calls = 0

    def whole(self, delta: Delta, ended: Ended) -> Completion:
        message = ReplyMessage(
            role="assistant",
            content=delta.content,
            reasoning=delta.thinking or UNSET,
            tool_calls=self._tool_calls(delta.tool_calls) or UNSET,
        )
        choice = Choice(index=0, message=message, finish_reason=self._finish_reason(ended))
        return self._make("chat.completion", [choice], _usage(ended))

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        """Thinking, text and tool calls never share a chunk."""
        if delta.thinking:
            yield self._delta(reasoning=delta.thinking)
        if delta.content:
            yield self._delta(content=delta.content)
        if delta.tool_calls:
            yield self._delta(content="", tool_calls=self._tool_calls(delta.tool_calls))

    def last_chunks(self, ended: Ended, *, include_usage: bool) -> Iterator[Completion]:
        if self._role:
            yield self._delta(content="")
        choice = Choice(index=0, delta=ReplyMessage(), finish_reason=self._finish_reason(ended))
        yield self._make("chat.completion.chunk", [choice])
        if include_usage:
            yield self._make("chat.completion.chunk", [], _usage(ended))

    def _delta(self, **fields: Any) -> Completion:
        """The first one says whose message it is."""
        delta = ReplyMessage(role=self._role, **fields) if self._role else ReplyMessage(**fields)
        self._role = ""
        return self._make("chat.completion.chunk", [Choice(index=0, delta=delta, finish_reason=None)])

    def _tool_calls(self, calls: tuple[ToolCall, ...]) -> list[ReplyToolCall]:
        first = self._num_tool_calls
        self._num_tool_calls += len(calls)
        return [
            ReplyToolCall(index=index, id=c.id, function=ReplyFunction(c.name, json_bytes(c.arguments).decode()))
            for index, c in enumerate(calls, first)
        ]

    def _finish_reason(self, ended: Ended) -> str:
        return "tool_calls" if self._num_tool_calls else ended.finished.finish_reason

    def _make(self, object: str, choices: list[Choice], usage: Any = UNSET) -> Completion:
        return Completion(
            id=self._id,
            object=object,
            created=self._created,
            model=self._model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        )


def _usage(ended: Ended) -> Usage:
    usage = ended.finished.usage
    return Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.num_cached_tokens),
    )
