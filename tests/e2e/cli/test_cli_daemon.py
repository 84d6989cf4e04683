"""The real daemon, started by whichever command needs it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.cli.conftest import Done
from tests.fixtures.cli import COMMAND, PATIENCE_SECONDS, end_all, environment, started

Localllm = Callable[..., Done]
HEADER = b"NAME    ID    SIZE    MODIFIED    \n"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A free address and an empty store. All that still runs there afterwards is ended."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    env = environment(tmp_path, address, LOCALLLM_MODELS=str(tmp_path / "models"))
    yield env
    end_all(env)


def pid_of(env: dict[str, str]) -> int:
    return int(httpx.get(f"http://{env['LOCALLLM_HOST']}/health", trust_env=False).json()["pid"])


def test_a_command_starts_the_daemon_and_leaves_it_running(localllm: Localllm, env: dict[str, str]) -> None:
    first = localllm("list")
    assert (first.returncode, first.stdout, first.stderr) == (0, HEADER, b"")
    pid = pid_of(env)
    assert os.getsid(pid) == pid
    assert localllm("ps").returncode == 0
    assert pid_of(env) == pid
    log = Path(env["XDG_STATE_HOME"], "localllm", "log", "daemon.log")
    assert env["LOCALLLM_HOST"] in log.read_text()


def test_commands_that_start_together_share_one_daemon(env: dict[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        commands = [stack.enter_context(started(("list",), env)) for _ in range(3)]
        results = [command.communicate(timeout=PATIENCE_SECONDS * 2) for command in commands]
    assert results == [(HEADER, b"")] * 3


def test_nothing_is_left_of_daemons_that_waited_for_one_another(env: dict[str, str]) -> None:
    with started(("serve",), env) as first, started(("serve",), env) as second, started(("serve",), env) as third:
        assert first.stderr is not None
        first.stderr.readline()
        end_all(env)
        assert all(process.poll() is not None for process in (first, second, third))
        with pytest.raises(httpx.ConnectError):
            pid_of(env)


def test_a_daemon_that_cannot_start_says_why(localllm: Localllm, env: dict[str, str]) -> None:
    # An address of nobody: bound by the daemon, so only found out there.
    done = localllm("list", env_more={"LOCALLLM_HOST": "127.0.0.1:80000"})
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: ")
    assert b"80000" in done.stderr


def test_a_second_daemon_is_told_who_has_the_address(localllm: Localllm, env: dict[str, str]) -> None:
    localllm("list")
    done = localllm("serve")
    assert done.returncode == 3
    assert str(pid_of(env)).encode() in done.stderr
    assert b"Traceback" not in done.stderr


def test_serve_listens_where_the_flag_says_and_ends_when_told(env: dict[str, str]) -> None:
    address = env.pop("LOCALLLM_HOST")
    command = [*COMMAND, "serve", "--host", address]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        env["LOCALLLM_HOST"] = address
        while b"listens on" not in (line := process.stderr.readline()):
            assert line
        assert pid_of(env) == process.pid
        process.terminate()
        process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 0
