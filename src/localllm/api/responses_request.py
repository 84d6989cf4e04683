"""From the way of asking that /v1/responses has to localllm's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from localllm.api import openai_request, shape
from localllm.api.asking import Ask
from localllm.api.generation import Think
from localllm.api.openai_request import parse_arguments
from localllm.api.options import parse_keep_alive
from localllm.api.turn import turn_of
from localllm.api.wire import invalid, unsupported
from localllm.api.wire_native import parse_role
from localllm.api.wire_responses import ResponsesBody
from localllm.types import Message, ToolCall

FALLBACKS = {"temperature": 1.0, "top_p": 1.0}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def to_ask(body: ResponsesBody, conversation: Sequence[Message], started_ns: int) -> Ask:
    """`conversation` is what `instructions` come before. Raises InvalidRequest or Unsupported that names the field."""
    if not body.model:
        raise invalid("model", "is required")
    if body.truncation not in ("auto", "disabled"):
        raise invalid("truncation", "must be auto or disabled")
    system = (Message("system", body.instructions),) if body.instructions else ()
    format = openai_request.parse_format(_nested(body.text.format), "text.format")
    return Ask(
        name=body.model,
        messages=(*system, *conversation),
        options=_options(body),
        keep_alive=parse_keep_alive(body.keep_alive),
        started_ns=started_ns,
        fallbacks=FALLBACKS,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)],
        choice=openai_request.tool_choice(body.tool_choice, is_parallel=body.parallel_tool_calls),
        think=_think(body),
        grammar=shape.choose(format, grammar=body.grammar, regex=body.regex),
        truncate=body.truncation == "auto",
        turn=turn_of(body),
    )


def _nested(format: Mapping[str, Any]) -> Mapping[str, Any]:
    """Here the schema stands beside the type, on /v1/chat/completions in an object of its own."""
    return {"type": format["type"], "json_schema": format} if format.get("type") == "json_schema" else format


def _think(body: ResponsesBody) -> Think:
    effort = body.reasoning.effort
    return None if effort is UNSET or effort is None else openai_request.parse_effort(effort, "reasoning.effort")


def _options(body: ResponsesBody) -> dict[str, Any]:
    options = dict(body.options)
    for field in ("temperature", "top_p"):
        if (value := getattr(body, field)) is not UNSET:
            options[field] = value
    if body.max_output_tokens is not UNSET:
        if body.max_output_tokens < 1:
            raise invalid("max_output_tokens", "must be at least 1")
        options["num_predict"] = body.max_output_tokens
    return options


def _tool(where: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported(f"{where}.type", f'"{kind}" is not a function, and there are no other tools here')
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


# ---- input ----


class _Conversation:
    """Collects messages; what the model said in several items in a row is one message again."""

    def __init__(self, before: Sequence[Message]) -> None:
        self.messages = list(before)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._names = {call.id: call.name for message in before for call in message.tool_calls}

    def add_item(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise invalid(where, "must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(where, item)
        elif kind == "reasoning":
            self._thoughts.append(_text(f"{where}.summary", item.get("summary") or item.get("content") or ""))
        elif kind == "function_call":
            id, name = _required(where, item, "call_id"), _required(where, item, "name")
            self._names[id] = name
            self._calls.append(ToolCall(id, name, parse_arguments(f"{where}.arguments", item.get("arguments", ""))))
        elif kind == "function_call_output":
            self.close()
            id, output = _required(where, item, "call_id"), _text(f"{where}.output", item.get("output", ""))
            self.messages.append(Message("tool", output, tool_name=self._names.get(id, ""), tool_call_id=id))
        else:
            raise unsupported(f"{where}.type", f'"{kind}" is not supported')

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role = parse_role(str(item.get("role", "")), f"{where}.role")
        text = _text(f"{where}.content", item.get("content"))
        if role == "assistant":
            self._texts.append(text)
        else:
            self.close()
            self.messages.append(Message(role, text))

    def close(self) -> None:
        if self._texts or self._thoughts or self._calls:
            texts, thoughts = "\n".join(self._texts), "\n".join(self._thoughts)
            self.messages.append(Message("assistant", texts, thinking=thoughts, tool_calls=tuple(self._calls)))
        self._texts, self._thoughts, self._calls = [], [], []


def to_conversation(input: Any, before: Sequence[Message]) -> tuple[Message, ...]:
    """`before` and what `input` adds to it. Raises InvalidRequest or Unsupported that names the item."""
    if isinstance(input, str):
        return (*before, Message("user", input))
    if not isinstance(input, list) or not (input or before):
        raise invalid("input", "must be a string or a list of items")
    conversation = _Conversation(before)
    for index, item in enumerate(input):
        conversation.add_item(f"input[{index}]", item)
    conversation.close()
    return tuple(conversation.messages)


def _required(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{field}", "is required")
    return value


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of parts")
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    elif isinstance(kind, str):
        raise unsupported(where, f'of type "{kind}" cannot be read')
    raise invalid(where, "must be an object with type and text")
