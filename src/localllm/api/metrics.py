"""/metrics, as Prometheus and its kind read it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from localllm.api.generation import Services
from localllm.config import kv_folder
from localllm.daemon.metrics import CONTENT_TYPE, ModelState
from localllm.daemon.supervisor import ResidentModel


class MetricsRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor

    async def metrics(self, request: Request) -> Response:
        states = [_state(resident) for resident in self._supervisor.resident()]
        page = self._supervisor.metrics.render(states, await asyncio.to_thread(_kv_bytes))
        return Response(page, headers={"Content-Type": CONTENT_TYPE})


def _state(resident: ResidentModel) -> ModelState:
    name = resident.model.name.display
    return ModelState(name, resident.num_in_flight, resident.num_queued, resident.size_bytes, resident.stats)


def _kv_bytes() -> int:
    """What the prefix cache takes on disk. Files may go while we look."""
    total = 0
    for path in kv_folder().glob("*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
