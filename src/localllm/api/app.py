"""The application: which routes there are, and what surrounds them."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import localllm
from localllm.api import description, stubs
from localllm.api.anthropic import AnthropicRoutes
from localllm.api.blobs import BlobRoutes
from localllm.api.completions import CompletionRoutes
from localllm.api.deadline import Deadlines
from localllm.api.embedding import EmbeddingRoutes
from localllm.api.errors import on_error, on_http_error
from localllm.api.finder import ModelFinder
from localllm.api.generation import Services
from localllm.api.inventory import InventoryRoutes
from localllm.api.metrics import MetricsRoutes
from localllm.api.native import NativeRoutes
from localllm.api.openai import OpenAIRoutes
from localllm.api.progress import QueueRoutes
from localllm.api.responses import ResponsesRoutes
from localllm.api.security import Guard
from localllm.api.tokens import TokenRoutes
from localllm.api.wire import json_response
from localllm.config import Config
from localllm.daemon.supervisor import Supervisor
from localllm.errors import LocalLLMError
from localllm.keys.accounts import Accounts
from localllm.store.library import ModelStore


def create_app(config: Config, store: ModelStore, supervisor: Supervisor, accounts: Accounts) -> Starlette:
    """Starting and draining the supervisor, and flushing the accounts, is the caller's business."""
    return Starlette(
        routes=_routes(Services(store, supervisor, ModelFinder(store))),
        middleware=[Middleware(Guard, config=config, accounts=accounts), Middleware(Deadlines)],
        exception_handlers={LocalLLMError: on_error, HTTPException: on_http_error},
    )


def _routes(services: Services) -> list[Route]:
    native, inventory, openai = NativeRoutes(services), InventoryRoutes(services), OpenAIRoutes(services)
    blobs, anthropic, responses = BlobRoutes(services), AnthropicRoutes(services), ResponsesRoutes(services)
    completions, embedding = CompletionRoutes(services), EmbeddingRoutes(services)
    tokens, queue = TokenRoutes(services), QueueRoutes(services)
    return [
        Route("/", root),
        Route("/health", health),
        Route("/openapi.json", description.openapi),
        Route("/docs", description.docs),
        Route("/api/version", inventory.version),
        Route("/ready", queue.ready),
        Route("/metrics", MetricsRoutes(services).metrics),
        Route("/api/queue", queue.queue),
        Route("/api/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/api/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/api/render", native.render, methods=["POST"]),
        Route("/api/generate", native.generate, methods=["POST"]),
        Route("/api/chat", native.chat, methods=["POST"]),
        Route("/api/embed", embedding.embed, methods=["POST"]),
        Route("/api/embeddings", embedding.embeddings, methods=["POST"]),
        Route("/api/tags", inventory.tags),
        Route("/api/ps", inventory.ps),
        Route("/api/show", inventory.show, methods=["POST"]),
        Route("/api/pull", inventory.pull, methods=["POST"]),
        Route("/api/delete", inventory.delete, methods=["DELETE"]),
        Route("/api/copy", inventory.copy, methods=["POST"]),
        Route("/api/blobs/{digest}", blobs.head, methods=["HEAD"]),
        Route("/api/blobs/{digest}", blobs.put, methods=["POST"]),
        Route("/api/status", stubs.status),
        Route("/api/me", stubs.account, methods=["POST"]),
        Route("/api/signout", stubs.account, methods=["POST"]),
        Route("/api/user/keys/{key}", stubs.account, methods=["DELETE"]),
        Route("/api/experimental/web_search", stubs.web, methods=["POST"]),
        Route("/api/experimental/web_fetch", stubs.web, methods=["POST"]),
        Route("/api/experimental/model-recommendations", stubs.recommendations),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/messages", anthropic.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", embedding.openai, methods=["POST"]),
        Route("/v1/rerank", embedding.rerank, methods=["POST"]),
        Route("/v1/models", openai.models),
        Route("/v1/models/{id:path}", openai.model),
    ]


async def root(request: Request) -> Response:
    """The words are Ollama's: health checks look for them."""
    return PlainTextResponse("Ollama is running")


async def health(request: Request) -> Response:
    """How the command line tells this daemon from an Ollama on the same port."""
    return json_response({"status": "ok", "server": "localllm", "version": localllm.__version__, "pid": os.getpid()})
