"""Who may call: hosts, origins, sizes and request ids."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
from tests.unit.api.harness import Daemon, FakeSupervisor, StoreBuilder, serve

from localllm.api import wire
from localllm.api.security import Policy
from localllm.config import Address, Config


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:11434", True),
        ("127.0.0.1:11434", True),
        ("[::1]:11434", True),
        ("192.168.1.7", True),
        ("0.0.0.0:1", True),
        ("", True),
        ("box.local", True),
        ("host.docker.internal:11434", True),
        ("a.localhost", True),
        ("mybox", True),
        ("evil.example", False),
        ("evil.example:11434", False),
        ("8.8.8.8", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evillocal", False),
    ],
)
def test_hosts(host: str, is_allowed: bool) -> None:
    assert Policy((), ["MyBox"]).allows_host(host) is is_allowed


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost", True),
        ("https://localhost:3000", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:5173", True),
        ("app://obsidian.md", True),
        ("tauri://localhost", True),
        ("file://", True),
        ("vscode-webview://abc", True),
        ("http://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
        ("chrome-extension://abc", False),
    ],
)
def test_origins(origin: str, is_allowed: bool) -> None:
    assert Policy(()).allows_origin(origin, "127.0.0.1:11434") is is_allowed


def test_configured_origins_are_allowed_as_origin_and_as_host() -> None:
    policy = Policy(["https://chat.example:8443", "chrome-extension://*", "http://*.lan.example"])
    assert policy.allows_origin("https://chat.example:8443", "x")
    assert policy.allows_origin("chrome-extension://abc", "x")
    assert policy.allows_origin("http://a.lan.example", "x")
    assert not policy.allows_origin("https://chat.example", "x")
    assert policy.allows_host("chat.example:8443")
    assert policy.allows_host("A.lan.example")
    assert not policy.allows_host("chat.example:11434")
    assert not policy.allows_host("other.example")
    assert Policy(["*"]).allows_origin("http://evil.example", "x")


def test_a_page_of_this_very_server_is_no_stranger() -> None:
    assert Policy(()).allows_origin("http://gpu.example:11434", "gpu.example:11434")
    assert not Policy(()).allows_origin("http://gpu.example:11434", "other.example")


async def test_a_foreign_host_is_refused_with_a_reason(daemon: Daemon) -> None:
    response = await daemon.client.get("/api/tags", headers={"Host": "evil.example:11434"})
    assert response.status_code == 403
    assert response.json() == {
        "error": 'host "evil.example:11434" is not allowed',
        "code": "forbidden",
        "hint": "Start the daemon with LOCALLLM_ORIGINS=http://evil.example:11434 to allow it.",
    }


async def test_a_foreign_origin_is_refused_with_a_reason(daemon: Daemon) -> None:
    headers = {"Origin": "https://evil.example"}
    response = await daemon.client.post("/api/chat", json={"model": "tiny"}, headers=headers)
    assert response.status_code == 403
    assert response.json()["error"] == 'origin "https://evil.example" is not allowed'
    assert "LOCALLLM_ORIGINS=https://evil.example" in response.json()["hint"]
    assert "access-control-allow-origin" not in response.headers
    assert daemon.supervisor.loads == []
    preflight = await daemon.client.options("/v1/models", headers=headers)
    assert (preflight.status_code, preflight.json()["error"]["type"]) == (403, "invalid_request_error")


async def test_an_allowed_origin_may_read_every_answer(daemon: Daemon) -> None:
    for path in ("/api/tags", "/nothing"):
        response = await daemon.client.get(path, headers={"Origin": "http://localhost:3000"})
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert response.headers["vary"] == "Origin"


async def test_a_preflight_is_complete(daemon: Daemon) -> None:
    response = await daemon.client.options(
        "/api/chat",
        headers={
            "Origin": "http://localhost:3000",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-stainless-os",
        },
    )
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "DELETE" in response.headers["access-control-allow-methods"]


async def test_a_key_that_nobody_asked_for_is_no_mistake(daemon: Daemon) -> None:
    response = await daemon.client.get("/v1/models", headers={"Authorization": "Bearer anything"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("changes", "headers", "status"),
    [
        ({"host": Address("0.0.0.0", 11434)}, {"Host": "gpu.example"}, 200),
        ({"origins": ("https://chat.example",)}, {"Host": "chat.example"}, 200),
        ({"origins": ("https://chat.example",)}, {"Origin": "https://chat.example"}, 200),
        ({"origins": ("https://chat.example",)}, {"Origin": "https://evil.example"}, 403),
    ],
)
async def test_settings_decide(
    models: StoreBuilder, supervisor: FakeSupervisor, changes: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    async with serve(dataclasses.replace(Config(), **changes), models, supervisor) as daemon:
        assert (await daemon.client.get("/api/tags", headers=headers)).status_code == status


async def test_this_machines_own_name_is_allowed(daemon: Daemon) -> None:
    assert (await daemon.client.get("/", headers={"Host": socket.gethostname()})).status_code == 200


async def test_a_request_id_is_kept_or_made(daemon: Daemon) -> None:
    response = await daemon.client.get("/", headers={"X-Request-Id": "my-id.7"})
    assert response.headers["x-request-id"] == "my-id.7"
    for bad in ("has blanks", "x" * 200):
        response = await daemon.client.get("/", headers={"X-Request-Id": bad})
        assert response.headers["x-request-id"] not in ("", bad)


async def test_a_body_over_the_limit_is_refused_before_it_is_kept(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1 << 20)

    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * (64 << 10)

    for content in (b"x" * (2 << 20), chunks()):
        response = await daemon.client.post("/api/chat", content=content)
        assert response.status_code == 413
        assert response.json()["error"] == "the request body is over the limit of 1 MiB"
    assert (await daemon.client.get("/")).status_code == 200
