"""The rest of /api: what models there are, which are loaded, and taking them in and out of the store."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

import localllm
from localllm.api import show
from localllm.api.errors import native_line
from localllm.api.generation import Services
from localllm.api.streaming import NDJSON, StreamingReply, WhileConnected
from localllm.api.wire import decode, json_line, json_response, read_body
from localllm.api.wire_native import (
    CopyBody,
    ListedModel,
    ListedModels,
    NameBody,
    PullBody,
    RunnerState,
    RunningModel,
    RunningModels,
    ShowBody,
)
from localllm.daemon.supervisor import ResidentModel
from localllm.errors import Forbidden, InvalidName, InvalidRequest, LocalLLMError, ModelNotFound, NotFoundAtSource
from localllm.store.library import ModelStore, StoredModel
from localllm.store.names import ModelName

if TYPE_CHECKING:
    from localllm.store.pull import PullEvent

# Ollama's clients show "Forever" for anything that is more than 20 years away; its own value is in 2318.
FOREVER = datetime(2318, 1, 1, tzinfo=timezone.utc)
# Clients refuse to talk to an Ollama that is older than what they need.
OLLAMA_VERSION = "0.30.0"
_PATH_STARTS = ("/", "./", "../", "~")
# `ollama run` and its kind look for these words in the answer to a pull.
NO_SUCH_MANIFEST = "pull model manifest: file does not exist"


class InventoryRoutes:
    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._supervisor = services.supervisor

    async def version(self, request: Request) -> Response:
        """`version` is that of the Ollama whose contract this is: see docs/decisions/0004-version.md."""
        return json_response({"version": OLLAMA_VERSION, "localllm": localllm.__version__})

    async def tags(self, request: Request) -> Response:
        return json_response(ListedModels(await asyncio.to_thread(_list, self._store)))

    async def ps(self, request: Request) -> Response:
        running = [_running(resident) for resident in self._supervisor.resident()]
        return json_response(RunningModels(sorted(running, key=lambda model: model.expires_at, reverse=True)))

    async def show(self, request: Request) -> Response:
        body = decode(await read_body(request), ShowBody)
        if not body.reference:
            raise InvalidRequest("model is required", field="model")
        agent = request.headers.get("user-agent", "")
        return json_response(await asyncio.to_thread(self._show, body, agent))

    def _show(self, body: ShowBody, agent: str) -> object:
        name = _parse(body.reference, "invalid model name")
        try:
            model = self._store.resolve(body.reference)
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{name.display}' not found", hint=error.hint, field="model") from None
        reply = show.describe(model, body)
        if agent.startswith("GitHubCopilotChat/"):
            # It shows this field as the model's name and expects the one that it asked for.
            reply.model_info["general.basename"] = body.reference
        return reply

    async def delete(self, request: Request) -> Response:
        body = decode(await read_body(request), NameBody)
        text = body.reference
        _parse(text, f'name "{text}" is invalid')
        try:
            model = await asyncio.to_thread(_find_unshared, self._store, text)
            if model is not None:
                await self._supervisor.unload(model)
            removed = await asyncio.to_thread(self._store.remove, text)
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{text}' not found", hint=error.hint, field="model") from None
        return Response(headers={"X-Freed-Bytes": str(removed.freed_bytes)})

    async def copy(self, request: Request) -> Response:
        body = decode(await read_body(request), CopyBody)
        _parse(body.source, f'source "{body.source}" is invalid')
        _parse(body.destination, f'destination "{body.destination}" is invalid')
        try:
            await asyncio.to_thread(self._store.copy, body.source, body.destination)
        except ModelNotFound as error:
            raise ModelNotFound(f'model "{body.source}" not found', hint=error.hint, field="source") from None
        return Response()

    async def pull(self, request: Request) -> Response | StreamingReply:
        body = decode(await read_body(request), PullBody)
        if not body.reference:
            raise InvalidRequest("invalid model name", field="model")
        if body.reference.startswith(_PATH_STARTS) and not _is_local(request):
            raise Forbidden("only a client on the daemon's own machine may name a file there")
        events = _in_ollamas_words(self._store.pull(body.reference, insecure=body.insecure))
        if body.stream:
            return StreamingReply(_pull_lines(events), NDJSON, native_line)
        async with WhileConnected(request.receive), aclosing(events):
            async for _ in events:
                pass
        return json_response({"status": "success"})


def _is_local(request: Request) -> bool:
    return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback


def _parse(text: str, message: str) -> ModelName:
    """Raises InvalidRequest with Ollama's `message`, and ours as the hint."""
    try:
        return ModelName.parse(text)
    except InvalidName as error:
        raise InvalidRequest(message, hint=error.hint, field="model") from None


