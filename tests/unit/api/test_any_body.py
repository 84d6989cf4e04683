"""Whatever is sent, nobody gets an answer that says "our mistake": bodies by the description, and beside it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.api.harness import Daemon

from localllm.api.openapi import document, error_type

DOCUMENT = document()
MODELS = ("tiny", "thinker", "tooler", "embedder", "ranker", "", "no/such:model", "a b")
# A fixed choice: drawing each value anew takes hypothesis many times as long as the daemon needs for its answer.
ODD_SCALARS = [None, True, 0, -1, 1.5, 2**31, 2**63, 2**64, 1e308, "", "a", "\0", "\U0001f600", "-1", "null", "5m"]
ODD_LISTS = [[], [None], [[]], [{}], ["a", 1], [1, 2]]
ODD_OBJECTS = [{}, {"a": None}, {"": {}}, {"type": "text"}, {"type": []}, {"a": {"b": [{}]}}]
ANYTHING = st.sampled_from([*ODD_SCALARS, *ODD_LISTS, *ODD_OBJECTS])
STRINGS = st.sampled_from(["", "a", "hello", "\0", "\U0001f600", "x" * 100, "{", "5m"])
INTEGERS = st.sampled_from([0, 1, 2, -1, 20, 21, 2**31, 2**63, -(2**63)])
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e308, -1e308])
# Values that reach further than chance would.
TELLING: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": "hello"}], [{"role": "tool", "content": None}], [{"role": "user"}]],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}], [{"name": "f"}]],
    "format": ["json", {"type": "object"}, {"$ref": "#/nowhere"}],
    "response_format": [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {}}}],
    "options": [{"stop": "x"}, {"seed": 2**70}, {"num_ctx": 1e300}, {"logit_bias": {"a": 1}}, {"priority": []}],
    "keep_alive": ["5m", -1, "abc", 1e400, "9" * 30],
    "think": [True, "high", "loud", 3],
    "input": ["a", ["a", 1], [[1, 2], [3]], [{"type": "message", "role": "user", "content": [{"type": "input_text"}]}]],
    "prompt": ["hello", [1, 2], [["a"]], [2**40]],
    "dimensions": [0, -1, 2**40],
    "max_tokens": [0, 5, 2**70],
    "tool_choice": ["required", {"type": "function"}, {"type": "tool", "name": "f"}, "some"],
}
NEEDED = {"model", "messages", "prompt", "input"}
OPERATIONS = [
    (verb.upper(), path, operation)
    for path, verbs in DOCUMENT["paths"].items()
    for verb, operation in verbs.items()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
    # Fetching and sending is the store's business, and takes a world outside.
    and path not in ("/api/pull", "/api/push", "/api/create")
]


def by_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values as the schema has them; not all that it allows."""
    if "$ref" in schema:
        return by_schema(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([by_schema(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object" and schema.get("properties"):
        fields = {name: field(name, inner) for name, inner in schema["properties"].items()}
        needed = {name: fields.pop(name) for name in NEEDED & fields.keys()}
        return st.fixed_dictionaries(needed, optional=fields)
    if kind == "array":
        return st.lists(by_schema(schema["items"]) if "items" in schema else ANYTHING, max_size=3)
    simple = {"string": STRINGS, "integer": INTEGERS, "number": NUMBERS, "boolean": st.booleans()}
    return simple.get(kind, ANYTHING) if isinstance(kind, str) else ANYTHING


def field(name: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    told = by_schema(schema) | ANYTHING
    if name == "model":
        return st.sampled_from(MODELS)
    return st.sampled_from(TELLING[name]) | told if name in TELLING else told


@pytest.mark.parametrize(("verb", "path", "operation"), OPERATIONS, ids=[path for _, path, _ in OPERATIONS])
async def test_no_body_is_our_mistake(daemon: Daemon, verb: str, path: str, operation: dict[str, Any]) -> None:
    bodies = by_schema(operation["requestBody"]["content"]["application/json"]["schema"])
    examples: list[dict[str, Any]] = []

    # Collected first: the daemon answers in this test's own loop.
    @settings(max_examples=100, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def collect(body: dict[str, Any]) -> None:
        examples.append(body)

    collect()
    for body in examples:
        response = await daemon.client.request(verb, path, content=json.dumps(body))
        if response.status_code < 400:
            continue
        error: Any = msgspec.json.decode(response.content, type=error_type(path))
        text = error.error if isinstance(error.error, str) else error.error.message
        # Ollama says 500 to an option of the wrong type.
        is_options_type = response.status_code == 500 and text.startswith('option "')
        assert response.status_code < 500 or is_options_type, (body, response.text)
        assert text and text != "internal error"
