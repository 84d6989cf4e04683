"""PURE: tool calls that a model writes as XML-like markup, as Python, or in Gemma's own notation."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.formats.calls import CallParser, Parsed, Schemas, decode_at, find_name, make_call
from localllm.types import ToolCall

_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Markup has no types, so the schema says whether `1` is a number or a text. Without one: JSON where it is JSON."""
    kinds = _kinds(schema.get("properties"), key)
    if kinds == {"string"}:
        return text
    decoded = decode_at(text.strip(), 0)
    if decoded is None or decoded[1] < len(text.strip()):
        word = text.strip().lower()
        return word == "true" if "boolean" in kinds and word in ("true", "false") else text
    value = decoded[0]
    kind = _JSON_TYPES.get(type(value), "number")
    is_text = "string" in kinds and kind not in kinds and not (kind == "number" and "integer" in kinds)
    return text if is_text else value


def _kinds(properties: Any, key: str) -> set[str]:
    """The JSON types that a property may have; empty when its schema does not say."""
    schema = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        for option in schema.get(name) or ():
            found |= _kinds({key: option}, key)
    return found


def markup(function: str, parameter: str) -> CallParser:
    """For `<function=NAME><parameter=KEY>value</parameter></function>` and its relatives.

    Patterns: `function` with the groups `name` and `body`, `parameter` with `key`, `value` and perhaps `is_text`.
    """
    one_call, one_value = re.compile(function, re.DOTALL), re.compile(parameter, re.DOTALL)

    def parse(text: str, schemas: Schemas) -> Parsed | None:
        calls: list[ToolCall] = []
        at = 0
        while match := one_call.match(text, at):
            name = find_name(match["name"], schemas)
            if name is None or one_value.sub("", match["body"]).strip():
                break
            values = one_value.finditer(match["body"])
            calls.append(make_call(name, dict(_argument(value, schemas[name]) for value in values)))
            at = match.end()
        return Parsed(tuple(calls), text[at:]) if calls else None

    return parse


def _argument(match: re.Match[str], schema: Mapping[str, Any]) -> tuple[str, Any]:
    """A value on lines of its own does not include the line breaks next to the tags."""
    groups = match.groupdict()
    key, value = groups["key"].strip(), groups["value"]
    value = value[1:].removesuffix("\n") if value.startswith("\n") else value
    value = value.removeprefix("<![CDATA[").removesuffix("]]>") if value.endswith("]]>") else value
    return key, value if groups.get("is_text") == "true" else typed(value, schema, key)


def parse_pythonic(text: str, schemas: Schemas) -> Parsed | None:
    """LFM2, Llama 4 and Olmo 3: Python calls with keyword arguments, as lines or a list. Read as data, never run."""
    try:
        lines = [line.value for line in ast.parse(text.strip()).body if isinstance(line, ast.Expr)]
        nodes = [node for line in lines for node in (line.elts if isinstance(line, ast.List) else [line])]
        calls = [_call_of(node, schemas) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    known = tuple(call for call in calls if call is not None)
    return Parsed(known) if known and len(known) == len(calls) else None


def _call_of(node: ast.expr, schemas: Schemas) -> ToolCall | None:
    """Raises ValueError for an argument that is no literal."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    called = ast.unparse(node.func)
    name = find_name(called, schemas) or find_name(called.removesuffix(".call"), schemas)
    return make_call(name, {k.arg: _literal(k.value) for k in node.keywords if k.arg}) if name else None


class _JsonNames(ast.NodeTransformer):
    """Models write JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:")


def parse_gemma(text: str, schemas: Schemas) -> Parsed | None:
    """Gemma 4: `call:NAME{key:<|"|>text<|"|>,other:1}`, which is JSON but for its quotes."""
    head, brace, body = text.strip().partition("{")
    name = find_name(head.removeprefix("call:"), schemas)
    if name is None or not brace:
        return None
    parts = (brace + body).split('<|"|>')
    if len(parts) % 2 == 0:
        return None
    outside = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    inside = [json.dumps(part) for part in parts[1::2]]
    decoded = decode_at("".join(a + b for a, b in zip(outside, [*inside, ""], strict=True)), 0)
    if decoded is None or not isinstance(decoded[0], dict):
        return None
    return Parsed((make_call(name, decoded[0]),))


def write_pythonic(calls: Sequence[ToolCall]) -> str:
    texts = (f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls)
    return f"[{', '.join(texts)}]"
