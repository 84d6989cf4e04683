"""A daemon without runners: the real application and store behind a real socket, and a supervisor with a script."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import gguf
import httpx
import msgspec
import numpy
import uvicorn

from localllm.api.app import create_app
from localllm.config import Config
from localllm.daemon.metrics import Metrics
from localllm.daemon.supervisor import Granted, Item, KeepAlive, ResidentModel, Standing, Supervisor
from localllm.errors import LocalLLMError
from localllm.keys.accounts import Accounts
from localllm.store import manifests
from localllm.store.library import ModelStore, StoredModel
from localllm.store.manifests import Layer, Manifest, ModelConfig
from localllm.store.names import ModelName
from localllm.types import ChatRequest, Delta, Embeddings, EmbedRequest, Finished, LoadWishes, Timings, Usage

DONE = Finished(
    "stop",
    Usage(num_prompt_tokens=7, num_cached_tokens=4, num_output_tokens=2),
    Timings(queue_ns=1, prefill_ns=2_000_000, decode_ns=3_000_000),
)

NOTHING_GUESSED = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}

Step = Item | LocalLLMError | asyncio.Event | Exception


@dataclass
class Call:
    model: StoredModel
    wishes: LoadWishes
    keep_alive: KeepAlive
    request: ChatRequest | None = None
    wish: EmbedRequest | None = None


@dataclass
class FakeSupervisor:
    """Answers each request with `script`: items are yielded, errors raised, events waited for."""

    script: Sequence[Step] = (Granted(5, 6), Delta("Hel", num_tokens=1), Delta("lo", num_tokens=1), DONE)
    calls: list[Call] = field(default_factory=list)
    loads: list[Call] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    residents: list[ResidentModel] = field(default_factory=list)
    standing: list[Standing] = field(default_factory=list)
    eta: float = 0.0
    metrics: Metrics = field(default_factory=Metrics)
    is_draining: bool = False
    load_blocker: asyncio.Event | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, model: StoredModel, request: ChatRequest, wishes: LoadWishes, keep_alive: KeepAlive
    ) -> AsyncGenerator[Item, None]:
        self.calls.append(Call(model, wishes, keep_alive, request))
        is_done = False
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    is_done = True
                    raise step
                if isinstance(step, asyncio.Event):
                    self.has_begun.set()
                    await step.wait()
                else:
                    yield step
            is_done = True
        finally:
            if not is_done:
                self.was_cancelled.set()

    async def embed(
        self, model: StoredModel, request: EmbedRequest, wishes: LoadWishes, keep_alive: KeepAlive
    ) -> tuple[Granted, Embeddings]:
        """Each vector is (index, 0.5); the second of several documents has the best score."""
        self.calls.append(Call(model, wishes, keep_alive, wish=request))
        if isinstance(self.script[0], Exception):
            raise self.script[0]
        if isinstance(self.script[0], asyncio.Event):
            self.has_begun.set()
            try:
                await self.script[0].wait()
            finally:
                self.was_cancelled.set()
        indices = range(len(request.inputs))
        rows = [(i, 0.5) if request.query is None else (1 - abs(i - 1) / 8,) for i in indices]
        vectors = tuple(numpy.array(row, "<f4").tobytes() for row in rows)
        return Granted(5, 6), Embeddings(vectors, Usage(num_prompt_tokens=8))

    async def load(self, model: StoredModel, wishes: LoadWishes, keep_alive: KeepAlive) -> None:
        self.loads.append(Call(model, wishes, keep_alive))
        if self.load_blocker is not None:
            self.has_begun.set()
            try:
                await self.load_blocker.wait()
            except asyncio.CancelledError:
                self.was_cancelled.set()
                raise

    async def unload(self, model: StoredModel) -> bool:
        self.unloads.append(model.name.display)
        return True

    def standings(self) -> list[Standing]:
        return self.standing

    def eta_seconds(self, model: StoredModel) -> float:
        return self.eta

    def resident(self) -> list[ResidentModel]:
        return self.residents

    @property
    def wish(self) -> EmbedRequest:
        """The last one that arrived for vectors."""
        wish = self.calls[-1].wish
        assert wish is not None
        return wish

    @property
    def request(self) -> ChatRequest:
        """The last one that arrived."""
        request = self.calls[-1].request
        assert request is not None
        return request


def parse_time(text: str) -> datetime:
    return msgspec.convert(text, datetime)


def write_gguf(path: Path, *, template: str = "", pooling: int | None = None, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, "bert" if pooling is not None else architecture)
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_token_list(["a", "b", "c"])
    if template:
        writer.add_chat_template(template)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tensor("token_embd.weight", numpy.zeros((3, 64), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class StoreBuilder:
    store: ModelStore
    folder: Path

    def add(
        self,
        name: str,
        *,
        template: str = "{{ messages }}",
        pooling: int | None = None,
        system: str = "",
        parameters: dict[str, Any] | None = None,
        messages: Sequence[tuple[str, str]] = (),
        license: str = "",
        go_template: str = "",
        projector: bool = False,
    ) -> StoredModel:
        path = write_gguf(
            self.folder / f"{name.replace('/', '-').replace(':', '-')}.gguf", template=template, pooling=pooling
        )
        digest, size = self.store.blobs.add_file(path)
        layers = [Layer(manifests.MODEL_LAYER, f"sha256:{digest}", size)]
        if projector:
            digest, size = self.store.blobs.add_file(write_gguf(self.folder / "projector.gguf", architecture="clip"))
            layers.append(Layer(manifests.PROJECTOR_LAYER, f"sha256:{digest}", size))
        history = [{"role": role, "content": content} for role, content in messages]
        for media_type, data in (
            (manifests.SYSTEM_LAYER, system.encode()),
            (manifests.TEMPLATE_LAYER, go_template.encode()),
            (manifests.PARAMS_LAYER, json.dumps(parameters).encode() if parameters else b""),
            (manifests.MESSAGES_LAYER, json.dumps(history).encode() if history else b""),
            (manifests.LICENSE_LAYER, license.encode()),
        ):
            if data:
                layers.append(self._layer(media_type, data))
        config = self._layer(
            manifests.CONFIG_TYPE, msgspec.json.encode(ModelConfig(model_family="llama", model_type="1M"))
        )
        self.store.publish(ModelName.parse(name), msgspec.json.encode(Manifest(config=config, layers=tuple(layers))))
        return self.store.resolve(name)

    def _layer(self, media_type: str, data: bytes) -> Layer:
        return Layer(media_type, f"sha256:{self.store.blobs.add_bytes(data)}", len(data))


@dataclass
class Daemon:
    client: httpx.AsyncClient
    supervisor: FakeSupervisor
    models: StoreBuilder
    port: int

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def lines(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The objects of an NDJSON stream, which must have status 200."""
        response = await self.post(path, **body)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        assert response.text.endswith("\n")
        return [json.loads(line) for line in response.text.splitlines()]

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The data of an event stream, which must have status 200; the final mark as it is."""
        response = await self.post(path, **body)
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
        assert response.text.endswith("\n\n")
        data = [event.removeprefix("data: ") for event in response.text[:-2].split("\n\n")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]

    async def connect(self, path: str, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a socket that the test itself owns."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def serve(
    config: Config, models: StoreBuilder, supervisor: FakeSupervisor, accounts: Accounts | None = None
) -> AsyncIterator[Daemon]:
    """uvicorn as the daemon runs it, but inside the test's own loop. Without `accounts`, nobody needs a key."""
    accounts = accounts or Accounts(models.folder / "keys.sqlite")
    app = create_app(config, models.store, cast(Supervisor, supervisor), accounts)
    listener = socket.create_server(("127.0.0.1", 0))
    # As uvloop does in the daemon; asyncio does not for a socket of somebody else's, and a request takes 40 ms more.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = listener.getsockname()[1]
    settings = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, ws="none", lifespan="off")
    server = uvicorn.Server(settings)
    settings.load()
    server.lifespan = settings.lifespan_class(settings)
    await server.startup(sockets=[listener])
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=10
    ) as client:
        yield Daemon(client, supervisor, models, port)
    # uvicorn's own shutdown sleeps; nothing here is worth waiting for.
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
