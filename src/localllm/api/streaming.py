"""Answers that end when their client leaves, whatever the daemon is doing for it at that moment.

Starlette's own streaming response notices a lost client only when it sends something, and a request may be queued,
loading or in prefill for minutes before there is anything to send.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType

from starlette.types import Receive, Scope, Send

from localllm.api.errors import internal_error
from localllm.errors import LocalLLMError, RequestCancelled, ShuttingDown

_log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class WhileConnected:
    """`async with WhileConnected(receive):` cancels its body when the client leaves and raises RequestCancelled.

    A cancellation by anybody else is the server's, because it stops: that raises ShuttingDown.

    The request's body must have been read, and the answer's last part must be sent after the block: a finished answer
    looks like a departure to `receive`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if not isinstance(error, asyncio.CancelledError):
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if self._has_left:
            raise RequestCancelled("the client went away") from None
        # Nobody else cancels a request but the server, for one that outlasts the draining: a pull, say.
        raise ShuttingDown("the daemon is stopping", hint="Try again when it is back.", retry_after=5) from None


class StreamingReply:
    """An ASGI response that sends each chunk as it comes.

    An error before the first chunk is raised, a later one becomes the last chunk.
    """

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, encode_error: Callable[[LocalLLMError], bytes]
    ) -> None:
        self._headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
        self._chunks = chunks
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        tail = b""
        try:
            async with WhileConnected(receive), aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    if not is_started:
                        is_started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not is_started:
                raise
            tail = self._encode_error(_as_typed(error))
        if not is_started:
            await self._start(send)
        await send({"type": "http.response.body", "body": tail})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})


def _as_typed(error: Exception) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        _log.info("the answer broke off: %s (%s)", error.message, error.code)
        return error
    _log.error("the answer broke off", exc_info=error)
    return internal_error()
