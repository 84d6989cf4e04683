"""/openapi.json: the routes of `operations` as an OpenAPI 3.1 document, with the Structs' own schemas.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

import localllm
from localllm.api.errors import AnthropicError, NativeError, OpenAIError
from localllm.api.operations import FIELDS, OPERATIONS, TAGS, TEXT, Operation
from localllm.api.wire import Body, json_bytes

_JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETERS = {
    "digest": "sha256: and 64 hexadecimal digits",
    "id": "The name of a model",
    "key": "Of a key",
}
_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-Id": (
        "What logs and the answer call this request",
        {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    ),
    "X-Deadline-Ms": ("How long the answer may take", {"type": "integer", "minimum": 1, "maximum": 86_400_000}),
    "X-Priority": ("How urgent it is; lower is sooner", {"type": "integer", "minimum": -10, "maximum": 10}),
}


def document(operations: Mapping[tuple[str, str], Operation] = OPERATIONS) -> dict[str, Any]:
    """The whole description, ready to be encoded."""
    schemas = _Schemas(operations.values())
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localllm",
            "version": localllm.__version__,
            "description": "Runs GGUF models on your own machine. Unknown fields are ignored and null means absent; a "
            "field that is known and cannot be honoured is a 400 that names it.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "parameters": {name: _header(name, *what) for name, what in _HEADERS.items()},
        },
    }


class _Schemas:
    """The schemas of everything that is sent, under names that are told apart where two Structs share one."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        types: list[Any] = [NativeError, OpenAIError, AnthropicError]
        for operation in operations:
            types += [kind for kind in (operation.body, operation.reply, operation.event) if _is_type(kind)]
        schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        # Structs of one name in several modules come with their modules' names, of which a part is enough.
        short = re.sub(r"localllm\.api\.(wire_)?", "", json_bytes([schemas, components]).decode())
        schemas, components = msgspec.json.decode(short)
        self._by_type = list(zip(types, schemas, strict=True))
        self.components: dict[str, Any] = components
        for kind, schema in self._by_type:
            if isinstance(kind, type) and issubclass(kind, Body):
                self._describe(kind, components[schema["$ref"].rpartition("/")[2]])

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._by_type if known is kind)

    @staticmethod
    def _describe(body: type[Body], schema: dict[str, Any]) -> None:
        """In words what the Struct says in code."""
        for name, field in schema["properties"].items():
            field |= FIELDS.get(name, {})
        if body.refused:
            names = ", ".join(body.refused)
            schema["description"] = f"{schema.get('description', '')}\n\nRefused with 400: {names}.".strip()


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str | dict)


def _operation(method: str, path: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    headers = list(_HEADERS) if operation.does_work else ["X-Request-Id"]
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "parameters": [
            *(_path_parameter(name) for name in re.findall(r"{(\w+)}", path)),
            *({"$ref": f"#/components/parameters/{name}"} for name in headers),
        ],
        "responses": _responses(path, operation, schemas),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas.of(operation.body)}}}
    elif operation.raw_body:
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return described


def _responses(path: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described = {str(status): _success(operation, schemas) for status in operation.statuses}
    error = {"content": {_JSON: {"schema": schemas.of(error_type(path))}, TEXT: {}}}
    described["4XX"] = {"description": "The request is at fault, or what it names is not there", **error}
    described["5XX"] = {"description": "The daemon cannot answer; 503 says in Retry-After when to come back", **error}
    return described


def error_type(path: str) -> type:
    """The shape that errors have there."""
    if path.startswith("/v1/messages"):
        return AnthropicError
    return OpenAIError if path.startswith("/v1/") else NativeError


def _success(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    reply = operation.reply
    if isinstance(reply, str):
        content[reply] = {"schema": {"type": "string"}}
    elif isinstance(reply, dict):
        content[_JSON] = {"schema": {"type": "object"}, "example": reply}
    elif reply is not None:
        content[_JSON] = {"schema": schemas.of(reply)}
    if operation.stream is not None:
        # One schema describes each object: the document's version has no word for a sequence of them.
        content[operation.stream] = {"x-item-schema": schemas.of(operation.event)}
    return {"description": "Done", **({"content": content} if content else {})}


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": _PATH_PARAMETERS[name], "schema": schema}


def _header(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": schema}
