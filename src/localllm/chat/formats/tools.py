"""PURE: the ways in which model families write a tool call. Each function returns None for what it cannot read."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from typing import Any

from localllm.types import ToolCall

_DECODER = json.JSONDecoder()
_ALPHABET = string.ascii_lowercase + string.digits


def make_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall("call_" + "".join(secrets.choice(_ALPHABET) for _ in range(8)), name, arguments)


def parse_json_calls(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """JSON objects, or a list of them: `{"name": …, "arguments": {…}}` (Hermes, Qwen, Command-R, Granite)."""
    values = _json_values(text)
    if not values:
        return None
    calls = [_call_from_object(value, names) for value in values]
    return None if any(call is None for call in calls) else tuple(call for call in calls if call)


def _json_values(text: str) -> list[Any] | None:
    """All JSON values in `text`, lists opened up; None when anything else stands between them."""
    values: list[Any] = []
    position = 0
    while position < len(text):
        if text[position] in " \t\r\n,;":
            position += 1
            continue
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.extend(value if isinstance(value, list) else [value])
    return values


def _call_from_object(value: Any, names: frozenset[str]) -> ToolCall | None:
    """Accepts `name` or `tool_name`, and `arguments` or `parameters` as an object or as JSON text."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    value = function if isinstance(function, dict) else value
    name = value.get("name", value.get("tool_name", function))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return make_call(name, arguments)


def parse_llama(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """Llama 3: bare JSON objects, separated by semicolons, perhaps after <|python_tag|>."""
    return parse_json_calls(text.strip().removeprefix("<|python_tag|>"), names)


def parse_mistral(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """`[{"name": …, "arguments": …}]`, or since 2025 `name[ARGS]{…}`, several after further [TOOL_CALLS]."""
    if "[ARGS]" not in text:
        return parse_json_calls(text, names)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, body = part.partition("[ARGS]")
        name = re.sub(r"\[CALL_ID\].*", "", name).strip()
        values = _json_values(body)
        if name not in names or not values or len(values) != 1 or not isinstance(values[0], dict):
            return None
        calls.append(make_call(name, values[0]))
    return tuple(calls)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


def parse_qwen_coder(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """Qwen3-Coder: `<function=name><parameter=key>value</parameter>…</function>`."""
    if text.lstrip().startswith("{"):
        return parse_json_calls(text, names)
    match = _FUNCTION.fullmatch(text)
    if match is None or match[1].strip() not in names or _PARAMETER.sub("", match[2]).strip():
        return None
    arguments = {key.strip(): _value(value.strip("\n")) for key, value in _PARAMETER.findall(match[2])}
    return (make_call(match[1].strip(), arguments),)


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def parse_glm(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """GLM 4.5 and later: the name, then `<arg_key>…</arg_key><arg_value>…</arg_value>` pairs."""
    name = text.partition("<arg_key>")[0].strip()
    rest = text[text.find(name) + len(name) :]
    if name not in names or _ARGUMENT.sub("", rest).strip():
        return None
    return (make_call(name, {key.strip(): _value(value) for key, value in _ARGUMENT.findall(rest)}),)


def _value(text: str) -> Any:
    """Untyped text of an XML-like argument: JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_pythonic(text: str, names: frozenset[str]) -> tuple[ToolCall, ...] | None:
    """LFM2 and Llama 4: a Python list of calls with keyword arguments, `[f(a=1), g()]`. Read as data, never run."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return parse_json_calls(text, names)
    nodes = body.elts if isinstance(body, ast.List) else [body]
    calls = [_call_from_node(node, names) for node in nodes]
    if not calls or any(call is None for call in calls):
        return parse_json_calls(text, names)
    return tuple(call for call in calls if call)


def _call_from_node(node: ast.expr, names: frozenset[str]) -> ToolCall | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names or node.args:
        return None
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except ValueError:
        return None
    return make_call(node.func.id, arguments)
