"""A client that leaves stops the work that is done for it, wherever that is at the moment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from tests.unit.api.harness import DONE, Daemon, Step

from localllm.daemon.supervisor import Granted
from localllm.protocol.messages import Prefill
from localllm.store.library import ModelStore
from localllm.store.pull import PullEvent
from localllm.types import Delta

SOON = 2.0
HELLO = [{"role": "user", "content": "hello"}]


def blocked_after(*steps: Step) -> tuple[Step, ...]:
    return (*steps, asyncio.Event(), DONE)


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((), id="queued or loading"),
        pytest.param((Granted(1, 1), Prefill("x", 1, 9)), id="prefill"),
        pytest.param((Granted(1, 1), Delta("Hel")), id="decoding"),
    ],
)
async def test_leaving_cancels_at_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, path: str, stream: bool, steps: tuple[Step, ...]
) -> None:
    daemon.supervisor.script = blocked_after(*steps)
    _, writer = await daemon.connect(path, model="tiny", messages=HELLO, stream=stream)
    await asyncio.wait_for(daemon.supervisor.has_begun.wait(), SOON)
    assert not daemon.supervisor.was_cancelled.is_set()

    with caplog.at_level(logging.WARNING):
        writer.close()
        await asyncio.wait_for(daemon.supervisor.was_cancelled.wait(), SOON)
        daemon.supervisor.script = (Granted(1, 1), DONE)
        assert (await daemon.post(path, model="tiny", messages=HELLO)).status_code == 200
    assert caplog.records == [], "a client that leaves is no reason to complain"


async def test_leaving_stops_a_load(daemon: Daemon) -> None:
    daemon.supervisor.load_blocker = asyncio.Event()
    _, writer = await daemon.connect("/api/generate", model="tiny")
    await asyncio.wait_for(daemon.supervisor.has_begun.wait(), SOON)
    writer.close()
    await asyncio.wait_for(daemon.supervisor.was_cancelled.wait(), SOON)


async def test_each_piece_is_sent_when_it_is_there(daemon: Daemon) -> None:
    gate = asyncio.Event()
    daemon.supervisor.script = (Granted(1, 1), Delta("Hel"), gate, Delta("lo"), DONE)
    async with daemon.client.stream("POST", "/api/chat", json={"model": "tiny", "messages": HELLO}) as response:
        lines = response.aiter_lines()
        assert '"Hel"' in await asyncio.wait_for(anext(lines), SOON)
        gate.set()
        assert '"lo"' in await asyncio.wait_for(anext(lines), SOON)
        assert '"done":true' in await asyncio.wait_for(anext(lines), SOON)
    assert not daemon.supervisor.was_cancelled.is_set()


async def test_a_connection_serves_one_answer_after_another(daemon: Daemon) -> None:
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=daemon.client.base_url, limits=limits, trust_env=False) as client:
        for stream in (True, False, True):
            response = await client.post("/api/chat", json={"model": "tiny", "messages": HELLO, "stream": stream})
            assert response.status_code == 200
            assert "Hel" in response.text
    assert len(daemon.supervisor.calls) == 3
    assert not daemon.supervisor.was_cancelled.is_set()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_stops_a_pull(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    has_begun, was_closed = asyncio.Event(), asyncio.Event()

    async def pull(self: ModelStore, text: str, *, insecure: bool = False) -> AsyncGenerator[PullEvent, None]:
        try:
            yield PullEvent("pulling manifest")
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            was_closed.set()

    monkeypatch.setattr(ModelStore, "pull", pull)
    _, writer = await daemon.connect("/api/pull", model="big", stream=stream)
    await asyncio.wait_for(has_begun.wait(), SOON)
    writer.close()
    await asyncio.wait_for(was_closed.wait(), SOON)


async def test_a_client_that_leaves_within_its_request_is_forgotten(daemon: Daemon) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(b'POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"model"')
    await writer.drain()
    writer.close()
    assert (await daemon.client.get("/")).status_code == 200
    assert daemon.supervisor.calls == []


async def test_many_clients_at_once_keep_their_answers_apart(daemon: Daemon) -> None:
    async def ask(number: int) -> tuple[int, Any]:
        response = await daemon.post("/api/chat", model="tiny", messages=[{"role": "user", "content": f"{number}"}])
        return response.status_code, response.headers["x-request-id"]

    results = await asyncio.gather(*(ask(number) for number in range(20)))
    assert {status for status, _ in results} == {200}
    assert len({id for _, id in results}) == 20
    assert len({call.request.id for call in daemon.supervisor.calls if call.request}) == 20


async def test_two_requests_of_one_name_do_not_collide(daemon: Daemon) -> None:
    for _ in range(2):
        headers = {"X-Request-Id": "mine"}
        await daemon.client.post("/api/chat", json={"model": "tiny", "messages": HELLO}, headers=headers)
    first, second = (call.request.id for call in daemon.supervisor.calls if call.request)
    assert first != second
    assert first.startswith("mine.")
