"""/v1/responses, as OpenAI's clients expect it."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from localllm.api import generation
from localllm.api.asking import job_of
from localllm.api.errors import openai_event
from localllm.api.generation import Ended, Job, Services
from localllm.api.progress import commentator
from localllm.api.responses_request import to_ask, to_conversation
from localllm.api.streaming import SSE, StreamingReply, WhileConnected
from localllm.api.wire import decode, json_bytes, json_response, read_body
from localllm.api.wire_responses import (
    Event,
    Failure,
    Incomplete,
    InputDetails,
    Item,
    OutputDetails,
    Part,
    Response,
    ResponsesBody,
    Usage,
)
from localllm.errors import InvalidRequest, LocalLLMError
from localllm.types import Delta, Message, ToolCall

MAX_CONVERSATIONS = 256
MAX_CHARACTERS = 32 << 20


class Memory:
    """The conversations that a response may continue: the last ones, by its id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._num_characters = 0

    def find(self, id: str) -> tuple[Message, ...]:
        """Raises InvalidRequest when it is not, or no longer, known."""
        if id not in self._kept:
            raise InvalidRequest(
                f'there is no response "{id}"',
                hint="Only the last ones are kept, and none across a restart: send the whole conversation.",
                field="previous_response_id",
            )
        self._kept.move_to_end(id)
        return self._kept[id]

    def keep(self, id: str, messages: tuple[Message, ...]) -> None:
        self._kept[id] = messages
        self._num_characters += _length(messages)
        while len(self._kept) > MAX_CONVERSATIONS or self._num_characters > MAX_CHARACTERS:
            _, dropped = self._kept.popitem(last=False)
            self._num_characters -= _length(dropped)


def _length(messages: Sequence[Message]) -> int:
    return sum(len(message.content) + len(message.thinking) for message in messages)


class ResponsesRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models
        self._memory = Memory()

    async def create(self, request: Request) -> HTTPResponse | StreamingReply:
        started_ns = time.perf_counter_ns()
        body = decode(await read_body(request), ResponsesBody)
        before = self._memory.find(body.previous_response_id) if body.previous_response_id else ()
        conversation = to_conversation(body.input, before)
        job = await job_of(self._models, request, to_ask(body, conversation, started_ns))
        new = _NewResponse(body)
        if body.stream:
            beat = commentator(self._supervisor, job.request.id)
            return StreamingReply(self._events(job, new, conversation), SSE, new.failure, beat)
        async with WhileConnected(request.receive):
            answer = await generation.answer(self._supervisor, job)
        new.take(answer.delta, answer.ended)
        self._keep(new, conversation)
        return json_response(new.response)

    async def _events(
        self, job: Job, new: _NewResponse, conversation: tuple[Message, ...]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.events(self._supervisor, job)) as stream:
            async for event in stream:
                is_end = isinstance(event, Ended)
                for part in new.end(event) if isinstance(event, Ended) else new.add(event):
                    yield encode_event(part)
                if is_end:
                    self._keep(new, conversation)

    def _keep(self, new: _NewResponse, conversation: tuple[Message, ...]) -> None:
        if new.response.store:
            self._memory.keep(new.response.id, (*conversation, new.message))


def encode_event(event: Event) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + json_bytes(event) + b"\n\n"


