"""/api/blobs/{digest}: files that a client sends before it creates a model from them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from localllm.api.generation import Services
from localllm.errors import RequestCancelled
from localllm.store.blobs import hex_digest


class BlobRoutes:
    def __init__(self, services: Services) -> None:
        self._blobs = services.store.blobs

    async def head(self, request: Request) -> Response:
        return Response(status_code=200 if self._blobs.has(request.path_params["digest"]) else 404)

    async def put(self, request: Request) -> Response:
        """201 for a new blob; 200, without reading the body, for one that is there."""
        digest = hex_digest(request.path_params["digest"])
        if self._blobs.has(digest):
            return Response()
        with self._blobs.writer(digest) as writer:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("the client went away while it sent a file")
                await asyncio.to_thread(writer.write, message.get("body", b""))
                if not message.get("more_body", False):
                    break
            await asyncio.to_thread(writer.commit)
        return Response(status_code=201)
