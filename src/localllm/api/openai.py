"""/v1/chat/completions and /v1/models, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation, logprobs
from localllm.api.asking import Ask, job_of
from localllm.api.errors import openai_event
from localllm.api.generation import Answer, Ended, Job, Services
from localllm.api.logprobs import parse_count
from localllm.api.openai_request import grammar_of, options_of, think_of, to_messages, tool_choice, variants
from localllm.api.options import parse_keep_alive
from localllm.api.progress import commentator
from localllm.api.streaming import SSE, StreamingReply, WhileConnected
from localllm.api.turn import turn_of
from localllm.api.wire import decode, json_bytes, json_response, read_body
from localllm.api.wire_openai import (
    ChatCompletionBody,
    Choice,
    Completion,
    CompletionTokensDetails,
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
from localllm.types import Delta, ToolCall

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
        jobs = await self._jobs(request, body, started_ns)
        completion = _NewCompletion(body.model)
        if body.stream:
            chunks = self._chunks(jobs, completion, include_usage=body.stream_options.include_usage)
            beat = commentator(self._supervisor, jobs[0].request.id)
            return StreamingReply(chunks, SSE, openai_event, beat)
        async with WhileConnected(request.receive):
            answers = await generation.answers(self._supervisor, jobs)
        return json_response(completion.whole(answers))

    async def _jobs(self, request: Request, body: ChatCompletionBody, started_ns: int) -> list[Job]:
        """One for each answer that is wanted."""
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        if not body.messages:
            raise InvalidRequest("[] is too short - 'messages'", field="messages")
        ask = Ask(
            name=body.model,
            messages=to_messages(body.messages),
            options=options_of(body),
            fallbacks=FALLBACKS,
            keep_alive=parse_keep_alive(body.keep_alive),
            started_ns=started_ns,
            tools=body.tools,
            choice=tool_choice(body.tool_choice, is_parallel=body.parallel_tool_calls),
            think=think_of(body),
            grammar=grammar_of(body),
            num_top_logprobs=parse_count(body.logprobs, body.top_logprobs),
            turn=turn_of(body),
        )
        job = await job_of(self._models, request, ask)
        return [replace(job, request=chat) for chat in variants(job.request, body.n)]

    async def _chunks(
        self, jobs: list[Job], completion: _NewCompletion, *, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        new = [_NewChoice(index) for index in range(len(jobs))]
        ended: list[Ended] = []
        async with aclosing(generation.choices(self._supervisor, jobs)) as stream:
            async for index, event in stream:
                if isinstance(event, Ended):
                    ended.append(event)
                for choice in new[index].last(event) if isinstance(event, Ended) else new[index].chunks(event):
                    yield _event(completion.chunk(choice))
        if include_usage:
            yield _event(completion.usage(ended))
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
    """Makes one reply: whole, or as chunks that belong together by their id."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, answers: Sequence[Answer]) -> Completion:
        choices = [_NewChoice(index).whole(answer) for index, answer in enumerate(answers)]
        return self._make("chat.completion", choices, usage_of([answer.ended for answer in answers]))

    def chunk(self, choice: Choice) -> Completion:
        return self._make("chat.completion.chunk", [choice])

    def usage(self, ended: Sequence[Ended]) -> Completion:
        return self._make("chat.completion.chunk", [], usage_of(ended))

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


class _NewChoice:
    """Makes one answer: whole, or as what is new of it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._role: str | Any = "assistant"
        self._num_tool_calls = 0

    def whole(self, answer: Answer) -> Choice:
        delta = answer.delta
        message = ReplyMessage(
            role="assistant",
            content=delta.content,
            reasoning=delta.thinking or UNSET,
            tool_calls=self._tool_calls(delta.tool_calls) or UNSET,
        )
        return Choice(
            index=self._index,
            message=message,
            logprobs=logprobs.chat(delta.logprobs) if delta.logprobs else UNSET,
            finish_reason=self._finish_reason(answer.ended),
        )

    def chunks(self, delta: Delta) -> Iterator[Choice]:
        """Thinking, text and tool calls never share a chunk. The log-probabilities of all come with the first."""
        parts: list[dict[str, Any]] = []
        if delta.thinking:
            parts.append({"reasoning": delta.thinking})
        if delta.content or (delta.logprobs and not delta.thinking and not delta.tool_calls):
            parts.append({"content": delta.content})
        if delta.tool_calls:
            parts.append({"content": "", "tool_calls": self._tool_calls(delta.tool_calls)})
        shown = logprobs.chat(delta.logprobs) if delta.logprobs else UNSET
        for part in parts:
            yield self._delta(shown, **part)
            shown = UNSET

    def last(self, ended: Ended) -> Iterator[Choice]:
        if self._role:
            yield self._delta(UNSET, content="")
        yield Choice(index=self._index, delta=ReplyMessage(), finish_reason=self._finish_reason(ended))

    def _delta(self, shown: logprobs.ChatLogprobs | UnsetType, **fields: Any) -> Choice:
        """The first one says whose message it is."""
        delta = ReplyMessage(role=self._role, **fields) if self._role else ReplyMessage(**fields)
        self._role = ""
        return Choice(index=self._index, delta=delta, logprobs=shown, finish_reason=None)

    def _tool_calls(self, calls: tuple[ToolCall, ...]) -> list[ReplyToolCall]:
        first = self._num_tool_calls
        self._num_tool_calls += len(calls)
        return [
            ReplyToolCall(index=index, id=c.id, function=ReplyFunction(c.name, json_bytes(c.arguments).decode()))
            for index, c in enumerate(calls, first)
        ]

    def _finish_reason(self, ended: Ended) -> str:
        return "tool_calls" if self._num_tool_calls else ended.finished.finish_reason


def usage_of(ended: Sequence[Ended]) -> Usage:
    """Answers to one prompt: it counts once, and as cached what of it was so for the first that computed it."""
    usages = [one.finished.usage for one in ended]
    num_prompt_tokens, num_output_tokens = usages[0].num_prompt_tokens, sum(u.num_output_tokens for u in usages)
    num_accepted_tokens = sum(u.num_accepted_tokens for u in usages)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(min(u.num_cached_tokens for u in usages)),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(one.num_thinking_tokens for one in ended),
            accepted_prediction_tokens=num_accepted_tokens,
            rejected_prediction_tokens=sum(u.num_draft_tokens for u in usages) - num_accepted_tokens,
        ),
    )
