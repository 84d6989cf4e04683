from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from tests.fixtures.daemons import Daemon, StartDaemon, start_supervisor

from localllm.daemon.supervisor import Supervisor


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """The daemon's own kind of loop: subprocesses and sockets differ from the standard one."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def start_daemon() -> AsyncIterator[StartDaemon]:
    """Starts supervisors; afterwards stops them and makes sure that no process is left."""
    started: list[Supervisor] = []

    async def start(*flags: str, **settings: Any) -> Daemon:
        started.append(await start_supervisor(*flags, **settings))
        return Daemon(started[-1])

    before = set(psutil.Process().children(recursive=True))
    yield start
    for supervisor in started:
        await supervisor.drain(0)
        assert supervisor.resident() == []
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, "runners are left over"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
