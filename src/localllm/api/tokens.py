"""What a model makes of text: /api/tokenize, /api/detokenize. /api/render is beside /api/chat, whose body it takes."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.api import generation
from localllm.api.generation import Job, Services
from localllm.api.options import parse_keep_alive, parse_options
from localllm.api.streaming import WhileConnected
from localllm.api.turn import turn_of
from localllm.api.wire import ModelBody, decode, json_response, read_body
from localllm.errors import InvalidRequest
from localllm.types import ChatRequest, Finished


class TokenizeBody(ModelBody, kw_only=True):
    """`content` is llama-server's name for `text`. `add_special`: with what the model wants first, like BOS."""

    text: str = ""
    content: str = ""
    add_special: bool = False


class DetokenizeBody(ModelBody, kw_only=True):
    tokens: tuple[int, ...] = ()


class Tokens(msgspec.Struct):
    model: str
    tokens: tuple[int, ...]


class Text(msgspec.Struct):
    model: str
    text: str


class TokenRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor
        self._models = services.models

    async def tokenize(self, request: Request) -> Response:
        body = decode(await read_body(request), TokenizeBody)
        asked = ChatRequest("", prompt=body.text or body.content, add_special=body.add_special)
        finished = await self._inspect(request, body, asked)
        return json_response(Tokens(body.model, finished.tokens))

    async def detokenize(self, request: Request) -> Response:
        body = decode(await read_body(request), DetokenizeBody)
        finished = await self._inspect(request, body, ChatRequest("", prompt="", context_tokens=body.tokens))
        return json_response(Text(body.model, finished.prompt))

    async def _inspect(self, request: Request, body: TokenizeBody | DetokenizeBody, asked: ChatRequest) -> Finished:
        started_ns = time.perf_counter_ns()
        if not body.model:
            raise InvalidRequest("model is required", field="model")
        keep_alive = parse_keep_alive(body.keep_alive)
        model = await self._models.find(body.model)
        _, wishes = parse_options(model.parameters, body.options)
        asked = msgspec.structs.replace(asked, id=generation.new_id(), **turn_of(body).fields(request))
        async with WhileConnected(request.receive):
            return await generation.inspect(
                self._supervisor, Job(body.model, model, asked, wishes, keep_alive, started_ns)
            )
