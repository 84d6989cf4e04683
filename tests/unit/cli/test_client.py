from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fixtures.fake_daemon import CUT, FakeDaemon, Part, Reply, error

from localllm.cli.client import Client
from localllm.config import log_file, parse_address
from localllm.errors import ConfigError, DaemonUnavailable, LocalLLMError, ModelNotFound, QueueFull


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(parse_address(daemon.url)) as client:
        yield client


def stream(client: Client, daemon: FakeDaemon, *parts: Part) -> list[dict[str, Any]]:
    daemon.on("POST", "/api/pull", parts)
    return list(client.stream("/api/pull", {}))


def test_an_error_keeps_its_kind_and_hint(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/ps", error("too many wait", code="queue_full", hint="Try later.", status=503))
    with pytest.raises(QueueFull, match="too many wait") as caught:
        client.call("GET", "/api/ps")
    assert caught.value.hint == "Try later."


def test_a_404_without_a_code_is_a_model_that_is_not_there(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", error("model 'x' not found", status=404))
    with pytest.raises(ModelNotFound, match="model 'x' not found"):
        client.call("POST", "/api/show", {"model": "x"})


def test_a_route_that_is_not_there_is_no_missing_model(client: Client) -> None:
    with pytest.raises(LocalLLMError, match="answered 404 to GET /api/else") as caught:
        client.call("GET", "/api/else")
    assert not isinstance(caught.value, ModelNotFound)


def test_an_answer_that_is_not_json_is_shown(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/ps", Reply(b"<html>Sign in</html>"))
    with pytest.raises(LocalLLMError, match="<html>Sign in"):
        client.call("GET", "/api/ps")


def test_an_empty_answer_is_fine(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("DELETE", "/api/delete", Reply())
    assert client.call("DELETE", "/api/delete", {"model": "x"}) == {}
    assert daemon.bodies("/api/delete") == [{"model": "x"}]


def test_lines_end_only_at_newlines(client: Client, daemon: FakeDaemon) -> None:
    odd = "a\u2028b\u0085c\x0bd"
    assert stream(client, daemon, {"status": odd}, {"status": "b"}) == [{"status": odd}, {"status": "b"}]


def test_lines_are_put_together_from_pieces(client: Client, daemon: FakeDaemon) -> None:
    assert stream(client, daemon, b'{"status"', b': "a"}\n\n{"status": "b"}') == [{"status": "a"}, {"status": "b"}]


def test_an_error_inside_a_stream_is_raised(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/pull", [{"status": "a"}, {"error": "disk full", "code": "no_space", "hint": "Free some."}])
    events = client.stream("/api/pull", {})
    assert next(events) == {"status": "a"}
    with pytest.raises(LocalLLMError, match="disk full") as caught:
        next(events)
    assert (caught.value.code, caught.value.hint) == ("no_space", "Free some.")


def test_a_daemon_that_dies_in_the_middle_is_named_with_its_log(client: Client, daemon: FakeDaemon) -> None:
    with pytest.raises(DaemonUnavailable, match="the daemon went away") as caught:
        stream(client, daemon, {"status": "a"}, CUT)
    assert str(log_file()) in caught.value.hint


def test_closing_a_stream_hangs_up_and_leaves_the_client_usable(client: Client, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/pull", [{"status": "a"}, threading.Event()])
    with contextlib.closing(client.stream("/api/pull", {})) as events:
        next(events)
    assert daemon.client_left.wait(5)
    assert client.call("GET", "/api/ps") == {"models": []}


def test_nobody_there_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(DaemonUnavailable, match=rf"127.0.0.1:{port}: Connection refused") as caught:
        Client(parse_address(f"127.0.0.1:{port}")).call("GET", "/api/ps")
    assert "localllm serve" in caught.value.hint


def test_a_log_on_another_machine_is_not_looked_for_here() -> None:
    assert str(log_file()) not in Client(parse_address("192.0.2.1")).log_hint


@pytest.mark.parametrize("address", ["ftp://127.0.0.1", "http://-ü-"])
def test_an_address_that_is_none_is_a_wrong_setting(address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        Client(parse_address(address))


def test_a_proxy_is_not_asked_for_what_is_on_this_machine(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    port = daemon.url.rpartition(":")[2]
    with Client(parse_address(f"0.0.0.0:{port}")) as client:
        assert client.call("GET", "/api/ps") == {"models": []}
