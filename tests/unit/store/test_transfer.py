"""The transfer against a server on loopback that can be told to fail."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fixtures.web import Faults, Reply, Request, Web, deliver

from localllm.errors import (
    DigestMismatch,
    Forbidden,
    LocalLLMError,
    NoSpace,
    NotFoundAtSource,
    SourceUnavailable,
    Unauthorized,
)
from localllm.store import transfer, web
from localllm.store.partial import Journal, Part, journal_path, read_journal
from localllm.store.web import Remote, new_client

PART = 10_000
DATA = bytes(range(256)) * 200  # 51,200 bytes: five parts and a bit
SHA256 = hashlib.sha256(DATA).hexdigest()


@dataclass
class Server:
    """One file, `data`, and what goes wrong with it."""

    data: bytes = DATA
    faults: Faults = field(default_factory=Faults)
    on_request: Callable[[Request], None] = lambda _request: None
    web: Web = field(init=False)

    def __post_init__(self) -> None:
        self.web = Web(self._answer)

    def _answer(self, request: Request) -> Reply:
        self.on_request(request)
        return deliver(request, self.data, self.faults)

    def remote(self, **changes: Any) -> Remote:
        return Remote(**{"url": f"{self.web.url}/model.gguf", "sha256": SHA256, "size": len(DATA), **changes})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MIN_PART_BYTES", PART)
    monkeypatch.setattr(web, "MAX_BACKOFF_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with server.web.running():
        yield server


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    return tmp_path / "x-partial"


@dataclass
class Outcome:
    reports: list[tuple[int, int]] = field(default_factory=list)
    digest: str = ""
    size: int = 0
    error: LocalLLMError | None = None


async def fetch(remote: Remote, partial: Path, outcome: Outcome, **options: Any) -> None:
    async with new_client() as client:
        outcome.digest, outcome.size = await transfer.download(
            client, remote, partial, lambda done, total: outcome.reports.append((done, total)), **options
        )


def download(remote: Remote, partial: Path, **options: Any) -> Outcome:
    outcome = Outcome()
    try:
        asyncio.run(fetch(remote, partial, outcome, **options))
    except LocalLLMError as error:
        outcome.error = error
    return outcome


def leave_partial(partial: Path, done: list[int], *, validator: str = '"v1"', data: bytes = DATA) -> None:
    """What an attempt leaves that was killed when the parts had so many bytes."""
    parts = [Part(at, min(PART, len(DATA) - at)) for at in range(0, len(DATA), PART)]
    content = bytearray(len(DATA))
    for part, num_bytes in zip(parts, done, strict=False):
        part.done = num_bytes
        content[part.offset : part.offset + num_bytes] = data[part.offset : part.offset + num_bytes]
    partial.write_bytes(content)
    journal_path(partial).write_bytes(msgspec.json.encode(Journal(len(DATA), validator, parts)))


def test_a_file_comes_in_parts_and_whole(server: Server, partial: Path) -> None:
    outcome = download(server.remote(), partial)
    assert (outcome.error, outcome.digest, outcome.size) == (None, SHA256, len(DATA))
    assert partial.read_bytes() == DATA
    assert sorted(server.web.ranges()) == sorted(
        f"{at}-{min(at + PART, len(DATA)) - 1}" for at in range(0, len(DATA), PART)
    )
    assert outcome.reports == sorted(outcome.reports)
    assert outcome.reports[-1] == (len(DATA), len(DATA))


def test_parts_are_fetched_at_the_same_time(server: Server, partial: Path) -> None:
    meeting = threading.Barrier(transfer.CONNECTIONS, timeout=5)
    met: list[int] = []

    def meet(request: Request) -> None:
        if request.range != "0-0" and len(met) < transfer.CONNECTIONS:
            met.append(meeting.wait())

    server.on_request = meet
    assert download(server.remote(), partial).error is None
    assert len(met) >= transfer.CONNECTIONS


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1])
def test_files_of_any_size_arrive(server: Server, partial: Path, size: int) -> None:
    server.data = DATA[:size]
    outcome = download(server.remote(sha256="", size=None), partial)
    assert (outcome.error, outcome.size, partial.read_bytes()) == (None, size, DATA[:size])


@pytest.mark.parametrize(
    "faults",
    [
        Faults(cut_after=[0, 100, 3000]),
        Faults(stall_after=[500, 0]),
        Faults(statuses=[503, 429]),
        Faults(statuses=[500, 408, 425]),
        Faults(shift_ranges=[7, -3]),
        Faults(num_extra=100),
        Faults(ignore_ranges=True),
        Faults(ignore_ranges=True, cut_after=[700, 900]),
        Faults(ignore_ranges=True, has_length=False),
    ],
    ids=str,
)
def test_the_right_bytes_arrive_in_spite_of(
    server: Server, partial: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "STALL_SECONDS", 0.2)
    server.faults = faults
    outcome = download(server.remote(), partial)
    assert (outcome.error, partial.read_bytes() == DATA) == (None, True)


def test_a_broken_connection_is_resumed_where_it_broke(server: Server, partial: Path) -> None:
    server.faults.cut_after = [100, 3000]
    assert download(server.remote(), partial).error is None
    asked = server.web.ranges()
    assert len(set(asked)) == len(asked), "no range is fetched twice"
    assert any(text.split("-")[0][-3:] == "100" for text in asked)


def test_a_server_that_loses_its_ranges_is_read_in_one_stream(server: Server, partial: Path) -> None:
    def lose(request: Request) -> None:
        server.faults.ignore_ranges = request.range != "0-0"

    server.on_request = lose
    assert download(server.remote(), partial).error is None
    assert partial.read_bytes() == DATA


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_server_that_always_breaks_off_is_given_up(server: Server, partial: Path, ignore_ranges: bool) -> None:
    server.faults = Faults(ignore_ranges=ignore_ranges, cut_always=0)
    error = download(server.remote(), partial).error
    assert isinstance(error, SourceUnavailable)
    server.faults = Faults(ignore_ranges=True, cut_always=5000)
    error = download(server.remote(), partial).error
    assert isinstance(error, SourceUnavailable)
    assert "127.0.0.1" in error.message


def test_a_server_that_is_not_there_is_given_up_at_once(partial: Path) -> None:
    outcome = download(Remote("http://127.0.0.1:9/model.gguf"), partial)
    assert isinstance(outcome.error, SourceUnavailable)
    assert outcome.error.details["place"] == "127.0.0.1"
    assert not partial.exists()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, Unauthorized), (403, Forbidden), (404, NotFoundAtSource), (410, NotFoundAtSource), (400, SourceUnavailable)],
)
def test_a_refusal_is_told_for_what_it_is(
    server: Server, partial: Path, status: int, kind: type[LocalLLMError]
) -> None:
    server.faults.statuses = [status]
    assert type(download(server.remote(), partial).error) is kind
    assert len(server.web.requests) == 1


def test_a_server_that_wants_too_much_patience_is_given_up(server: Server, partial: Path) -> None:
    server.faults = Faults(statuses=[429], retry_after="86400")
    error = download(server.remote(), partial).error
    assert isinstance(error, SourceUnavailable)
    assert "429" in error.message


def test_an_earlier_attempt_is_continued(server: Server, partial: Path) -> None:
    leave_partial(partial, [PART, 4000, 0, PART])
    outcome = download(server.remote(), partial)
    assert (outcome.error, outcome.reports[0]) == (None, (2 * PART + 4000, len(DATA)))
    assert partial.read_bytes() == DATA
    assert sorted(server.web.ranges()) == ["14000-19999", "20000-29999", "40000-49999", "50000-51199"]


def test_an_attempt_that_was_complete_is_only_verified(server: Server, partial: Path) -> None:
    leave_partial(partial, [PART] * 5 + [len(DATA) - 5 * PART])
    assert download(server.remote(), partial).error is None
    assert server.web.ranges() == []


@pytest.mark.parametrize(
    "journal",
    [
        b"",
        b"{}",
        b'{"size":51200,"validator":"","parts":[]}',
        b'{"size":51200,"validator":"","parts":[{"offset":0,"size":51200,"done":51201}]}',
        b'{"size":51200,"validator":"","parts":[{"offset":7,"size":51200,"done":9}]}',
        b'{"size":9,"validator":"","parts":[{"offset":0,"size":9,"done":9}]}',
    ],
)
def test_a_journal_that_makes_no_sense_is_forgotten(server: Server, partial: Path, journal: bytes) -> None:
    partial.write_bytes(b"x" * len(DATA))
    journal_path(partial).write_bytes(journal)
    outcome = download(server.remote(), partial)
    assert (outcome.error, outcome.reports[0], partial.read_bytes() == DATA) == (None, (0, len(DATA)), True)


def test_bad_bytes_of_an_earlier_attempt_are_fetched_again(server: Server, partial: Path) -> None:
    leave_partial(partial, [PART, 4000], data=b"?" * len(DATA))
    assert download(server.remote(), partial).error is None
    assert partial.read_bytes() == DATA


def test_bad_bytes_of_the_source_are_refused_and_removed(server: Server, partial: Path) -> None:
    server.faults.corrupt = True
    error = download(server.remote(), partial).error
    assert isinstance(error, DigestMismatch)
    assert SHA256 in error.message
    assert list(partial.parent.iterdir()) == []


def test_another_length_than_was_promised_is_refused_before_anything_is_fetched(server: Server, partial: Path) -> None:
    server.data = DATA + b"more"
    error = download(server.remote(), partial).error
    assert isinstance(error, SourceUnavailable)
    assert "51204" in error.message
    assert server.web.ranges() == []


@pytest.mark.parametrize("sha256", ["", SHA256])
def test_a_partial_of_another_version_is_forgotten_unless_the_digest_decides(
    server: Server, partial: Path, sha256: str
) -> None:
    leave_partial(partial, [PART], validator='"old"')
    outcome = download(server.remote(sha256=sha256), partial)
    assert (outcome.error, outcome.reports[0][0]) == (None, PART if sha256 else 0)


def test_a_file_that_changes_on_the_way_is_begun_anew(server: Server, partial: Path) -> None:
    newer = DATA[::-1]

    def change(request: Request) -> None:
        if request.range.startswith("20000-"):
            server.data = newer
        server.faults.etags = ['"v1"' if server.data is DATA else '"v2"']

    server.on_request = change
    outcome = download(server.remote(sha256=""), partial)
    assert (outcome.error, partial.read_bytes() == newer) == (None, True)


def test_a_file_that_keeps_changing_is_given_up(server: Server, partial: Path) -> None:
    server.faults.etags = [f'"{n}"' for n in range(1000)]
    error = download(server.remote(sha256=""), partial).error
    assert isinstance(error, SourceUnavailable)
    assert "keeps changing" in error.message


@pytest.mark.parametrize("shrunk", [5000, 40_000])
def test_a_file_that_shrinks_on_the_way_is_begun_anew(server: Server, partial: Path, shrunk: int) -> None:
    def shrink(request: Request) -> None:
        if request.range.startswith("50000-"):
            server.data = DATA[:shrunk]

    server.on_request = shrink
    outcome = download(server.remote(sha256="", size=None), partial)
    assert (outcome.error, partial.read_bytes() == DATA[:shrunk]) == (None, True)


def test_a_full_disk_is_noticed_before_the_first_byte_and_counts_what_is_there(
    server: Server, partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    free = 20_000
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=free))
    error = download(server.remote(), partial).error
    assert isinstance(error, NoSpace)
    assert error.details["missing_bytes"] == len(DATA) - free
    assert server.web.ranges() == []
    leave_partial(partial, [PART, PART, PART, PART])
    error = download(server.remote(), partial, also_needed=PART).error
    assert isinstance(error, NoSpace)
    assert error.details["missing_bytes"] == len(DATA) - 4 * PART + PART - free
    assert download(server.remote(), partial).error is None


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_disk_that_fills_up_is_told_with_numbers_and_the_partial_stays(
    server: Server, partial: Path, monkeypatch: pytest.MonkeyPatch, ignore_ranges: bool
) -> None:
    write = os.pwrite

    def fill_up(file: int, data: Any, offset: int) -> int:
        if offset + len(data) > 20_000:
            monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=100))
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("os.pwrite", fill_up)
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 4096)
    server.faults.ignore_ranges = ignore_ranges
    error = download(server.remote(), partial).error
    assert isinstance(error, NoSpace)
    assert isinstance(error.details["missing_bytes"], int)
    assert 0 < error.details["missing_bytes"] < len(DATA)
    assert partial.exists()
    if ignore_ranges:
        return
    monkeypatch.undo()
    before = len(server.web.ranges())
    assert download(server.remote(), partial).error is None
    assert all(int(asked.partition("-")[0]) >= 20_000 for asked in server.web.ranges()[before:])


def test_a_cancelled_download_ends_at_once_and_can_be_continued(server: Server, partial: Path) -> None:
    server.faults.stall_after = [600, 600, 600, 600]

    async def start_and_cancel() -> None:
        has_begun = asyncio.Event()

        def on_report(done: int, _total: int) -> None:
            if done >= 600:
                has_begun.set()

        async with new_client() as client:
            task = asyncio.create_task(transfer.download(client, server.remote(), partial, on_report))
            await asyncio.wait_for(has_begun.wait(), 5)
            task.cancel()
            await asyncio.wait([task], timeout=2)
        assert task.cancelled()

    asyncio.run(start_and_cancel())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("localllm-download")]
    journal = read_journal(partial)
    assert journal is not None
    assert journal.done >= 600
    server.faults = Faults()
    assert download(server.remote(), partial).error is None
    assert partial.read_bytes() == DATA


def test_credentials_that_run_out_are_renewed(partial: Path) -> None:
    granted: list[str] = []
    num_uses = 0

    async def authorize(_client: object, challenge: str) -> dict[str, str]:
        nonlocal num_uses
        num_uses = 0
        granted.append(f"{challenge} {len(granted)}")
        return {"Authorization": granted[-1]}

    def answer(request: Request) -> Reply:
        nonlocal num_uses
        num_uses += 1
        if not granted or num_uses > 3 or request.headers.get("authorization") != granted[-1]:
            return Reply(401, b"", {"WWW-Authenticate": "Bearer"})
        return deliver(request, DATA, Faults())

    server = Web(answer)
    with server.running():
        remote = Remote(f"{server.url}/m.gguf", {"Authorization": "Bearer old"}, SHA256, len(DATA), authorize)
        assert download(remote, partial).error is None
    assert partial.read_bytes() == DATA
    assert len(granted) > 1
