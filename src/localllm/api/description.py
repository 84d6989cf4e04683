"""/openapi.json and /docs: what there is to call, for tools and for people. Neither needs anything from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import localllm
from localllm.api.wire import JSON, json_bytes

_FOLDER = Path(__file__).parent
_HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
# For those who want to try a route: by the name of a field.
_EXAMPLES: dict[str, Any] = {
    "model": "smollm2",
    "messages": _HELLO,
    "max_tokens": 100,
    "prompt": "Why is the sky blue?",
    "input": "Why is the sky blue?",
    "query": "Why is the sky blue?",
    "documents": ["Air scatters blue light.", "Grass is green."],
    "text": "Why is the sky blue?",
    "tokens": [1, 2, 3],
    "source": "smollm2",
    "destination": "mine",
}


async def openapi(request: Request) -> Response:
    return Response(_document_bytes(), media_type=JSON)


async def docs(request: Request) -> Response:
    page, policy = _page()
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


@functools.cache
def _document() -> dict[str, Any]:
    # Few daemons are ever asked, and all would pay for it when they start.
    from localllm.api.openapi import document

    return document()


@functools.cache
def _document_bytes() -> bytes:
    return json_bytes(_document())


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and the policy that holds a browser to what it needs."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string((_FOLDER / "docs.html").read_text("utf-8"))
    script = (_FOLDER / "docs.js").read_text("utf-8")
    page = template.render(
        document=_document(),
        version=localllm.__version__,
        resolve=_resolve,
        placeholders=lambda path: re.findall(r"{(\w+)}", path),
        example=_example,
        script=script,
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    script_source = f"script-src 'sha256-{digest}'"
    return page, f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; {script_source}; base-uri 'none'"


def _resolve(node: Mapping[str, Any]) -> Any:
    """What a reference stands for."""
    if "$ref" not in node:
        return node
    found: Any = _document()
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return found


def _example(operation: Mapping[str, Any]) -> str:
    """A body that can be sent as it is, once a model of that name is there."""
    schema = _resolve(operation["requestBody"]["content"]["application/json"]["schema"])
    fields = schema["properties"]
    example = {name: value for name, value in _EXAMPLES.items() if name in fields}
    return msgspec.json.format(json_bytes(example), indent=2).decode()
