"""The main job with nothing faked: command line, daemon, runner, model."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.e2e.conftest import Machine, until
from tests.fixtures.ggufs import write_gguf

GREEDY = {"temperature": 0, "num_predict": 8}


def generate(machine: Machine, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, "raw": True, "stream": False, "options": GREEDY, **fields}
    return httpx.post(f"{machine.url}/api/generate", json=body, timeout=60)


@contextmanager
def endless_answer(machine: Machine) -> Iterator[Iterator[str]]:
    """The lines of a stream of which the first has come and that goes on for long."""
    body = {"model": "smollm2", "prompt": "Once upon a time", "options": {"num_predict": 900, "temperature": 1.5}}
    with httpx.stream("POST", f"{machine.url}/api/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert "response" in json.loads(next(lines))
        yield lines


def has_ended(process: psutil.Process) -> bool:
    """Gone, or only waiting for a parent that may never ask: not every first process reaps orphans."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_run_starts_a_daemon_answers_and_leaves_it_running(machine: Machine) -> None:
    first = machine.cli("run", "smollm2", "How many days has a week?")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert first.stderr == ""
    pid = machine.pid()
    assert machine.cli("run", "smollm2", "Say hello.").returncode == 0
    assert machine.pid() == pid
    (shown,) = json.loads(machine.cli("ps", "--json").stdout)
    assert (shown["name"], shown["context_length"]) == ("smollm2:latest", 1024)
    assert machine.cli("stop", "smollm2").returncode == 0
    until(lambda: machine.ps() == [])
    assert machine.runners() == []


def test_kill_of_a_runner_ends_its_answer_with_an_error_and_the_next_request_reloads(machine: Machine) -> None:
    machine.serve()
    with endless_answer(machine) as lines:
        (runner,) = machine.runners()
        runner.kill()
        last = json.loads(list(lines)[-1])
    assert "error" in last
    assert last["code"] == "runner_crashed"
    assert "Paris" in generate(machine, "The capital of France is").json()["response"]
    assert [r.pid for r in machine.runners()] != [runner.pid]


def test_kill_of_the_daemon_takes_its_runner_along_and_the_next_command_starts_another(machine: Machine) -> None:
    machine.cli("run", "smollm2", "hi")
    pid = machine.pid()
    (runner,) = machine.runners()
    assert pid is not None
    with endless_answer(machine):
        os.kill(pid, signal.SIGKILL)
        until(lambda: has_ended(runner), seconds=1)
    assert machine.cli("list").returncode == 0
    assert machine.pid() not in (None, pid)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(machine: Machine, stream: bool) -> None:
    machine.env["LOCALLLM_NUM_PARALLEL"] = "1"
    machine.serve()
    generate(machine, "warm up")
    body = {"model": "smollm2", "prompt": "Once upon a time", "stream": stream, "options": {"num_predict": 900}}
    payload = json.dumps(body).encode()
    host, port = machine.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /api/generate HTTP/1.1\r\nHost: {machine.address}\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        until(lambda: machine.ps()[0]["runner"]["num_in_flight"] == 1)
    until(lambda: machine.ps()[0]["runner"]["num_in_flight"] == 0, seconds=2)
    assert "Paris" in generate(machine, "The capital of France is").json()["response"]


def test_sixteen_clients_at_once_all_get_their_own_answer(machine: Machine) -> None:
    machine.env["LOCALLLM_NUM_PARALLEL"] = "16"
    machine.serve()
    numbers = [f"{n}{n}{n}" for n in range(1, 9)] + [f"{n}0{n}" for n in range(1, 9)]

    def ask(number: str) -> str:
        reply = generate(machine, f"My number is {number}. I said that my number is")
        return str(reply.json()["response"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, numbers))
    assert all(number in answer for number, answer in zip(numbers, answers, strict=True))


def test_a_full_queue_answers_503_and_when_to_come_back(machine: Machine) -> None:
    machine.env |= {"LOCALLLM_NUM_PARALLEL": "1", "LOCALLLM_MAX_QUEUE": "1"}
    machine.serve()
    generate(machine, "warm up")
    with ThreadPoolExecutor(6) as pool:
        options = {"num_predict": 60, "temperature": 0}
        replies = list(pool.map(lambda n: generate(machine, f"Story {n}:", options=options), range(6)))
    codes = sorted(reply.status_code for reply in replies)
    assert codes.count(200) >= 2
    assert codes.count(503) >= 3
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "server busy" in refused.json()["error"]


