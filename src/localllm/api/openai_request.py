"""From OpenAI's way of asking to localllm's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from localllm.api import shape
from localllm.api.asking import ToolChoice
from localllm.api.generation import Think, parse_think
from localllm.api.wire import check_integers, invalid, unsupported
from localllm.api.wire_native import parse_role
from localllm.api.wire_openai import ChatCompletionBody, CompletionBody, MessageBody, ToolCallBody
from localllm.errors import InvalidRequest
from localllm.types import ChatRequest, Grammar, Message, ToolCall

MAX_CHOICES = 128
MAX_BIAS = 100
_EFFORTS: dict[str, Think] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "max": "max",
    "xhigh": "max",
    "ultra": "max",
}


def grammar_of(body: ChatCompletionBody) -> Grammar | None:
    """Raises InvalidRequest for an unknown format."""
    return shape.choose(parse_format(body.response_format, "response_format"), grammar=body.grammar, regex=body.regex)


def parse_format(format: Mapping[str, Any], field: str) -> Grammar | None:
    """Raises InvalidRequest that names the part of `field`."""
    kind = format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", shape.ANY_OBJECT, field)
    if kind != "json_schema":
        raise invalid(f"{field}.type", "must be text, json_object or json_schema")
    wrapper = format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise invalid(f"{field}.json_schema.schema", "must be an object")
    return shape.of_schema(schema, f"{field}.json_schema.schema")


def tool_choice(value: Any, *, is_parallel: bool) -> ToolChoice:
    """Raises InvalidRequest or Unsupported."""
    if value in ("auto", "none", "required"):
        return ToolChoice(value, is_parallel=is_parallel)
    if isinstance(value, dict) and value.get("type", "function") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return ToolChoice("required", name, is_parallel=is_parallel)
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
        raise unsupported("tool_choice", f'of type "{value["type"]}" is not supported')
    raise invalid("tool_choice", "must be auto, none, required or a function by its name")


def variants(request: ChatRequest, n: int) -> tuple[ChatRequest, ...]:
    """The requests for `n` answers to one prompt; with a seed, each has one of its own. Raises InvalidRequest."""
    if not 1 <= n <= MAX_CHOICES:
        raise invalid("n", f"must be between 1 and {MAX_CHOICES}")
    seed = request.sampling.seed
    return tuple(
        msgspec.structs.replace(
            request,
            id=request.id if index == 0 else f"{request.id}.{index}",
            sampling=msgspec.structs.replace(request.sampling, seed=None if seed is None else seed + index),
        )
        for index in range(n)
    )


def think_of(body: ChatCompletionBody) -> Think:
    """Raises InvalidRequest for an unknown effort."""
    effort = body.reasoning_effort if body.reasoning_effort is not UNSET else body.reasoning.effort
    if effort is UNSET or effort is None:
        return parse_think(body.think)
    return parse_effort(effort, "reasoning_effort")


def parse_effort(effort: Any, field: str) -> Think:
    """Raises InvalidRequest for an unknown one."""
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise invalid(field, f"must be one of {', '.join(_EFFORTS)}")
    return _EFFORTS[effort]


def options_of(body: ChatCompletionBody | CompletionBody) -> dict[str, Any]:
    """`options` with the fields that OpenAI has for the same things, which come first."""
    options = dict(body.options)
    for field in ("seed", "temperature", "top_p", "frequency_penalty", "presence_penalty", "num_ctx"):
        if (value := getattr(body, field)) is not UNSET:
            options[field] = value
    if body.logit_bias:
        if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in body.logit_bias.values()):
            raise invalid("logit_bias", f"must have values between -{MAX_BIAS} and {MAX_BIAS}")
        options["logit_bias"] = body.logit_bias
    if body.stop is not UNSET:
        options["stop"] = [body.stop] if isinstance(body.stop, str) else list(body.stop)
    for field in ("max_tokens", "max_completion_tokens"):
        if (limit := getattr(body, field, UNSET)) is not UNSET:
            if limit < 1:
                raise invalid(field, "must be at least 1")
            options["num_predict"] = limit
    return options


def to_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Raises InvalidRequest or Unsupported that names the message."""
    names: dict[str, str] = {}
    messages = []
    for index, body in enumerate(bodies):
        messages.append(_message(index, body, names))
        names |= {call.id: call.name for call in messages[-1].tool_calls}
    return tuple(messages)


def _message(index: int, body: MessageBody, names: Mapping[str, str]) -> Message:
    role = parse_role(body.role, f"messages[{index}].role")
    return Message(
        role=role,
        content=_content(index, body),
        thinking=body.reasoning or body.reasoning_content,
        tool_calls=tuple(_tool_call(f"messages[{index}].tool_calls[{i}]", c) for i, c in enumerate(body.tool_calls)),
        tool_name=(body.name or names.get(body.tool_call_id, "")) if role == "tool" else "",
        tool_call_id=body.tool_call_id,
    )


def _content(index: int, body: MessageBody) -> str:
    """Text parts make one message, a line each."""
    where = f"messages[{index}].content"
    if isinstance(body.content, str):
        return body.content
    if isinstance(body.content, list):
        return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(body.content))
    if body.content is UNSET and body.tool_calls:
        return ""
    what = "<nil>" if body.content is UNSET else type(body.content).__name__
    raise InvalidRequest(f"invalid message content type: {what}", field=where)


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if kind in ("text", "refusal") else None
    if isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise unsupported(where, f'of type "{kind}" is not supported yet')
    raise invalid(where, "must be an object with type and text")


def _tool_call(where: str, body: ToolCallBody) -> ToolCall:
    return ToolCall(
        body.id, body.function.name, parse_arguments(f"{where}.function.arguments", body.function.arguments)
    )


def parse_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """An object, or JSON text of one. Raises InvalidRequest."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            raise invalid(where, "is not valid JSON", hint="Send the arguments as they were received.") from None
    arguments = {} if arguments is UNSET else arguments
    if not isinstance(arguments, dict):
        raise invalid(where, "must be a JSON object")
    check_integers(arguments, where)
    return arguments
