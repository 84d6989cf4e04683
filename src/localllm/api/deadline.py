"""X-Deadline-Ms: how many milliseconds an answer may take, from when its request came in."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.api.errors import error_response
from localllm.api.wire import invalid
from localllm.errors import DeadlineExceeded

HEADER = "x-deadline-ms"
_MAX_MS = 24 * 3600 * 1000
# In the time of the event loop.
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


class Deadlines:
    """ASGI middleware: notes when the answer to a request must be there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if text is not None:
            if not text.isdecimal() or not 0 < int(text[:12]) <= _MAX_MS:
                error = invalid("X-Deadline-Ms", f"must be a number of milliseconds between 1 and {_MAX_MS}")
                await error_response(scope["path"], error)(scope, receive, send)
                return
            _deadline.set(asyncio.get_running_loop().time() + int(text) / 1000)
        await self._app(scope, receive, send)


def remaining() -> float | None:
    """Seconds until the answer must be there, not below 0; None for as long as it takes."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())


def check(eta_seconds: float) -> None:
    """Raises DeadlineExceeded when the turn of a request cannot come in time."""
    left = remaining()
    if left is not None and eta_seconds > left:
        raise DeadlineExceeded(
            f"the answer could not begin before about {eta_seconds:.1f} s, and {left:.1f} s are left",
            hint="Allow more time, or try again later.",
            eta_seconds=round(eta_seconds, 1),
        )


def exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the answer was not complete at its deadline", hint="Allow more time, or ask for less.")
