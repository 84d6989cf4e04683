"""Owning the address, and telling who else does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from localllm.config import Address, Config, state_dir
from localllm.daemon.instance import claim
from localllm.errors import AddressInUse, ConfigError

ServeAnswers = Callable[[dict[str, str]], Config]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def config_at(port: int, host: str = "127.0.0.1") -> Config:
    return Config(host=Address(host, port), origin_of={"host": "LOCALLLM_HOST"})


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.daemon.instance._PROBE_SECONDS", 0.3)
    monkeypatch.setattr("localllm.daemon.instance._LOCK_SECONDS", 0.1)


@pytest.fixture
def serve_answers() -> Iterator[ServeAnswers]:
    """A foreign HTTP server with the given bodies by path (404 elsewhere); returns a configuration of its address."""
    servers: list[HTTPServer] = []

    def start(answers: dict[str, str]) -> Config:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answers.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "404 page not found").encode())

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return config_at(server.server_port)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_address_is_ours_and_the_pid_is_shown_for_as_long_as_it_lasts() -> None:
    port = free_port()
    pid_file = state_dir() / f"daemon-127.0.0.1-{port}.pid"
    with claim(config_at(port)) as sock:
        assert sock.getsockname() == ("127.0.0.1", port)
        assert int(pid_file.read_text()) == os.getpid()
        socket.create_connection(("127.0.0.1", port)).close()
    assert not pid_file.exists()
    with claim(config_at(port)):
        pass


def test_what_a_killed_daemon_left_is_harmless() -> None:
    port = free_port()
    state_dir().mkdir(parents=True)
    (state_dir() / f"daemon-127.0.0.1-{port}.pid").write_text("1\n")
    (state_dir() / f"daemon-127.0.0.1-{port}.lock").touch()
    with claim(config_at(port)):
        pass


def test_one_that_is_just_stopping_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.daemon.instance._LOCK_SECONDS", 5)
    config = config_at(free_port())
    stopping = claim(config)
    stopping.__enter__().close()
    threading.Timer(0.1, stopping.__exit__, (None, None, None)).start()
    with claim(config) as sock:
        assert sock.getsockname()[1] == config.host.port


def test_two_daemons_may_run_on_two_ports() -> None:
    with claim(config_at(free_port())), claim(config_at(free_port())):
        pass


def test_a_running_localllm_is_named_with_its_pid(serve_answers: ServeAnswers) -> None:
    config = serve_answers({"/health": '{"status": "ok", "server": "localllm", "pid": 4711}'})
    with pytest.raises(AddressInUse, match=r"localllm runs on .* already \(pid 4711\)") as caught, claim(config):
        pass
    assert "kill 4711" in caught.value.hint
    assert caught.value.details == {"pid": 4711, "owner": "localllm"}


def test_an_ollama_server_is_told_apart(serve_answers: ServeAnswers) -> None:
    config = serve_answers({"/": "Ollama is running"})
    with pytest.raises(AddressInUse, match="an Ollama server has") as caught, claim(config):
        pass
    assert f"LOCALLLM_HOST=127.0.0.1:{config.host.port + 1}" in caught.value.hint


@pytest.mark.parametrize("health", ["null", "[]", '{"server": "localllm"}', '{"server": "else", "pid": 1}', "{"])
def test_any_other_http_server_is_another_program(serve_answers: ServeAnswers, health: str) -> None:
    config = serve_answers({"/health": health, "/": "hello"})
    with pytest.raises(AddressInUse, match="another program has"), claim(config):
        pass


def test_a_program_that_speaks_no_http_is_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = config_at(sock.getsockname()[1])
        with pytest.raises(AddressInUse, match="another program has"), claim(config):
            pass


def test_a_daemon_that_does_not_answer_yet_is_told_by_its_lock() -> None:
    config = config_at(free_port())
    with claim(config) as sock:
        sock.close()
        with pytest.raises(AddressInUse, match=rf"pid {os.getpid()}.*starting or stopping"), claim(config):
            pass


def test_a_proxy_in_the_environment_does_not_hide_the_owner(
    serve_answers: ServeAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    config = serve_answers({"/": "Ollama is running"})
    with pytest.raises(AddressInUse, match="Ollama"), claim(config):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_names_the_setting(host: str) -> None:
    with pytest.raises(ConfigError, match="LOCALLLM_HOST"), claim(config_at(free_port(), host)):
        pass


def test_https_is_refused_instead_of_spoken_wrongly() -> None:
    config = Config(host=Address("127.0.0.1", free_port(), "https"))
    with pytest.raises(ConfigError, match="cannot listen on https"), claim(config):
        pass


def test_a_state_folder_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/nowhere")
    with claim(config_at(free_port())):
        pass
    assert "no lock and pid file" in caplog.text


def test_all_interfaces_can_be_listened_on() -> None:
    port = free_port()
    with claim(config_at(port, "0.0.0.0")):
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(AddressInUse), claim(config_at(port)):
            pass
