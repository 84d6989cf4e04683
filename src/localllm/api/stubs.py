"""Routes of Ollama's that concern its own cloud: answered as by an Ollama whose cloud is switched off."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localllm.api.wire import json_response
from localllm.errors import Forbidden, Unauthorized

_HINT = "localllm runs models on this machine alone."


async def status(request: Request) -> Response:
    return json_response({"cloud": {"disabled": True, "source": "config"}})


async def account(request: Request) -> Response:
    raise Unauthorized("unauthorized", hint=_HINT)


async def recommendations(request: Request) -> Response:
    return json_response({"recommendations": []})


async def web(request: Request) -> Response:
    raise Forbidden("ollama cloud is disabled: web search and fetch are unavailable", hint=_HINT)