def test_an_idle_model_is_unloaded_after_its_keep_alive(machine: Machine) -> None:
    machine.env["LOCALLLM_KEEP_ALIVE"] = "0.3s"
    machine.serve()
    generate(machine, "hi")
    assert len(machine.ps()) == 1
    until(lambda: machine.ps() == [])
    until(lambda: machine.runners() == [])


def test_only_so_many_models_are_resident(machine: Machine, chat_store: Path) -> None:
    machine.env["LOCALLLM_MAX_LOADED_MODELS"] = "1"
    machine.serve()
    copy = httpx.post(
        f"{machine.url}/api/pull", json={"model": str(_other_model(chat_store)), "stream": False}, timeout=60
    )
    assert copy.status_code == 200
    generate(machine, "hi")
    assert generate(machine, "hi", model="other").status_code == 200
    assert [model["name"] for model in machine.ps()] == ["other:latest"]
    assert machine.cli("rm", "other").returncode == 0


def _other_model(chat_store: Path) -> Path:
    """The same weights with one byte of padding: another blob, so another model."""
    blob = next(path for path in (chat_store / "blobs").iterdir() if path.stat().st_size > 1 << 20)
    other = chat_store.parent / "other.gguf"
    other.write_bytes(blob.read_bytes() + b"\0")
    return other


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_work(machine: Machine) -> None:
    machine.env["LOCALLLM_DRAIN_TIMEOUT"] = "60s"
    daemon = machine.serve()
    generate(machine, "warm up")
    body = {"model": "smollm2", "prompt": "Tell a story.", "options": {"num_predict": 40}}
    with httpx.stream("POST", f"{machine.url}/api/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        daemon.terminate()
        last = json.loads(list(lines)[-1])
    assert last["done"] is True
    assert last["done_reason"] in ("stop", "length")
    assert daemon.wait(30) == 0
    assert machine.pid() is None


def test_a_second_daemon_says_that_one_is_running(machine: Machine) -> None:
    machine.serve()
    second = machine.cli("serve")
    assert second.returncode != 0
    assert str(machine.pid()) in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no-such-model", "hi"], "no-such-model"),
        (["show", "bad name"], "invalid"),
        (["rm", "nothing"], "not found"),
        (["stop", "nothing"], "couldn't find model"),
        (["pull", "/nowhere/x.gguf"], "is not a file"),
        (["pull", "hf.co/only-user"], "hf.co"),
    ],
)
def test_mistakes_get_one_clear_line(machine: Machine, arguments: list[str], words: str) -> None:
    machine.serve()
    result = machine.cli(*arguments)
    assert result.returncode == 1
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_truncated_model_file_is_refused_and_nothing_is_left_of_it(machine: Machine, tmp_path: Path) -> None:
    machine.env["LOCALLLM_MODELS"] = str(tmp_path / "store")
    machine.serve()
    path = tmp_path / "cut.gguf"
    path.write_bytes(write_gguf(tmp_path / "whole.gguf").read_bytes()[:-100])
    result = machine.cli("pull", str(path))
    assert result.returncode == 1
    assert "cut off" in result.stderr
    assert not list((tmp_path / "store").rglob("sha256-*"))


def test_a_model_that_cannot_be_loaded_fails_its_request_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    machine.env["LOCALLLM_MODELS"] = str(tmp_path / "store")
    machine.serve()
    write_gguf(tmp_path / "odd.gguf", arch="nosucharch")
    assert machine.cli("pull", str(tmp_path / "odd.gguf")).returncode == 0
    result = machine.cli("run", "odd", "hi")
    assert result.returncode == 1
    assert "nosucharch" in result.stderr
    assert machine.cli("list").returncode == 0


def test_openai_clients_get_a_stream_that_ends_properly(machine: Machine) -> None:
    machine.serve()
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "How many days has a week?"}],
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{machine.url}/v1/chat/completions", json=body, timeout=60) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(text) for text in data[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert "7" in text
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_two_command_lines_at_once_share_the_daemon_that_they_start(machine: Machine) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(machine.cli("list").returncode)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0, 0]
    assert machine.pid() is not None
    # The losers must have gone.
    until(lambda: sum(_is_daemon_of(machine, process) for process in psutil.process_iter()) == 1)


def _is_daemon_of(machine: Machine, process: psutil.Process) -> bool:
    try:
        command, environment = process.cmdline(), process.environ()
    except psutil.Error:
        return False
    return command[-1:] == ["serve"] and machine.address in environment.get("LOCALLLM_HOST", "")
