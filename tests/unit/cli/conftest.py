"""The command line in this process against a fake daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fixtures.fake_daemon import FakeDaemon, serve_fake_daemon

from localllm.cli import app


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with serve_fake_daemon() as fake:
        yield fake


@pytest.fixture
def run(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs one command line, with nothing to read, to its exit status and what it printed."""
    monkeypatch.setenv("LOCALLLM_HOST", daemon.url)
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)

        def execute(*arguments: str) -> Result:
            status = app.execute(arguments)
            return Result(status, *capsys.readouterr())

        yield execute
