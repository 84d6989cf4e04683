"""/api/generate and /api/chat."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation, logprobs, shape
from localllm.api.asking import Ask, job_of
from localllm.api.errors import native_line
from localllm.api.generation import Ended, Job, Services, Think
from localllm.api.options import parse_keep_alive, parse_options
from localllm.api.streaming import NDJSON, StreamingReply, WhileConnected
from localllm.api.turn import turn_of
from localllm.api.wire import decode, json_line, json_response, read_body, unsupported
from localllm.api.wire_native import (
    ChatBody,
    DebugInfo,
    DebugReply,
    GenerateBody,
    InferenceBody,
    InferenceReply,
    RenderReply,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
    check_images,
    parse_format,
    to_message,
)
from localllm.daemon.supervisor import KeepAlive
from localllm.errors import InvalidRequest, ModelNotFound
from localllm.store.library import StoredModel
from localllm.types import ChatRequest, Delta, Grammar, Message

# The fields of a reply that carry text; tool calls are numbered from the second argument on.
TextFields = Callable[[Delta, int], dict[str, Any]]


class NativeRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models

    # ---- routes ----

    async def chat(self, request: Request) -> Response | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), ChatBody)
        keep_alive, grammar = _check(body)
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        model = await self._models.find(body.model)
        if not body.messages and keep_alive == 0:
            return await self._unload(request, model, body, _chat_text)
        job = await job_of(self._models, request, _chat_ask(body, keep_alive, grammar, started_ns))
        if not body.messages:
            return await self._load(request, model, body, keep_alive, _chat_text)
        return await self._answer(request, job, body, _chat_text)

    async def generate(self, request: Request) -> Response | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), GenerateBody)
        keep_alive, grammar = _check(body)
        if not body.model:
            raise ModelNotFound("model '' not found", field="model")
        model = await self._models.find(body.model)
        if not body.prompt and keep_alive == 0:
            return await self._unload(request, model, body, _generate_text)
        _check_generate(body)
        generation.check_capability(model, body.model, "generate")
        think = _think(model, body)
        if not body.prompt:
            return await self._load(request, model, body, keep_alive, _generate_text)
        sampling, wishes = parse_options(model.parameters, body.options)
        is_verbatim = body.raw or bool(body.suffix)
        text = ChatRequest(
            id=generation.new_id(),
            messages=None if is_verbatim else _generate_messages(model, body),
            prompt=body.prompt if is_verbatim else None,
            suffix=body.suffix,
            context_tokens=tuple(body.context),
            think=None if is_verbatim else think,
            sampling=sampling,
            truncate=body.truncate,
            shift=body.shift,
            return_tokens=not body.raw,
            grammar=grammar,
            **turn_of(body).fields(request),
            num_top_logprobs=body.top_logprobs if body.logprobs else None,
        )
        job = Job(body.model, model, text, wishes, keep_alive, started_ns)
        return await self._answer(request, job, body, _generate_text)

    async def render(self, request: Request) -> Response:
        """What /api/chat would send to the model for this body."""
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), ChatBody)
        keep_alive, grammar = _check(body)
        if not body.model or not body.messages:
            raise InvalidRequest("model and messages are required", field="messages" if body.model else "model")
        job = await job_of(self._models, request, _chat_ask(body, keep_alive, grammar, started_ns))
        async with WhileConnected(request.receive):
            finished = await generation.inspect(self._supervisor, job)
        return json_response(RenderReply(body.model, finished.prompt, finished.tokens, len(finished.tokens)))

    # ---- loading and unloading: one object each, whatever `stream` says ----

    async def _load(
        self, request: Request, model: StoredModel, body: InferenceBody, keep_alive: KeepAlive, text: TextFields
    ) -> Response:
        _, wishes = parse_options(model.parameters, body.options)
        async with WhileConnected(request.receive):
            await self._supervisor.load(model, wishes, keep_alive)
        return json_response(_reply(body.model, text(Delta(), 0), done_reason="load"))

    async def _unload(self, request: Request, model: StoredModel, body: InferenceBody, text: TextFields) -> Response:
        async with WhileConnected(request.receive):
            await self._supervisor.unload(model)
        return json_response(_reply(body.model, text(Delta(), 0), done_reason="unload"))

    # ---- answers ----

    async def _answer(
        self, request: Request, job: Job, body: InferenceBody, text: TextFields
    ) -> Response | StreamingReply:
        if body.debug_render_only:
            async with WhileConnected(request.receive):
                finished = await generation.inspect(self._supervisor, job)
            debug = DebugInfo(finished.prompt)
            now = datetime.now(timezone.utc)
            shown = DebugReply(model=job.name, created_at=now, debug_info=debug, **_text_alone(text))
            return json_response(shown)
        if body.stream:
            return StreamingReply(self._lines(job, text), NDJSON, native_line)
        async with WhileConnected(request.receive):
            answer = await generation.answer(self._supervisor, job)
        entries = logprobs.native(answer.delta.logprobs)
        return json_response(_reply(job.name, text(answer.delta, 0), logprobs=entries, **_metrics(answer.ended)))

    async def _lines(self, job: Job, text: TextFields) -> AsyncGenerator[bytes, None]:
        num_tool_calls = 0
        async with aclosing(generation.events(self._supervisor, job)) as stream:
            async for event in stream:
                if isinstance(event, Ended):
                    yield json_line(_reply(job.name, text(Delta(), 0), **_metrics(event)))
                else:
                    entries = logprobs.native(event.logprobs)
                    yield json_line(_reply(job.name, text(event, num_tool_calls), logprobs=entries))
                    num_tool_calls += len(event.tool_calls)


def _check(body: InferenceBody) -> tuple[KeepAlive, Grammar | None]:
    """What needs no model to be found wrong. Raises InvalidRequest."""
    if not 0 <= body.top_logprobs <= 20:
        raise InvalidRequest("top_logprobs must be between 0 and 20", field="top_logprobs")
    grammar = shape.choose(parse_format(body.format), grammar=body.grammar, regex=body.regex)
    return parse_keep_alive(body.keep_alive), grammar


def _chat_ask(body: ChatBody, keep_alive: KeepAlive, grammar: Grammar | None, started_ns: int) -> Ask:
    return Ask(
        name=body.model,
        messages=tuple(to_message(index, message) for index, message in enumerate(body.messages)),
        options=body.options,
        keep_alive=keep_alive,
        started_ns=started_ns,
        tools=body.tools,
        think=generation.parse_think(body.think),
        grammar=grammar,
        num_top_logprobs=body.top_logprobs if body.logprobs else None,
        truncate=body.truncate,
        shift=body.shift,
        turn=turn_of(body),
    )


def _think(model: StoredModel, body: InferenceBody) -> Think:
    return generation.choose_think(model, body.model, generation.parse_think(body.think))


def _check_generate(body: GenerateBody) -> None:
    if body.raw and (body.template or body.system or body.context):
        raise InvalidRequest("raw mode does not support template, system, or context", field="raw")
    check_images("images", body.images)
    if body.template:
        raise unsupported("template")


def _generate_messages(model: StoredModel, body: GenerateBody) -> tuple[Message, ...]:
    """A prompt as a chat: what the Modelfile says first comes only with the first exchange, its SYSTEM with each."""
    system = body.system or model.system
    return (
        *((Message("system", system),) if system else ()),
        *(() if body.context else model.messages),
        Message("user", body.prompt),
    )


def _chat_text(delta: Delta, first_index: int) -> dict[str, Any]:
    calls = [
        ReplyToolCall(call.id, ReplyFunction(index, call.name, call.arguments))
        for index, call in enumerate(delta.tool_calls, first_index)
    ]
    message = ReplyMessage(role="assistant", content=delta.content, thinking=delta.thinking, tool_calls=calls)
    return {"message": message}


def _generate_text(delta: Delta, first_index: int) -> dict[str, Any]:
    return {"response": delta.content, "thinking": delta.thinking}


def _text_alone(text: TextFields) -> dict[str, Any]:
    return {name: value for name, value in text(Delta(), 0).items() if name in ("message", "response")}


def _reply(model: str, text: dict[str, Any], *, done_reason: str = "", **metrics: Any) -> InferenceReply:
    now = datetime.now(timezone.utc)
    return InferenceReply(
        model=model, created_at=now, done=bool(done_reason), done_reason=done_reason, **text, **metrics
    )


def _metrics(ended: Ended) -> dict[str, Any]:
    finished = ended.finished
    usage, timings = finished.usage, finished.timings
    return {
        "done_reason": finished.finish_reason,
        "context": finished.tokens,
        "total_duration": ended.total_ns,
        "load_duration": ended.load_ns,
        "prompt_eval_count": usage.num_prompt_tokens,
        "prompt_cached_count": usage.num_cached_tokens,
        "prompt_eval_duration": timings.prefill_ns,
        "eval_count": usage.num_output_tokens,
        "eval_duration": timings.decode_ns,
        "draft_count": usage.num_draft_tokens,
        "draft_accepted_count": usage.num_accepted_tokens,
        "truncated": usage.num_dropped_messages > 0 or usage.num_dropped_tokens > 0,
        "dropped_message_count": usage.num_dropped_messages,
        "dropped_token_count": usage.num_dropped_tokens,
    }
