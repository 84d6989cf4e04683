"""From Anthropic's way of asking to localllm's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from localllm.api import shape
from localllm.api.asking import Ask, ToolChoice
from localllm.api.generation import Think
from localllm.api.options import parse_keep_alive
from localllm.api.turn import turn_of
from localllm.api.wire import check_integers, invalid, unsupported
from localllm.api.wire_anthropic import CountTokensBody, MessageBody, MessagesBody, ToolChoiceBody
from localllm.types import Grammar, Message, ToolCall

_EFFORTS: dict[str, Think] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max"}
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


def to_ask(body: CountTokensBody, started_ns: int) -> Ask:
    """Raises InvalidRequest or Unsupported that names the field."""
    if not body.model:
        raise invalid("model", "field required")
    if not body.messages:
        raise invalid("messages", "at least one message is required")
    return Ask(
        name=body.model,
        messages=(*_system(body.system), *_messages(body.messages)),
        options=_options(body),
        keep_alive=parse_keep_alive(body.keep_alive),
        started_ns=started_ns,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)],
        choice=_choice(body.tool_choice),
        think=wants_thinking(body) and (_effort(body) or True),
        must_think=False,
        grammar=shape.choose(_format(body), grammar=body.grammar, regex=body.regex),
        turn=turn_of(body),
    )


def wants_thinking(body: CountTokensBody) -> bool:
    """Raises InvalidRequest for an unknown kind."""
    if body.thinking.type not in ("enabled", "adaptive", "disabled"):
        raise invalid("thinking.type", "must be enabled, adaptive or disabled")
    return body.thinking.type != "disabled"


def _effort(body: CountTokensBody) -> Think:
    effort = body.output_config.effort
    if effort and effort not in _EFFORTS:
        raise invalid("output_config.effort", f"must be one of {', '.join(_EFFORTS)}")
    return _EFFORTS.get(effort)


def _format(body: CountTokensBody) -> Grammar | None:
    format = body.output_config.format
    if format is UNSET:
        return None
    if format.type != "json_schema" or not isinstance(format.schema, dict):
        raise invalid("output_config.format", "must be of type json_schema and have a schema")
    return shape.of_schema(format.schema, "output_config.format.schema")


def _options(body: CountTokensBody) -> dict[str, Any]:
    options = dict(body.options)
    if not isinstance(body, MessagesBody):
        return options
    if body.max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1", hint="Anthropic's API has no default for it.")
    options["num_predict"] = body.max_tokens
    for field in ("temperature", "top_p", "top_k"):
        if (value := getattr(body, field)) is not UNSET:
            options[field] = value
    if body.stop_sequences:
        options["stop"] = list(body.stop_sequences)
    return options


def _choice(body: ToolChoiceBody) -> ToolChoice:
    mode = _CHOICES.get(body.type)
    if mode is None:
        raise invalid("tool_choice.type", "must be auto, any, tool or none")
    if body.type == "tool" and not body.name:
        raise invalid("tool_choice.name", "field required")
    name = body.name if body.type == "tool" else ""
    return ToolChoice(mode, name, is_parallel=not body.disable_parallel_tool_use)  # type: ignore[arg-type]


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise invalid(f"{where}.name", "field required")
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise unsupported(f"{where}.type", f'"{kind}" is a tool of Anthropic\'s own servers')
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object", "properties": {}}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


# ---- messages ----


def _system(system: Any) -> tuple[Message, ...]:
    if system is UNSET or system == "" or system == []:
        return ()
    return (Message("system", _text("system", system)),)


def _messages(bodies: tuple[MessageBody, ...]) -> list[Message]:
    names: dict[str, str] = {}
    messages: list[Message] = []
    for index, body in enumerate(bodies):
        where = f"messages[{index}]"
        if body.role == "user":
            messages += _user(where, body.content, names)
        elif body.role == "assistant":
            messages.append(_assistant(where, body.content, names))
        elif body.role == "system":
            messages.append(Message("system", _text(f"{where}.content", body.content)))
        else:
            raise invalid(f"{where}.role", f'"{body.role}" is not user or assistant')
    return messages


def _user(where: str, content: Any, names: Mapping[str, str]) -> list[Message]:
    """The results of tools come before what the user says."""
    if isinstance(content, str):
        return [Message("user", content)]
    results: list[Message] = []
    texts: list[str] = []
    for at, block in _blocks(f"{where}.content", content):
        if block.get("type") == "tool_result":
            id = block.get("tool_use_id")
            if not isinstance(id, str) or not id:
                raise invalid(f"{at}.tool_use_id", "field required")
            result = block.get("content")
            text = "" if result is None or result == [] else _text(f"{at}.content", result)
            text = f"Error: {text}" if block.get("is_error") is True else text
            results.append(Message("tool", text, tool_name=names.get(id, ""), tool_call_id=id))
        else:
            texts.append(_block_text(at, block))
    return [*results, *([Message("user", "\n".join(texts))] if texts or not results else [])]


def _assistant(where: str, content: Any, names: dict[str, str]) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts, thoughts, calls = [], [], []
    for at, block in _blocks(f"{where}.content", content):
        kind = block.get("type")
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_tool_use(at, block))
            names[calls[-1].id] = calls[-1].name
        elif kind != "redacted_thinking":
            texts.append(_block_text(at, block))
    return Message("assistant", "\n".join(texts), thinking="\n".join(thoughts), tool_calls=tuple(calls))


def _tool_use(at: str, block: Mapping[str, Any]) -> ToolCall:
    for field in ("id", "name"):
        if not isinstance(block.get(field), str) or not block[field]:
            raise invalid(f"{at}.{field}", "field required")
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise invalid(f"{at}.input", "must be an object")
    check_integers(arguments, f"{at}.input")
    return ToolCall(block["id"], block["name"], arguments)


def _blocks(where: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{where}[{index}]", "must be an object")
    return [(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(at, block) for at, block in _blocks(where, content))


def _block_text(at: str, block: Mapping[str, Any]) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if kind == "text" or not isinstance(kind, str):
        raise invalid(at, "must be a block with type and text")
    if kind == "image":
        raise unsupported(at, "images cannot be read")
    raise unsupported(at, f'blocks of type "{kind}" cannot be read')
