"""API keys on the wire: who gets in, what they may do, what refusals look like, what is charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.unit.api.harness import DONE, Daemon, FakeSupervisor, StoreBuilder, serve

from localllm.api.access import scope_of
from localllm.config import Config
from localllm.daemon.supervisor import Granted
from localllm.keys.accounts import Accounts
from localllm.keys.key import Key, digest_of
from localllm.keys.store import KeyStore
from localllm.protocol.messages import Prefill
from localllm.types import Delta

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
ROUTES = ("/api/chat", "/v1/chat/completions", "/v1/messages")


@pytest.fixture
def keys(models: StoreBuilder) -> KeyStore:
    store = KeyStore(models.folder / "keys.sqlite")
    add(store, "user")
    return store


@pytest.fixture
async def daemon(models: StoreBuilder, supervisor: FakeSupervisor, keys: KeyStore) -> AsyncIterator[Daemon]:
    async with serve(Config(), models, supervisor, Accounts(keys.path)) as running:
        yield running


def add(store: KeyStore, name: str, **limits: Any) -> None:
    """A key whose secret is its name."""
    store.add(Key(name, digest_of(name), **limits))


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/", None),
        ("HEAD", "/", None),
        ("GET", "/health", None),
        ("GET", "/docs", None),
        ("POST", "/", "admin"),
        ("GET", "/api/tags", "read"),
        ("GET", "/api/ps", "read"),
        ("GET", "/metrics", "read"),
        ("POST", "/api/show", "read"),
        ("GET", "/v1/models", "read"),
        ("POST", "/api/generate", "inference"),
        ("POST", "/v1/messages", "inference"),
        ("POST", "/api/pull", "admin"),
        ("DELETE", "/api/delete", "admin"),
        ("POST", "/api/something-new", "admin"),
    ],
)
def test_what_a_route_needs(method: str, path: str, scope: str | None) -> None:
    assert scope_of(method, path) == scope


@pytest.mark.parametrize("headers", [bearer("user"), {"Authorization": "bearer  user"}, {"x-api-key": "user"}])
async def test_a_key_is_taken_from_either_header(daemon: Daemon, headers: dict[str, str]) -> None:
    response = await daemon.client.post("/api/chat", json=CHAT, headers=headers)
    assert response.status_code == 200
    assert daemon.supervisor.request.client == "key user"


@pytest.mark.parametrize("headers", [{}, bearer("other"), {"Authorization": "Basic user"}, {"x-api-key": "us"}])
async def test_without_a_valid_key_nothing_happens(daemon: Daemon, headers: dict[str, str]) -> None:
    for path in ROUTES:
        response = await daemon.client.post(path, json=CHAT, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert daemon.supervisor.calls == []
    for path in ("/", "/health", "/ready", "/docs", "/openapi.json"):
        assert (await daemon.client.get(path, headers=headers)).status_code == 200


async def test_every_api_refuses_in_its_own_shape(daemon: Daemon, keys: KeyStore) -> None:
    add(keys, "reader", scope="read")
    add(keys, "spent", rpm=1)
    assert (await daemon.client.post("/api/chat", json=CHAT, headers=bearer("spent"))).status_code == 200
    found: dict[str, list[Any]] = {}
    for path in ROUTES:
        for name, status in (("nobody", 401), ("reader", 403), ("spent", 429)):
            response = await daemon.client.post(path, json=CHAT, headers=bearer(name))
            assert response.status_code == status
            assert ("retry-after" in response.headers) == (status == 429)
            found.setdefault(path, []).append(response.json())
    assert [body["code"] for body in found["/api/chat"]] == ["invalid_api_key", "forbidden", "rate_limit_exceeded"]
    assert all(isinstance(body["error"], str) for body in found["/api/chat"])
    errors = [body["error"] for body in found["/v1/chat/completions"]]
    assert [(error["type"], error["code"]) for error in errors] == [
        ("invalid_request_error", "invalid_api_key"),
        ("invalid_request_error", "forbidden"),
        ("rate_limit_error", "rate_limit_exceeded"),
    ]
    assert [(body["type"], body["error"]["type"]) for body in found["/v1/messages"]] == [
        ("error", "authentication_error"),
        ("error", "permission_error"),
        ("error", "rate_limit_error"),
    ]
    assert 1 <= int(response.headers["retry-after"]) <= 60


async def test_a_browser_may_read_a_refusal_and_ask_before_it_has_a_key(daemon: Daemon) -> None:
    origin = {"Origin": "http://localhost:3000"}
    refused = await daemon.client.get("/api/tags", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://localhost:3000")
    assert (await daemon.client.options("/api/chat", headers=origin)).status_code == 204


async def test_models_that_a_key_may_not_use(daemon: Daemon, keys: KeyStore) -> None:
    add(keys, "narrow", models=("thinker",))
    refused = await daemon.client.post("/api/chat", json=CHAT, headers=bearer("narrow"))
    assert refused.status_code == 403
    assert refused.json()["hint"] == "It may use thinker."
    allowed = await daemon.client.post("/api/chat", json={**CHAT, "model": "thinker"}, headers=bearer("narrow"))
    assert allowed.status_code == 200


@pytest.mark.parametrize(("asked", "expected"), [(None, 3), (5, 5), (-10, 3)])
async def test_a_request_may_be_less_urgent_than_its_key_but_not_more(
    daemon: Daemon, keys: KeyStore, asked: int | None, expected: int
) -> None:
    add(keys, "patient", priority=3)
    await daemon.client.post("/api/chat", json={**CHAT, "priority": asked}, headers=bearer("patient"))
    assert daemon.supervisor.request.priority == expected


async def test_answers_are_charged_to_their_key(
    models: StoreBuilder, supervisor: FakeSupervisor, keys: KeyStore
) -> None:
    accounts = Accounts(keys.path)
    async with serve(Config(), models, supervisor, accounts) as daemon:
        for path in ROUTES:
            await daemon.client.post(path, json=CHAT, headers=bearer("user"))
        await daemon.client.post("/api/embed", json={"model": "embedder", "input": "x"}, headers=bearer("user"))
        await daemon.client.post("/api/tokenize", json={"model": "tiny", "text": "x"}, headers=bearer("user"))
    await accounts.flush()
    assert [msgspec.structs.astuple(row)[1:] for row in keys.usage("2000-01-01")] == [
        ("user", "embedder:latest", 1, 8, 0, 0),
        ("user", "tiny:latest", 3, 21, 12, 6),
    ]


async def test_who_leaves_pays_for_what_was_computed(
    models: StoreBuilder, supervisor: FakeSupervisor, keys: KeyStore
) -> None:
    accounts = Accounts(keys.path)
    supervisor.script = (Granted(1, 1), Prefill("x", 40, 50), Delta("Hel", num_tokens=2), asyncio.Event(), DONE)
    async with serve(Config(), models, supervisor, accounts) as daemon:
        async with daemon.client.stream("POST", "/api/chat", json=CHAT, headers=bearer("user")) as response:
            await anext(response.aiter_lines())
        await asyncio.wait_for(supervisor.was_cancelled.wait(), 5)
        for _ in range(100):
            await accounts.flush()
            if keys.usage("2000-01-01"):
                break
            await asyncio.sleep(0.01)
    (row,) = keys.usage("2000-01-01")
    assert (row.requests, row.prompt_tokens, row.output_tokens) == (1, 40, 2)


async def test_a_spent_quota_is_429_until_midnight(daemon: Daemon, keys: KeyStore) -> None:
    add(keys, "small", tokens_per_day=9)
    first = await daemon.client.post("/v1/chat/completions", json=CHAT, headers=bearer("small"))
    second = await daemon.client.post("/v1/chat/completions", json=CHAT, headers=bearer("small"))
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["error"]["code"] == "quota_exceeded"
    assert 0 < int(second.headers["retry-after"]) <= 24 * 3600
    assert (await daemon.client.get("/api/tags", headers=bearer("small"))).status_code == 200
