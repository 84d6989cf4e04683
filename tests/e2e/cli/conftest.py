"""The command line as users have it: real processes, pipes and terminals."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.cli import COMMAND, PATIENCE_SECONDS, Terminal, environment
from tests.fixtures.fake_daemon import FakeDaemon, serve_fake_daemon

Done = subprocess.CompletedProcess[bytes]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with serve_fake_daemon() as fake:
        yield fake


@pytest.fixture
def env(daemon: FakeDaemon, tmp_path: Path) -> dict[str, str]:
    """The environment of a command that finds the fake daemon."""
    return environment(tmp_path, daemon.url)


@pytest.fixture
def localllm(env: dict[str, str]) -> Callable[..., Done]:
    """Runs a command to its end with pipes; `input` are the bytes on its standard input, none by default."""

    def run(*arguments: str, input: bytes = b"", env_more: dict[str, str] | None = None) -> Done:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=input,
            capture_output=True,
            env={**env, **(env_more or {})},
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    return run


@pytest.fixture
def terminal(env: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """Starts commands on terminals; keywords other than `columns` are environment variables."""
    open_ones = []

    def start(*arguments: str, columns: int = 80, **more: Any) -> Terminal:
        opened = Terminal(arguments, {**env, **more}, columns=columns)
        open_ones.append(opened)
        return opened

    yield start
    for opened in open_ones:
        opened.__exit__(None, None, None)