async def _in_ollamas_words(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    try:
        async for event in events:
            yield event
    except InvalidName as error:
        raise InvalidRequest("invalid model name", hint=error.hint or error.message, field="model") from None
    except NotFoundAtSource as error:
        raise NotFoundAtSource(f"{NO_SUCH_MANIFEST}: {error.message}", hint=error.hint) from None
    finally:
        await _close(events)


async def _close(events: AsyncIterator[PullEvent]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()


async def _pull_lines(events: AsyncGenerator[PullEvent, None]) -> AsyncGenerator[bytes, None]:
    """A pull that fails has status 200 and the error inside, even when nothing came before it: clients rely on it."""
    async with aclosing(events):
        try:
            async for event in events:
                yield json_line(event)
        except InvalidRequest:
            raise
        except LocalLLMError as error:
            yield native_line(error)


def _find_unshared(store: ModelStore, name: str) -> StoredModel | None:
    """The model, unless another name stands for the same weights: they share a runner. Raises ModelNotFound."""
    model = store.resolve(name)
    is_shared = any(m.model_path == model.model_path and m.name != model.name for m in store.list())
    return None if is_shared else model


def _list(store: ModelStore) -> list[ListedModel]:
    return [_listed(model) for model in store.list()]


def _listed(model: StoredModel) -> ListedModel:
    name = model.name.display
    return ListedModel(
        name=name,
        model=name,
        modified_at=model.modified_at,
        size=model.size,
        digest=model.digest,
        details=show.details(model, with_lengths=True),
        capabilities=show.capabilities(model),
    )


def _running(resident: ResidentModel) -> RunningModel:
    model, info, options = resident.model, resident.info, resident.options
    name = model.name.display
    return RunningModel(
        name=name,
        model=name,
        size=resident.size_bytes,
        digest=model.digest,
        details=show.details(model),
        expires_at=(resident.expires_at or FOREVER).astimezone(),
        size_vram=_size_vram(resident),
        context_length=info.num_ctx if info is not None else options.num_ctx,
        runner=_runner_state(resident),
    )


def _size_vram(resident: ResidentModel) -> int:
    """The share of `size_bytes` that is on a GPU. A runner counts weights alone; the rest is split as they are."""
    info = resident.info
    if info is None or not info.size_bytes:
        return 0
    return resident.size_bytes * info.size_vram_bytes // info.size_bytes


def _runner_state(resident: ResidentModel) -> RunnerState:
    info, options = resident.info, resident.options
    state = RunnerState(
        state=resident.state,
        pid=resident.pid,
        num_slots=info.num_slots if info is not None else options.num_parallel,
        num_in_flight=resident.num_in_flight,
        num_queued=resident.num_queued,
        num_threads=options.num_threads,
        num_threads_batch=options.num_threads_batch,
        num_gpu_layers=info.num_gpu_layers if info is not None else 0,
        kv_cache_type=options.kv_cache_type,
        speculates=options.speculate,
        is_pinned=resident.is_pinned,
        loaded_because=resident.reason,
    )
    if resident.step_age is not None:
        state.step_age = round(resident.step_age, 3)
    if resident.state == "loading":
        state.load_fraction = resident.fraction
    return state
