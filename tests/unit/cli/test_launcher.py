from __future__ import annotations

import contextlib
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.fake_daemon import FakeDaemon, Reply

import localllm
from localllm.cli import launcher
from localllm.cli.client import Client
from localllm.cli.status import Status
from localllm.config import Config, load_config, log_file, parse_address
from localllm.errors import AddressInUse, DaemonUnavailable

# A daemon as small as can be; it ends when it has been asked `requests` times.
LITTLE_DAEMON = textwrap.dedent(
    f"""
    import http.server, os, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{{"server": "localllm", "version": "{localllm.__version__}"}}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
    port, requests = map(int, sys.argv[1:])
    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        for _ in range(requests):
            server.handle_request()
    """
)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def ensure(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Look for a daemon on a free port, and start this Python code if there is none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(launcher, "_AGAIN_SECONDS", 0.05)
    children = []
    spawn = launcher._spawn

    def remember(*arguments: object) -> object:
        child, *rest = spawn(*arguments)  # type: ignore[arg-type]
        children.append(child)
        return child, *rest

    monkeypatch.setattr(launcher, "_spawn", remember)

    def run(code: str, *arguments: object, **settings: object) -> None:
        config = Config(host=parse_address(f"127.0.0.1:{port}"), **settings)  # type: ignore[arg-type]
        command = [sys.executable, "-c", code, *map(str, arguments)]
        with Client(config.host) as client:
            launcher.ensure_running(client, config, command=command)

    yield run
    for child in children:
        child.wait(10)


def find(address: str) -> str:
    with Client(parse_address(address)) as client:
        return launcher.find_daemon(client)


# ---- who answers ----


def test_finds_the_daemon(daemon: FakeDaemon) -> None:
    assert find(daemon.url) == localllm.__version__


def test_an_ollama_server_is_not_ours(daemon: FakeDaemon) -> None:
    daemon.on("GET", "/health", Reply(b"404 page not found", 404))
    with pytest.raises(AddressInUse, match=rf"a different server \(Ollama\) answers at {daemon.url}") as caught:
        find(daemon.url)
    assert "LOCALLLM_HOST" in caught.value.hint


@pytest.mark.parametrize("health", [Reply(b"hello"), Reply({"status": "ok"}), Reply([1]), Reply({}, 500)])
def test_another_web_server_is_not_ours(daemon: FakeDaemon, health: Reply) -> None:
    daemon.on("GET", "/health", health)
    daemon.on("GET", "/", Reply(b"It works!"))
    with pytest.raises(AddressInUse, match="a different server answers"):
        find(daemon.url)


@contextlib.contextmanager
def line_server(greeting: bytes) -> Iterator[str]:
    """Something that speaks no HTTP: sends its greeting, if it has one, and closes; else it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def greet() -> None:
            connection, _ = sock.accept()
            with connection:
                connection.recv(1000)
                if greeting:
                    connection.sendall(greeting)
                else:
                    connection.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{sock.getsockname()[1]}"
        thread.join()


def test_something_that_speaks_no_http_is_not_ours() -> None:
    with line_server(b"220 mail.example ESMTP\r\n") as address, pytest.raises(AddressInUse, match="a different server"):
        find(address)


def test_a_server_that_does_not_answer_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PROBE_SECONDS", 0.1)
    with line_server(b"") as address, pytest.raises(DaemonUnavailable, match=r"did not answer within 0\.1 s"):
        find(address)


def test_another_version_is_a_warning(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.on("GET", "/health", Reply({"server": "localllm", "version": "0.0.1"}))
    launcher.connect(load_config(env={"LOCALLLM_HOST": daemon.url})).http.close()
    assert "Warning: the daemon is version 0.0.1" in capsys.readouterr().err


# ---- starting one ----


@pytest.mark.parametrize("url", ["http://192.0.2.1:{}", "https://127.0.0.1:{}", "http://127.0.0.1:{}/prefix"])
def test_none_is_started_where_it_could_not_be_the_one_that_is_meant(
    url: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*arguments: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(launcher, "_spawn", spawn)
    monkeypatch.setattr("localllm.cli.client.CONNECT_SECONDS", 0.2)
    config = Config(host=parse_address(url.format(port)))
    with pytest.raises(DaemonUnavailable, match="could not connect"):
        launcher.connect(config)


def test_starts_a_daemon_and_waits_until_it_answers(ensure: Callable[..., None], port: int) -> None:
    ensure(LITTLE_DAEMON, port, 2)
    assert find(f"127.0.0.1:{port}") == localllm.__version__


def test_what_a_failed_start_said_is_passed_on(ensure: Callable[..., None]) -> None:
    with pytest.raises(DaemonUnavailable, match="the daemon could not start: no such folder") as caught:
        ensure("import sys; sys.exit('2026 INFO begins\\nError: no such folder\\nHint: Make it.')")
    assert caught.value.hint == "Make it."


def test_of_a_start_that_failed_otherwise_the_last_words_are_shown(ensure: Callable[..., None]) -> None:
    with pytest.raises(DaemonUnavailable, match="ZeroDivisionError") as caught:
        ensure("1 / 0")
    assert str(log_file()) in caught.value.hint


def test_a_daemon_that_ends_while_it_is_asked_has_failed(ensure: Callable[..., None], port: int) -> None:
    code = (
        "import socket, sys\n"
        f"with socket.create_server(('127.0.0.1', {port})) as server:\n"
        "    server.accept()[0].close()\n"
        "sys.exit('Error: the store is broken')"
    )
    with pytest.raises(DaemonUnavailable, match="the daemon could not start: the store is broken"):
        ensure(code)


def test_only_words_of_this_start_are_shown(ensure: Callable[..., None]) -> None:
    log_file().parent.mkdir(parents=True)
    log_file().write_text("Error: of yesterday\n")
    with pytest.raises(DaemonUnavailable, match="it said nothing"):
        ensure("raise SystemExit(1)")


def test_one_that_finds_a_quicker_neighbour_waits_for_it(
    ensure: Callable[..., None], port: int, tmp_path: Path
) -> None:
    """The first finds the address taken, as if another held it without answering yet; then it is free."""
    mark = tmp_path / "was-here"
    code = (
        f"import pathlib, sys\nmark = pathlib.Path({str(mark)!r})\n"
        f"if not mark.exists():\n    mark.touch()\n    sys.exit({int(Status.ADDRESS_IN_USE)})\n{LITTLE_DAEMON}"
    )
    ensure(code, port, 1)
    assert mark.exists()


def test_gives_up_on_one_that_never_answers(ensure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "START_SECONDS", 0.3)
    with pytest.raises(DaemonUnavailable, match=r"did not answer within 0\.3 s"):
        ensure("import time; time.sleep(60)")


def test_a_log_that_cannot_be_written_is_an_error(ensure: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "localllm").write_text("a file where a folder should be")
    with pytest.raises(DaemonUnavailable, match="could not be started"):
        ensure("pass")


def test_a_long_log_is_put_aside(ensure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_LOG_BYTES", 3)
    log_file().parent.mkdir(parents=True)
    log_file().write_text("long enough")
    with pytest.raises(DaemonUnavailable):
        ensure("raise SystemExit('new')")
    assert log_file().read_text() == "new\n"
    assert log_file().with_name("daemon.log.1").read_text() == "long enough"


def test_a_relative_store_is_the_same_folder_for_the_daemon(
    ensure: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DaemonUnavailable, match=f"in / with {tmp_path}/here"):
        ensure(
            "import os; raise SystemExit('in ' + os.getcwd() + ' with ' + os.environ['LOCALLLM_MODELS'])",
            models=Path("here"),
        )
