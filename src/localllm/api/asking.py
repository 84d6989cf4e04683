"""From what any chat API asks for to the job that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request

from localllm.api import generation
from localllm.api.finder import ModelFinder
from localllm.api.generation import Job, Think
from localllm.api.options import parse_options
from localllm.api.turn import Turn
from localllm.api.wire import invalid
from localllm.daemon.supervisor import KeepAlive
from localllm.types import ChatRequest, Grammar, Message


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools may be called, or must be; `name` is the one that must, if it is a certain one."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    is_parallel: bool = True


@dataclass(frozen=True)
class Ask:
    """`name` is the model as the client wrote it, `options` are as on /api/chat, `fallbacks` this API's defaults.

    `must_think`: to ask a model to think that cannot is an error; otherwise it just does not.
    """

    name: str
    messages: tuple[Message, ...]
    options: Mapping[str, Any]
    keep_alive: KeepAlive
    started_ns: int
    fallbacks: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] = ()
    choice: ToolChoice = ToolChoice()
    think: Think = None
    must_think: bool = True
    grammar: Grammar | None = None
    num_top_logprobs: int | None = None
    truncate: bool = False
    shift: bool = False
    turn: Turn = Turn()


async def job_of(models: ModelFinder, request: Request, ask: Ask) -> Job:
    """Raises InvalidRequest or ModelNotFound."""
    model = await models.find(ask.name)
    generation.check_capability(model, ask.name, "chat")
    sampling, wishes = parse_options(model.parameters, ask.options, ask.fallbacks)
    # A call that is forced needs no talent for it, so any model will do.
    is_forced = ask.choice.mode == "required"
    tools = () if ask.choice.mode == "none" else generation.parse_tools(model, ask.tools, any_model=is_forced)
    can_think = ask.must_think or "thinking" in model.capabilities
    chat = ChatRequest(
        id=generation.new_id(),
        messages=(*generation.preamble(model, ask.messages), *ask.messages),
        tools=tools,
        think=generation.choose_think(model, ask.name, ask.think) if can_think else None,
        sampling=sampling,
        truncate=ask.truncate,
        shift=ask.shift,
        num_top_logprobs=ask.num_top_logprobs,
        grammar=ask.grammar,
        forced_tools=_forced(tools, ask.choice),
        max_tool_calls=0 if ask.choice.is_parallel else 1,
        **ask.turn.fields(request),
    )
    return Job(ask.name, model, chat, wishes, ask.keep_alive, ask.started_ns)


def _forced(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> tuple[str, ...]:
    """The names of the tools one of which must be called."""
    if choice.mode != "required":
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names:
        raise invalid("tool_choice", "there are no tools to choose from", hint="Send tools, or leave tool_choice out.")
    if not choice.name:
        return names
    if choice.name not in names:
        raise invalid("tool_choice", f'there is no tool "{choice.name}"', hint=f"There are: {', '.join(names)}.")
    return (choice.name,)
