"""The whole daemon as a subprocess, with fake runners: signals, ports, kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy
import psutil
import pytest
from tests.unit.daemon.test_instance import free_port

from localllm.config import state_dir

SERVE_FAKE = Path(__file__).parents[2] / "fixtures" / "serve_fake.py"


class RunningDaemon:
    """A daemon process with the model "tiny" in its store."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def ask(self, prompt: str, num_predict: int = 3) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "stream": False, "options": {"num_predict": num_predict}}
        return self.client.post("/api/generate", json=body)

    def stream(self, prompt: str, num_predict: int = 3) -> Any:
        """Context of a response that streams."""
        body = {"model": "tiny", "prompt": prompt, "options": {"num_predict": num_predict}}
        return self.client.stream("POST", "/api/generate", json=body)

    def runner(self) -> psutil.Process:
        (running,) = self.client.get("/api/ps").json()["models"]
        return psutil.Process(running["runner"]["pid"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(10)


StartServer = Callable[..., RunningDaemon]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def servers(folder: Path, model_file: Path) -> Iterator[StartServer]:
    """Starts daemons on one store in `folder`, and kills in the end those that still run."""
    started: list[RunningDaemon] = []

    def start(*flags: str, port: int | None = None, **settings: str) -> RunningDaemon:
        port = port or free_port()
        daemon = RunningDaemon(launch(*flags, port=port, models=folder / "store", **settings), port)
        started.append(daemon)
        wait_until(lambda: answers(daemon.client))
        daemon.client.post("/api/pull", json={"model": str(model_file), "stream": False}).raise_for_status()
        return daemon

    try:
        yield start
    finally:
        for daemon in started:
            daemon.client.close()
            daemon.process.kill()
            daemon.process.communicate()


@pytest.fixture
def start_server(tmp_path: Path, model_file: Path) -> Iterator[StartServer]:
    with servers(tmp_path, model_file) as start:
        yield start


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[RunningDaemon]:
    """For tests that leave it as it was: one slot and no queue."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch, servers(folder, model_file) as start:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield start(num_parallel="1", max_queue="0")


def launch(*flags: str, port: int, models: Path, **settings: str) -> subprocess.Popen[str]:
    variables = {f"LOCALLLM_{key.upper()}": value for key, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, str(SERVE_FAKE), *flags],
        env={**os.environ, "LOCALLLM_HOST": f"127.0.0.1:{port}", "LOCALLLM_MODELS": str(models), **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> float:
    """How long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not come about"
        time.sleep(0.005)
    return time.monotonic() - start


def is_over(process: psutil.Process) -> bool:
    """Ended, though perhaps nobody has asked for its exit status yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_it_answers_and_stops_cleanly(start_server: StartServer) -> None:
    daemon = start_server()
    assert daemon.ask("echo my secret words").json()["response"] == "my secret words"
    runner = daemon.runner()
    daemon.signal(signal.SIGTERM)
    _, log = daemon.process.communicate(timeout=10)
    assert daemon.process.returncode == 0
    assert is_over(runner)
    assert not list(state_dir().glob("*.pid"))
    assert "is loaded" in log and "Traceback" not in log
    assert "secret" not in log


def test_a_signal_lets_running_answers_finish_and_refuses_new_ones(start_server: StartServer) -> None:
    daemon = start_server()
    with daemon.stream("slow", num_predict=30) as response:
        lines = response.iter_lines()
        next(lines)
        daemon.signal(signal.SIGINT)
        wait_until(lambda: daemon.ask("say").status_code == 503)
        refused = daemon.ask("say")
        rest = [json.loads(line) for line in lines]
    assert refused.json()["code"] == "shutting_down"
    assert int(refused.headers["Retry-After"]) > 0
    assert rest[-1]["done"] and rest[-1]["eval_count"] == 30
    assert daemon.wait() == 0


def test_an_answer_that_takes_too_long_is_cut_with_an_error(start_server: StartServer) -> None:
    daemon = start_server(drain_timeout="100ms")
    with daemon.stream("slow", num_predict=10_000) as response:
        lines = response.iter_lines()
        next(lines)
        daemon.signal(signal.SIGTERM)
        *_, last = lines
    assert json.loads(last)["code"] == "shutting_down"
    assert daemon.wait() == 0


def test_a_second_signal_stops_at_once(start_server: StartServer) -> None:
    daemon = start_server(drain_timeout="-1")
    with daemon.stream("slow", num_predict=10_000) as response:
        lines = response.iter_lines()
        next(lines)
        runner = daemon.runner()
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: daemon.ask("say").status_code == 503)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
    assert is_over(runner)


def test_a_second_daemon_says_who_has_the_port(small_server: RunningDaemon, tmp_path: Path) -> None:
    second = launch(port=int(small_server.url.rpartition(":")[2]), models=tmp_path / "store")
    _, errors = second.communicate(timeout=10)
    assert second.returncode == 1
    assert f"localllm runs on {small_server.url} already (pid {small_server.process.pid})" in errors
    assert "Traceback" not in errors


def test_a_killed_daemon_leaves_no_runner_and_no_obstacle(start_server: StartServer) -> None:
    daemon = start_server()
    with daemon.stream("slow", num_predict=10_000) as response:
        lines = response.iter_lines()
        next(lines)
        runner = daemon.runner()
        daemon.signal(signal.SIGKILL)
        assert wait_until(lambda: is_over(runner)) < 1
    again = start_server(port=int(daemon.url.rpartition(":")[2]))
    assert again.ask("say").status_code == 200


def test_a_signal_during_a_load_refuses_who_waits_and_ends_the_load(start_server: StartServer) -> None:
    daemon = start_server("--load", "stall")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(daemon.ask, "say")
        wait_until(lambda: len(daemon.client.get("/api/ps").json()["models"]) == 1)
        daemon.signal(signal.SIGTERM)
        assert waiting.result(5).json()["code"] == "shutting_down"
    assert daemon.wait() == 0


def test_a_killed_runner_is_an_error_object_and_the_next_request_reloads(small_server: RunningDaemon) -> None:
    with small_server.stream("slow", num_predict=10_000) as response:
        lines = response.iter_lines()
        next(lines)
        small_server.runner().kill()
        *_, last = lines
    assert response.status_code == 200
    assert json.loads(last)["code"] == "runner_crashed"
    assert small_server.ask("say").json()["response"] == "w0 w1 w2"


def test_a_client_that_leaves_frees_its_place(small_server: RunningDaemon) -> None:
    with small_server.stream("slow", num_predict=10_000) as response:
        lines = response.iter_lines()
        next(lines)
        assert small_server.ask("say").status_code == 503
    wait_until(lambda: small_server.ask("say").status_code == 200)


def test_a_pull_that_outlasts_the_draining_says_so(start_server: StartServer) -> None:
    daemon = start_server()
    with socket.create_server(("127.0.0.1", 0)) as source:
        url = f"http://127.0.0.1:{source.getsockname()[1]}/slow.gguf"
        with daemon.client.stream("POST", "/api/pull", json={"model": url}) as response:
            lines = response.iter_lines()
            next(lines)
            daemon.signal(signal.SIGTERM)
            *_, last = lines
    assert json.loads(last)["code"] == "shutting_down"
    _, log = daemon.process.communicate(timeout=10)
    assert daemon.process.returncode == 0
    assert "Traceback" not in log
