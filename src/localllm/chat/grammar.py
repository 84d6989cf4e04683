"""PURE: what binds an answer, in the form that llguidance takes, and why something cannot bind one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from localllm.errors import InvalidRequest
from localllm.types import Grammar

# White space between the parts of JSON is bounded, since a small model may never come to an end of it.
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}
_MAX_SOURCE_CHARACTERS = 1 << 20
# Where a schema holds other schemas: by name, in a list, or alone.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ALONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")


def compile_grammar(grammar: Grammar) -> str:
    """Raises InvalidRequest that names the field, and the path inside a schema."""
    if len(grammar.source) > _MAX_SOURCE_CHARACTERS:
        raise InvalidRequest(f'"{grammar.field}" is over a million characters long', field=grammar.field)
    if grammar.kind == "json_schema":
        return schema_grammar(json.loads(grammar.source), grammar.field)
    if grammar.kind == "regex":
        return _checked(LLMatcher.grammar_from_regex(grammar.source), grammar.field)
    return _checked(LLMatcher.grammar_from_lark(_lark(grammar)), grammar.field)


def schema_grammar(schema: Any, field: str) -> str:
    """Raises InvalidRequest that names the smallest part of the schema that cannot be used."""
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f'"{field}" must be an object', field=field)
    compiled = _of_schema(schema)
    why = LLMatcher.validate_grammar(compiled)
    if why:
        path, why = _find_fault(schema, field, why, schema if isinstance(schema, dict) else {})
        raise InvalidRequest(
            f'"{path}" cannot be used: {_plain(why)}', hint="Leave that part of the schema out.", field=path
        )
    return compiled


def forced_call(tools: Iterable[Mapping[str, Any]], names: tuple[str, ...]) -> str:
    """An object with the name of one of the tools and arguments that its schema allows."""
    rules = []
    for index, tool in enumerate(tools):
        function = tool.get("function", {})
        if function.get("name") in names:
            schema = _parameters(function)
            schema_grammar(schema, f"tools[{index}].function.parameters")
            start = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
            rules.append(f'{start} %json {json.dumps(schema | {"x-guidance": _WHITE_SPACE})} "}}"')
    assert rules, "a tool that is to be called must exist"
    choices = "\n".join(f"call{index}: {rule}" for index, rule in enumerate(rules))
    start = " | ".join(f"call{index}" for index in range(len(rules)))
    return _checked(LLMatcher.grammar_from_lark(f"start: {start}\n{choices}\n"), "tools")


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """No parameters are written in several ways; those that a tool does not name it does not have."""
    given = function.get("parameters")
    schema = given if isinstance(given, dict) else {}
    if not isinstance(schema.get("properties", {}), dict):
        schema = {key: value for key, value in schema.items() if key != "properties"}
    return {"type": "object", "additionalProperties": False, **schema}


def _of_schema(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_WHITE_SPACE)  # type: ignore[arg-type]


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "lark":
        return grammar.source
    try:
        return str(gbnf_to_lark(grammar.source))
    # Besides its own error, it raises plain ones for what a grammar lacks.
    except Exception as error:
        raise InvalidRequest(f'"{grammar.field}" is not valid GBNF: {error}', field=grammar.field) from None


def _checked(compiled: str, field: str) -> str:
    why = LLMatcher.validate_grammar(compiled)
    if why:
        raise InvalidRequest(f'"{field}" cannot be used: {_plain(why)}', field=field)
    return compiled


def _find_fault(schema: Any, path: str, why: str, root: dict[str, Any]) -> tuple[str, str]:
    """The innermost schema that fails by itself, and why; its references still mean those of `root`."""
    shared = {name: root[name] for name in ("$defs", "definitions", "$id", "$schema") if name in root}
    for key, child in _children(schema):
        if not isinstance(child, dict) or not child:
            continue
        wrong = LLMatcher.validate_grammar(_of_schema({**shared, **child}))
        if wrong:
            return _find_fault(child, f"{path}.{key}", wrong, root)
    return path + _fault_key(schema, why), why


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}.{key}", child) for key, child in schema[name].items())
    for name in _IN_LIST:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}[{index}]", child) for index, child in enumerate(schema[name]))
    yield from ((name, schema[name]) for name in _ALONE if isinstance(schema.get(name), dict))


def _fault_key(schema: Any, why: str) -> str:
    """The keyword of `schema` that the complaint is about, where it can be told."""
    if not isinstance(schema, dict):
        return ""
    if "regex" in why and "pattern" in schema:
        return ".pattern"
    named = re.search(r"Unimplemented keys: \[\"([^\"]+)\"", why) or re.search(r"for '([^']+)'", why)
    if named and named[1] in schema:
        return f".{named[1]}"
    return ".format" if why.startswith("Unknown format") else ""


def _plain(why: str) -> str:
    return " ".join(why.split())[:300]
