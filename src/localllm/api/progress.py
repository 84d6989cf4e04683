"""What those who wait are told, and those who watch: /api/queue, comments within event streams, deadlines."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.api.generation import Services
from localllm.api.wire import json_response
from localllm.daemon.supervisor import Supervisor
from localllm.errors import ShuttingDown


class PrefillState(msgspec.Struct):
    num_computed_tokens: int
    num_prompt_tokens: int


class QueuedRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str
    model: str
    state: str
    position: int
    load_fraction: float
    eta_seconds: float
    prefill: PrefillState | None = None


class Queue(msgspec.Struct):
    requests: list[QueuedRequest]


class QueueRoutes:
    def __init__(self, services: Services) -> None:
        self._supervisor = services.supervisor

    async def ready(self, request: Request) -> Response:
        """Whether new work is taken; /health only says that the daemon lives."""
        if self._supervisor.is_draining:
            raise ShuttingDown("the daemon is stopping", hint="Try again when it is back.", retry_after=5)
        return json_response({"status": "ready"})

    async def queue(self, request: Request) -> Response:
        return json_response(
            Queue(
                [
                    QueuedRequest(
                        id=standing.id,
                        model=standing.model,
                        state=standing.state,
                        position=standing.position,
                        load_fraction=round(standing.load_fraction, 3),
                        eta_seconds=round(standing.eta_seconds, 1),
                        prefill=PrefillState(*standing.prefill) if standing.prefill else None,
                    )
                    for standing in self._supervisor.standings()
                ]
            )
        )


def commentator(supervisor: Supervisor, request_id: str) -> Callable[[], bytes]:
    """Comments for an event stream that say where a request stands; clients skip them, and see that all is well."""

    def comment() -> bytes:
        return f": {describe(supervisor, request_id)}\n\n".encode()

    return comment


def describe(supervisor: Supervisor, request_id: str) -> str:
    standing = next((s for s in supervisor.standings() if s.id == request_id), None)
    if standing is None:
        return "working"
    if standing.position:
        place = f"position={standing.position} eta={standing.eta_seconds:.0f}s"
        return f"loading {standing.load_fraction:.0%} {place}" if standing.state == "loading" else f"queued {place}"
    if standing.prefill and standing.prefill[0] < standing.prefill[1]:
        return "reading the prompt {}/{}".format(*standing.prefill)
    return "generating"
