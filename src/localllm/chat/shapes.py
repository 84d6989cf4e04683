"""What a template is given: messages as it wants them, found out by trying.

Templates are written for OpenAI's form of messages, but differ in details that they cannot be asked about. A template
that gets the wrong one fails, or prints a Python object, or leaves the text out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
# Renders messages in a shape; None when the template does not accept them.
TryRender = Callable[["Shape", Sequence[Message], Tools], str | None]

# Some templates refuse other lengths.
_SHORT_ID = 9

_WORD, _TOOL, _KEY, _VALUE = "qneedlewordq", "qneedletoolq", "qneedlekeyq", "qneedlevalueq"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
    },
}
_PROBE_TEXT = (Message("user", _WORD),)
_PROBE_CALL = (
    Message("user", "Probe."),
    Message("assistant", tool_calls=(ToolCall("call_0123abcd", _TOOL, {_KEY: _VALUE}),)),
    Message("tool", "Probed.", tool_name=_TOOL, tool_call_id="call_0123abcd"),
)


@dataclass(frozen=True)
class Shape:
    """All False is the usual form."""

    # Content as a list of parts, as multimodal templates have it.
    has_parts: bool = False
    # No tools as an empty list rather than as None.
    has_empty_tools: bool = False
    # A call's arguments as JSON text rather than as an object.
    has_text_arguments: bool = False
    # Ids of calls with exactly nine letters or digits.
    has_short_ids: bool = False
    # The content of a message that only calls tools as None rather than as an empty text.
    has_null_content: bool = False
    # The template does not tell the model about the tools it is given.
    hides_tools: bool = False


def find_shape(try_render: TryRender) -> Shape:
    """The shape in which a text, and then a tool call, gets through; the usual one where none does."""
    options = (Shape(has_empty_tools=tools, has_parts=parts) for tools, parts in _switches(2))
    shape = next((s for s in options if _shows_text(try_render(s, _PROBE_TEXT, ()))), Shape())
    shape = replace(shape, hides_tools=_TOOL not in (try_render(shape, _PROBE_TEXT, (_PROBE_TOOL,)) or ""))
    for text, short, null in _switches(3):
        candidate = replace(shape, has_text_arguments=text, has_short_ids=short, has_null_content=null)
        prompt = try_render(candidate, _PROBE_CALL, (_PROBE_TOOL,))
        if prompt is not None and _VALUE in prompt and f"'{_KEY}'" not in prompt:
            return candidate
    return shape


def _shows_text(prompt: str | None) -> bool:
    """Not when it prints the parts themselves, as Python writes them."""
    return prompt is not None and _WORD in prompt and "'text'" not in prompt


def _switches(count: int) -> list[tuple[bool, ...]]:
    """All combinations, those with fewest switched on first."""
    return sorted(itertools.product((False, True), repeat=count), key=sum)


def as_dict(message: Message, shape: Shape, encode: Callable[[Any], str]) -> dict[str, Any]:
    """`encode` writes JSON."""
    result: dict[str, Any] = {"role": message.role, "content": _content(message, shape)}
    if message.thinking:
        result["reasoning_content"] = result["thinking"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [_call_as_dict(call, shape, encode) for call in message.tool_calls]
    if message.tool_name:
        result["name"] = message.tool_name
    if message.tool_call_id:
        result["tool_call_id"] = _id(message.tool_call_id, shape)
    return result


def _content(message: Message, shape: Shape) -> Any:
    if shape.has_null_content and message.tool_calls and not message.content:
        return None
    return [{"type": "text", "text": message.content}] if shape.has_parts else message.content


def _call_as_dict(call: ToolCall, shape: Shape, encode: Callable[[Any], str]) -> dict[str, Any]:
    arguments = encode(call.arguments) if shape.has_text_arguments else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"id": _id(call.id, shape), "type": "function", "function": function}


def _id(id: str, shape: Shape) -> str:
    if not shape.has_short_ids or (len(id) == _SHORT_ID and id.isalnum()):
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID]
