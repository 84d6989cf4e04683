"""Fixtures of the API's tests; see harness."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.api.harness import Daemon, FakeSupervisor, StoreBuilder, serve

from localllm.config import Config
from localllm.store.library import ModelStore


@pytest.fixture(scope="session")
def prepared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the models "tiny" (plain), "thinker", "tooler", "embedder" and "ranker"."""
    folder = tmp_path_factory.mktemp("prepared")
    models = StoreBuilder(ModelStore(folder / "store"), folder)
    models.add("tiny")
    models.add("thinker", template="{{ messages }}<think></think>")
    models.add("tooler", template="{{ messages }}{{ tools }}")
    models.add("embedder", pooling=1)
    models.add("ranker", pooling=4)
    return folder / "store"


@pytest.fixture
def models(tmp_path: Path, prepared_store: Path) -> StoreBuilder:
    """The prepared models, in a store of the test's own."""
    shutil.copytree(prepared_store, tmp_path / "store")
    return StoreBuilder(ModelStore(tmp_path / "store"), tmp_path)


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor()


@pytest.fixture
async def daemon(models: StoreBuilder, supervisor: FakeSupervisor) -> AsyncIterator[Daemon]:
    async with serve(Config(), models, supervisor) as running:
        yield running
