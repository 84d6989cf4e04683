"""PURE: tool calls that a model writes as JSON, perhaps with the name outside of it."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from localllm.types import ToolCall

# Name of each tool of the request, with the JSON schema of its parameters.
Schemas = Mapping[str, Mapping[str, Any]]


class Parsed(NamedTuple):
    """`rest` is what follows the calls and belongs to the answer."""

    calls: tuple[ToolCall, ...]
    rest: str = ""


# None when the text is no call, or one of a tool that the request does not have.
CallParser = Callable[[str, Schemas], Parsed | None]

# Control characters are allowed inside strings: models write line breaks as they are.
_DECODER = json.JSONDecoder(strict=False)
_ALPHABET = string.ascii_lowercase + string.digits
_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
# What may open an object that is a call; a tool's own name may too.
CALL_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "tool_call_id")


def make_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall("call_" + "".join(secrets.choice(_ALPHABET) for _ in range(8)), name, arguments)


def find_name(text: str, schemas: Schemas) -> str | None:
    """The tool that `text` means; some models write it as a member of a namespace."""
    text = text.strip()
    return next((name for name in (text, text.removeprefix("functions.")) if name in schemas), None)


def parse_json(text: str, schemas: Schemas) -> Parsed | None:
    """Objects or lists of them, as Hermes, Qwen, Llama 3, Mistral, Granite and Command-R write them."""
    calls: list[ToolCall] = []
    end = 0
    for value, value_end in _values(text):
        found = [_call(item, schemas) for item in (value if isinstance(value, list) else [value])]
        known = [call for call in found if call is not None]
        if not found or len(known) < len(found):
            break
        calls += known
        end = value_end
    # Small models close a bracket too many.
    return Parsed(tuple(calls), text[end:].lstrip(" \t\r\n,;}]")) if calls else None


def _values(text: str) -> Iterator[tuple[Any, int]]:
    """The JSON values at the beginning of `text`, each with where it ends."""
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n,;":
            at += 1
            continue
        decoded = decode_at(text, at)
        if decoded is None:
            return
        at = decoded[1]
        yield decoded


def decode_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `at`, with where it ends."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, schemas: Schemas) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        return _call(value["function"], schemas)
    if len(value) == 1 and (name := find_name(next(iter(value)), schemas)):
        return _make(name, value[next(iter(value))])
    name_text = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), "")
    name = find_name(name_text, schemas)
    return _make(name, next((value[key] for key in _ARGUMENT_KEYS if key in value), {})) if name else None


def _make(name: str, arguments: Any) -> ToolCall | None:
    """`arguments` may be an object, JSON text of one, or nothing."""
    if isinstance(arguments, str):
        decoded = decode_at(arguments.strip() or "{}", 0)
        arguments = decoded[0] if decoded else arguments
    arguments = {} if arguments is None else arguments
    return make_call(name, arguments) if isinstance(arguments, dict) else None


def marked(header: str, trailer: str = "") -> CallParser:
    """For calls whose name stands in `header`, a pattern with a group of that name, before an object of arguments."""
    before, after = re.compile(r"\s*" + header + r"\s*"), re.compile(rf"\s*(?:{trailer})?\s*")

    def parse(text: str, schemas: Schemas) -> Parsed | None:
        calls: list[ToolCall] = []
        at = 0
        while match := before.match(text, at):
            name, decoded = find_name(match["name"], schemas), decode_at(text, match.end())
            if name is None or decoded is None or not isinstance(decoded[0], dict):
                break
            calls.append(make_call(name, decoded[0]))
            at = decoded[1]
            if trail := after.match(text, at):
                at = trail.end()
        return Parsed(tuple(calls), text[at:]) if calls else None

    return parse


def either(*parsers: CallParser) -> CallParser:
    """The first of `parsers` that understands the text."""

    def parse(text: str, schemas: Schemas) -> Parsed | None:
        return next((parsed for parser in parsers if (parsed := parser(text, schemas))), None)

    return parse


def is_in_string(text: str) -> bool:
    """True when JSON text ends within a string: a closing tag there is part of it."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def may_be_call(text: str, schemas: Schemas) -> bool | None:
    """Whether a text that begins so is a bare call, as JSON or as `[name(`; None while that is open."""
    text = text.lstrip()
    is_list = text.startswith("[")
    text = text.removeprefix("[").lstrip()
    if not text:
        return None
    if not text.startswith("{"):
        return _starts_with_any(text, [f"{name}(" for name in schemas]) if is_list else False
    text = text[1:].lstrip()
    if not text.startswith('"'):
        return None if not text else False
    key, quote, rest = text[1:].partition('"')
    if not quote:
        return None if _starts_with_any(key, [*CALL_KEYS, *schemas]) is not False else False
    if key not in CALL_KEYS and find_name(key, schemas) is None:
        return False
    return _is_tool(rest, schemas) if key in ("name", "tool_name") else True


def _is_tool(text: str, schemas: Schemas) -> bool | None:
    """Whether what follows the key `name` is the name of a tool."""
    value = text.lstrip().removeprefix(":").lstrip()
    if not value.startswith('"'):
        return None if not value else False
    names = [f"{prefix}{name}" for name in schemas for prefix in ("", "functions.")]
    return _starts_with_any(value[1:], [f'{name}"' for name in names])


def _starts_with_any(text: str, beginnings: list[str]) -> bool | None:
    if any(text.startswith(beginning) for beginning in beginnings):
        return True
    return None if any(beginning.startswith(text) for beginning in beginnings) else False
