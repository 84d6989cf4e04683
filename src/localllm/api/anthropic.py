"""/v1/messages, as Anthropic's clients expect it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation
from localllm.api.anthropic_request import to_ask, wants_thinking
from localllm.api.asking import job_of
from localllm.api.errors import anthropic_event
from localllm.api.generation import Ended, Job, Services
from localllm.api.progress import commentator
from localllm.api.streaming import SSE, StreamingReply, WhileConnected
from localllm.api.wire import decode, json_bytes, json_response, read_body
from localllm.api.wire_anthropic import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensBody,
    Event,
    InputDelta,
    MessageDelta,
    MessageReply,
    MessagesBody,
    MessageStart,
    MessageStop,
    Ping,
    Stopped,
    TextDelta,
    ThinkingDelta,
    TokenCount,
    Usage,
)
from localllm.types import Delta, Finished, ToolCall


class AnthropicRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models

    async def messages(self, request: Request) -> Response | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), MessagesBody)
        job = await job_of(self._models, request, to_ask(body, started_ns))
        new = _NewMessage(job.name, shows_thinking=wants_thinking(body))
        if body.stream:
            comment, ping = commentator(self._supervisor, job.request.id), encode_event(Ping())
            return StreamingReply(self._events(job, new), SSE, anthropic_event, lambda: comment() + ping)
        async with WhileConnected(request.receive):
            answer = await generation.answer(self._supervisor, job)
        return json_response(new.whole(answer.delta, answer.ended.finished))

    async def count_tokens(self, request: Request) -> Response:
        """Loads the model: only it knows its template and its tokens."""
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), CountTokensBody)
        job = await job_of(self._models, request, to_ask(body, started_ns))
        async with WhileConnected(request.receive):
            finished = await generation.inspect(self._supervisor, job)
        return json_response(TokenCount(finished.usage.num_prompt_tokens))

    async def _events(self, job: Job, new: _NewMessage) -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.events(self._supervisor, job)) as stream:
            async for event in stream:
                for part in new.end(event.finished) if isinstance(event, Ended) else new.events(event):
                    yield encode_event(part)


def encode_event(event: Event) -> bytes:
    kind = type(event).__struct_config__.tag
    assert isinstance(kind, str)
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes(event) + b"\n\n"


class _NewMessage:
    """Makes one answer: whole, or as events. Blocks of a stream come one after the other, never interleaved."""

    def __init__(self, model: str, *, shows_thinking: bool) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._shows_thinking = shows_thinking
        self._is_started = False
        self._index = -1
        self._open = ""
        self._has_called = False

    def whole(self, delta: Delta, finished: Finished) -> MessageReply:
        blocks = []
        if delta.thinking and self._shows_thinking:
            blocks.append(Block(type="thinking", thinking=delta.thinking, signature=""))
        if delta.content or not delta.tool_calls:
            blocks.append(Block(type="text", text=delta.content))
        for call in delta.tool_calls:
            blocks.append(Block(type="tool_use", id=call.id, name=call.name, input=call.arguments))
        self._has_called = bool(delta.tool_calls)
        stopped = self._stopped(finished)
        return self._reply(blocks, stopped.stop_reason, stopped.stop_sequence, _usage(finished))

    def events(self, delta: Delta) -> Iterator[Event]:
        yield from self._start()
        if delta.thinking and self._shows_thinking:
            yield from self._switch("thinking", Block(type="thinking", thinking="", signature=""))
            yield ContentBlockDelta(self._index, ThinkingDelta(delta.thinking))
        if delta.content:
            yield from self._switch("text", Block(type="text", text=""))
            yield ContentBlockDelta(self._index, TextDelta(delta.content))
        for call in delta.tool_calls:
            yield from self._call(call)

    def end(self, finished: Finished) -> Iterator[Event]:
        yield from self._start()
        yield from self._switch("")
        yield MessageDelta(self._stopped(finished), _usage(finished))
        yield MessageStop()

    def _start(self) -> Iterator[Event]:
        if not self._is_started:
            self._is_started = True
            yield MessageStart(self._reply([], None, None, Usage()))
            yield Ping()

    def _call(self, call: ToolCall) -> Iterator[Event]:
        self._has_called = True
        yield from self._switch("")
        yield from self._switch("tool_use", Block(type="tool_use", id=call.id, name=call.name, input={}))
        yield ContentBlockDelta(self._index, InputDelta(json_bytes(call.arguments).decode()))
        yield from self._switch("")

    def _switch(self, kind: str, block: Block | None = None) -> Iterator[Event]:
        """End the open block if it is of another kind, and begin one of this kind."""
        if kind == self._open:
            return
        if self._open:
            yield ContentBlockStop(self._index)
        self._open = kind
        if block is not None:
            self._index += 1
            yield ContentBlockStart(self._index, block)

    def _stopped(self, finished: Finished) -> Stopped:
        if self._has_called:
            return Stopped("tool_use", None)
        if finished.finish_reason == "length":
            return Stopped("max_tokens", None)
        return Stopped("stop_sequence", finished.stopped_by) if finished.stopped_by else Stopped("end_turn", None)

    def _reply(
        self, blocks: list[Block], stop_reason: str | None, stop_sequence: str | None, usage: Usage
    ) -> MessageReply:
        return MessageReply(
            id=self._id,
            model=self._model,
            content=blocks,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )


def _usage(finished: Finished) -> Usage:
    usage = finished.usage
    return Usage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
        output_tokens=usage.num_output_tokens,
    )