class _NewResponse:
    """Makes one answer and tells each step of it. Its items come one after the other: thought, text, calls."""

    def __init__(self, body: ResponsesBody) -> None:
        self.response = Response(
            id=f"resp_{secrets.token_hex(24)}",
            created_at=int(time.time()),
            status="in_progress",
            model=body.model,
            output=[],
            instructions=body.instructions or None,
            max_output_tokens=None if body.max_output_tokens is UNSET else body.max_output_tokens,
            metadata=body.metadata,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id or None,
            store=body.store,
            temperature=None if body.temperature is UNSET else body.temperature,
            top_p=None if body.top_p is UNSET else body.top_p,
            text={"format": body.text.format or {"type": "text"}},
            tool_choice=body.tool_choice,
            tools=body.tools,
            truncation=body.truncation,
        )
        self._number = -1
        self._open: Item | None = None
        self._calls: list[ToolCall] = []

    @property
    def message(self) -> Message:
        """The answer, as the conversation goes on with it."""
        texts = {"message": "", "reasoning": ""}
        for item in self.response.output:
            if item.type in texts:
                texts[item.type] += _part_of(item).text
        return Message("assistant", texts["message"], thinking=texts["reasoning"], tool_calls=tuple(self._calls))

    def take(self, delta: Delta, ended: Ended) -> None:
        """A whole answer, of which nobody wants to hear the steps."""
        for _ in (*self.add(delta), *self.end(ended)):
            pass

    def add(self, delta: Delta) -> Iterator[Event]:
        yield from self._start()
        if delta.thinking:
            yield from self._say("reasoning", delta.thinking)
        if delta.content:
            yield from self._say("message", delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)

    def end(self, ended: Ended) -> Iterator[Event]:
        yield from self._start()
        if not self.response.output:
            yield from self._say("message", "")
        yield from self._close()
        self.response.usage = _usage(ended)
        is_cut = ended.finished.finish_reason == "length"
        self.response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response.incomplete_details = Incomplete("max_output_tokens")
        yield self._event(f"response.{self.response.status}", response=self.response)

    def failure(self, error: LocalLLMError) -> bytes:
        """The last event of a stream that could not be finished."""
        if self._number < 0:
            return openai_event(error)
        self.response.status = "failed"
        self.response.error = Failure(error.code, error.message)
        return encode_event(self._event("response.failed", response=self.response))

    def _start(self) -> Iterator[Event]:
        if self._number < 0:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open.type != kind:
            yield from self._close()
            yield from self._begin(kind)
        assert self._open is not None
        _part_of(self._open).text += text
        yield self._text_event(self._open, "delta", delta=text)

    def _begin(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            id = f"msg_{secrets.token_hex(12)}"
            item = Item(type=kind, id=id, status="in_progress", role="assistant", content=[])
            part = Part(type="output_text", text="", annotations=[])
        else:
            item = Item(type=kind, id=f"rs_{secrets.token_hex(12)}", summary=[])
            part = Part(type="summary_text", text="")
        yield from self._append(item)
        (item.content if kind == "message" else item.summary).append(part)  # type: ignore[union-attr]
        yield self._part_event(item, "added")

    def _append(self, item: Item) -> Iterator[Event]:
        self.response.output.append(item)
        self._open = item
        yield self._event("response.output_item.added", item=item, output_index=self._index)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close()
        self._calls.append(call)
        item = Item(type="function_call", id=f"fc_{secrets.token_hex(12)}", status="in_progress", call_id=call.id)
        item.name, item.arguments = call.name, ""
        yield from self._append(item)
        item.arguments = json_bytes(call.arguments).decode()
        at: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        yield self._event("response.function_call_arguments.delta", delta=item.arguments, **at)
        yield self._event("response.function_call_arguments.done", arguments=item.arguments, name=item.name, **at)
        yield from self._close()

    def _close(self) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        if item.type != "function_call":
            yield self._text_event(item, "done", text=_part_of(item).text)
            yield self._part_event(item, "done")
        if item.type != "reasoning":
            item.status = "completed"
        yield self._event("response.output_item.done", item=item, output_index=self._index)

    def _text_event(self, item: Item, what: str, **fields: Any) -> Event:
        if item.type == "message":
            return self._event(f"response.output_text.{what}", **self._at(item), logprobs=[], **fields)
        return self._event(f"response.reasoning_summary_text.{what}", **self._at(item), **fields)

    def _part_event(self, item: Item, what: str) -> Event:
        kind = "content_part" if item.type == "message" else "reasoning_summary_part"
        return self._event(f"response.{kind}.{what}", **self._at(item), part=structs.replace(_part_of(item)))

    def _at(self, item: Item) -> dict[str, Any]:
        which = "content_index" if item.type == "message" else "summary_index"
        return {"item_id": item.id, "output_index": self._index, which: 0}

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return Event(type=kind, sequence_number=self._number, **fields)


def _part_of(item: Item) -> Part:
    """Thoughts and messages have one each."""
    parts = item.content if item.type == "message" else item.summary
    assert parts is not UNSET
    return parts[0]


def _usage(ended: Ended) -> Usage:
    usage = ended.finished.usage
    return Usage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputDetails(usage.num_cached_tokens),
        output_tokens=usage.num_output_tokens,
        output_tokens_details=OutputDetails(ended.num_thinking_tokens),
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
    )
