"""What all routes that generate text have in common: from a name and wishes to a stream of deltas and its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request

from localllm import log
from localllm.api import access, deadline
from localllm.api.finder import ModelFinder
from localllm.api.wire import check_integers
from localllm.daemon.supervisor import Granted, KeepAlive, Supervisor
from localllm.errors import InvalidRequest, LocalLLMError, RequestCancelled
from localllm.store.library import ModelStore, StoredModel
from localllm.types import ChatRequest, Delta, Finished, LoadWishes, Message, ThinkLevel, TokenLogprob, ToolCall

Think = bool | ThinkLevel | None
_serial = itertools.count(1)
THINK_LEVELS = ("low", "medium", "high", "max")


@dataclass(frozen=True)
class Job:
    """One request for text. `name` is the model as the client wrote it; `started_ns` is when the request came in."""

    name: str
    model: StoredModel
    request: ChatRequest
    wishes: LoadWishes
    keep_alive: KeepAlive
    started_ns: int


@dataclass(frozen=True)
class Ended:
    """The good end of a job. Durations in nanoseconds; `load_ns` is all the time until the model was there for it.

    `num_thinking_tokens` are those of the deltas that had thinking.
    """

    finished: Finished
    load_ns: int
    total_ns: int
    num_thinking_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """A whole answer: all its deltas as one, and its end."""

    delta: Delta
    ended: Ended


@dataclass(frozen=True)
class Services:
    """What the routes work with."""

    store: ModelStore
    supervisor: Supervisor
    models: ModelFinder


async def events(supervisor: Supervisor, job: Job) -> AsyncGenerator[Delta | Ended, None]:
    """The deltas of an answer and then exactly one Ended. Raises LocalLLMError; closing it cancels the request."""
    deadline.check(supervisor.eta_seconds(job.model))
    granted_ns, num_thinking_tokens = job.started_ns, 0
    stream = supervisor.generate(job.model, job.request, job.wishes, job.keep_alive)
    async with aclosing(stream):
        with access.metered(job.model, is_free=job.request.inspect) as meter:
            async for event in stream:
                meter(event)
                if isinstance(event, Delta):
                    num_thinking_tokens += event.num_tokens if event.thinking else 0
                    yield event
                elif isinstance(event, Granted):
                    granted_ns = time.perf_counter_ns()
                elif isinstance(event, Finished):
                    if event.finish_reason == "cancelled":
                        raise RequestCancelled("the request was cancelled before its answer was complete")
                    now = time.perf_counter_ns()
                    yield Ended(event, granted_ns - job.started_ns, now - job.started_ns, num_thinking_tokens)


async def choices(supervisor: Supervisor, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta | Ended], None]:
    """The events of several jobs as they come, each with the index of its job. The end of one is that of all.

    Jobs of one prompt have it computed once: the engine lets the later ones wait for it.
    """
    queue: asyncio.Queue[tuple[int, Delta | Ended | Exception]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pass_on(supervisor, job, index, queue)) for index, job in enumerate(jobs)]
    num_open = len(tasks)
    try:
        while num_open:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_open -= isinstance(event, Ended)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    supervisor: Supervisor, job: Job, index: int, queue: asyncio.Queue[tuple[int, Delta | Ended | Exception]]
) -> None:
    try:
        async with aclosing(events(supervisor, job)) as stream:
            async for event in stream:
                queue.put_nowait((index, event))
    except Exception as error:
        queue.put_nowait((index, error))


async def answers(supervisor: Supervisor, jobs: Sequence[Job]) -> list[Answer]:
    """The whole answers of several jobs. Raises what `events` raises for the first that fails."""
    tasks = [asyncio.create_task(answer(supervisor, job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answer(supervisor: Supervisor, job: Job) -> Answer:
    """The whole answer at once. Raises what `events` raises."""
    content: list[str] = []
    thinking: list[str] = []
    tool_calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    ended: Ended | None = None
    async with aclosing(events(supervisor, job)) as stream:
        async for event in stream:
            if isinstance(event, Ended):
                ended = event
            else:
                content.append(event.content)
                thinking.append(event.thinking)
                tool_calls += event.tool_calls
                logprobs += event.logprobs
    if ended is None:
        raise LocalLLMError("the answer ended without an end", hint="The daemon's log has more.")
    delta = Delta("".join(content), "".join(thinking), tuple(tool_calls), logprobs=tuple(logprobs))
    return Answer(delta, ended)


async def inspect(supervisor: Supervisor, job: Job) -> Finished:
    """The prompt that the job would send to its model, as text and tokens. Raises what `events` raises."""
    request = msgspec.structs.replace(job.request, inspect=True)
    async with aclosing(events(supervisor, replace(job, request=request))) as stream:
        async for event in stream:
            if isinstance(event, Ended):
                return event.finished
    raise LocalLLMError("the runner did not say what the prompt is", hint="The daemon's log has more.")


def preamble(model: StoredModel, messages: Sequence[Message]) -> tuple[Message, ...]:
    """What a Modelfile puts before a conversation: its SYSTEM, unless that begins with one, and its MESSAGEs."""
    has_system = bool(messages) and messages[0].role == "system"
    system = (Message("system", model.system),) if model.system and not has_system else ()
    return (*system, *model.messages)


def parse_think(value: Any) -> Think:
    """Raises InvalidRequest for anything but a boolean or a level. None when nothing was asked for."""
    if value is None or value is msgspec.UNSET:
        return None
    if isinstance(value, bool):
        return value
    allowed = 'must be "high", "medium", "low", "max", true, or false'
    if not isinstance(value, str):
        raise InvalidRequest(f"think must be a boolean or string ({allowed.removeprefix('must be ')})", field="think")
    if value not in THINK_LEVELS:
        raise InvalidRequest(f'invalid think value: "{value}" ({allowed})', field="think")
    return value  # type: ignore[return-value]


def choose_think(model: StoredModel, name: str, think: Think) -> Think:
    """A model that can think does so unless told otherwise. Raises InvalidRequest when one that cannot is told to."""
    if "thinking" in model.capabilities:
        return True if think is None else think
    if think:
        raise InvalidRequest(f'"{name}" does not support thinking', hint="Leave think out.", field="think")
    return None


def check_capability(model: StoredModel, name: str, what: str) -> None:
    """`what` is "generate" or "chat". Raises InvalidRequest for a model that does not generate text."""
    if "completion" not in model.capabilities:
        raise InvalidRequest(f'"{name}" does not support {what}', hint="It is a model for embeddings.", field="model")


def parse_tools(model: StoredModel, tools: Sequence[Any], *, any_model: bool = False) -> tuple[dict[str, Any], ...]:
    """The tools, checked as far as templates need it. Raises InvalidRequest that names the tool."""
    if not tools:
        return ()
    if "tools" not in model.capabilities and not any_model:
        raise InvalidRequest(f"{model.name.full} does not support tools", field="tools")
    return tuple(_tool(index, tool) for index, tool in enumerate(tools))


def _tool(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise InvalidRequest(f'"{where}" must be an object', field=where)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f'"{where}.type" must be "function"', field=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f'"{where}.function.name" is missing', field=f"{where}.function.name")
    check_integers(tool, where)
    return tool


def new_id() -> str:
    """Identifies a request to the runner: what the log calls it, made unique, as a client's own id need not be."""
    return f"{log.request_id.get()}.{next(_serial)}"


def client_of(request: Request) -> str:
    """Groups the requests of one client, by key or address, to share the engine fairly between clients."""
    key = access.current_key()
    if key is not None:
        return f"key {key.name}"
    return request.client.host if request.client is not None else ""
