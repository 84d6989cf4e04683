"""What an answer must look like, as any of the APIs may ask for it."""

from __future__ import annotations

from typing import Any

import msgspec

from localllm.api.wire import check_integers, invalid
from localllm.types import Grammar

ANY_OBJECT = '{"type":"object"}'


def of_schema(schema: dict[str, Any], field: str) -> Grammar:
    """Raises InvalidRequest for numbers that no runner could be told."""
    check_integers(schema, field)
    return Grammar("json_schema", msgspec.json.encode(schema).decode(), field)


def choose(format: Grammar | None, *, grammar: str, regex: str) -> Grammar | None:
    """The one constraint of a request. `grammar` is GBNF, which alone writes "::=", or Lark.

    Raises InvalidRequest when there are several.
    """
    found = [] if format is None else [format]
    if grammar:
        found.append(Grammar("gbnf" if "::=" in grammar else "lark", grammar, "grammar"))
    if regex:
        found.append(Grammar("regex", regex, "regex"))
    if len(found) > 1:
        names = " and ".join(constraint.field for constraint in found)
        raise invalid(found[-1].field, f"{names} cannot be used together", hint="Send one of them.")
    return found[0] if found else None
