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

from localllm.api import deadline
from localllm.api.errors import internal_error
from localllm.errors import LocalLLMError, RequestCancelled, ShuttingDown

_log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
# Proxies and impatient clients give up after 30 seconds of silence or more.
BEAT_SECONDS = 5.0


class WhileConnected:
    """`async with WhileConnected(receive):` cancels its body when the client leaves and raises RequestCancelled.

    It does the same at the request's deadline, and raises DeadlineExceeded. A cancellation by anybody else is the
    server's, because it stops: that raises ShuttingDown.

    The request's body must have been read, and the answer's last part must be sent after the block: a finished answer
    looks like a departure to `receive`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False
        self._is_late = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        seconds = deadline.remaining()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._expire)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._task.cancel()

    def _expire(self) -> None:
        self._is_late = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if not isinstance(error, asyncio.CancelledError):
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if self._has_left:
            raise RequestCancelled("the client went away") from None
        if self._is_late:
            raise deadline.exceeded() from None
        # Nobody else cancels a request but the server, for one that outlasts the draining: a pull, say.
        raise ShuttingDown("the daemon is stopping", hint="Try again when it is back.", retry_after=5) from None


class StreamingReply:
    """An ASGI response that sends each chunk as it comes.

    An error before the first chunk is raised, a later one becomes the last chunk. Where `beat` is given, a silence is
    broken by what it returns, so that neither the client nor anything between takes the connection for dead.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        encode_error: Callable[[LocalLLMError], bytes],
        beat: Callable[[], bytes] | None = None,
    ) -> None:
        self._beat = beat
        self._is_started = False
        self._is_silent = True
        self._headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
        self._chunks = chunks
        self._encode_error = encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tail = b""
        beating = asyncio.create_task(self._beat_on(send)) if self._beat is not None else None
        try:
            async with WhileConnected(receive), aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    self._is_silent = False
                    await self._send(send, chunk)
        except Exception as error:
            if not self._is_started:
                raise
            tail = self._encode_error(_as_typed(error))
        finally:
            if beating is not None:
                beating.cancel()
        await self._send(send, tail, is_last=True)

    async def _beat_on(self, send: Send) -> None:
        assert self._beat is not None
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._is_silent:
                await self._send(send, self._beat())
            self._is_silent = True

    async def _send(self, send: Send, chunk: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


def _as_typed(error: Exception) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        _log.info("the answer broke off: %s (%s)", error.message, error.code)
        return error
    _log.error("the answer broke off", exc_info=error)
    return internal_error()
