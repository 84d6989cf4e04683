"""Keys by themselves: what they allow, how they are kept, what is counted."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from localllm.errors import Forbidden, InvalidKey, InvalidRequest, QuotaExceeded, RateLimited, StoreError
from localllm.keys import accounts as accounts_module
from localllm.keys.accounts import Accounts
from localllm.keys.key import SCOPES, Key, Scope, check_name, digest_of, find, new_secret, parse_priority
from localllm.keys.limits import RequestRates
from localllm.keys.store import KeyStore, UsageRow


class Clock:
    """Both of a machine's clocks: one can be set, the other only goes on."""

    def __init__(self) -> None:
        self.now = datetime(2026, 12, 4, 12, 0, tzinfo=timezone.utc)
        self.monotonic = 1000.0

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.monotonic += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "data" / "keys.sqlite")


def accounts_of(store: KeyStore, clock: Clock, *, is_key_needed: bool = False) -> Accounts:
    return Accounts(store.path, is_key_needed=is_key_needed, now=lambda: clock.now, monotonic=lambda: clock.monotonic)


def add(store: KeyStore, name: str, **limits: object) -> str:
    secret = new_secret()
    store.add(Key(name, digest_of(secret), **limits))  # type: ignore[arg-type]
    return secret


class TestKey:
    @pytest.mark.parametrize("own", SCOPES)
    def test_a_scope_allows_itself_and_what_comes_before(self, own: Scope) -> None:
        key = Key("a", b"", own)
        assert [scope for scope in SCOPES if key.allows(scope)] == list(SCOPES[: SCOPES.index(own) + 1])

    @pytest.mark.parametrize(
        ("models", "name", "is_allowed"),
        [
            ((), "anything", True),
            (("qwen3",), "qwen3", True),
            (("Qwen3",), "qwen3", True),
            (("qwen3",), "qwen3:8b", False),
            (("qwen3:*", "llama*"), "qwen3:8b", True),
            (("qwen3:*", "llama*"), "llama3.2", True),
            (("qwen3:*", "llama*"), "smollm2", False),
        ],
    )
    def test_models(self, models: tuple[str, ...], name: str, is_allowed: bool) -> None:
        assert Key("a", b"", models=models).allows_model(name) is is_allowed

    def test_a_secret_finds_its_key_and_no_other(self) -> None:
        secrets = [new_secret() for _ in range(3)]
        keys = [Key(f"k{index}", digest_of(secret)) for index, secret in enumerate(secrets)]
        assert [find(keys, secret) for secret in secrets] == keys
        assert find(keys, secrets[0][:-1]) is None
        assert find(keys, "") is None

    @pytest.mark.parametrize("text", ["", "hurry", "11", "1.5"])
    def test_what_is_no_priority(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="priority"):
            parse_priority(text)
        assert [parse_priority(text) for text in ("high", "Low", "-3")] == [-5, 5, -3]

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "a\n"])
    def test_what_is_no_name(self, name: str) -> None:
        with pytest.raises(InvalidRequest, match="name of a key"):
            check_name(name)
        assert check_name("me@laptop.2") == "me@laptop.2"


class TestStore:
    def test_nothing_is_made_by_looking(self, store: KeyStore) -> None:
        assert store.keys() == []
        assert store.usage("2026-01-01") == []
        assert not store.remove("a")
        assert not store.path.parent.exists()

    def test_keys_are_kept_without_their_secrets_and_for_the_owner_alone(self, store: KeyStore) -> None:
        secret = add(store, "laptop", scope="admin", priority=-2, rpm=3, tokens_per_day=5, models=("a", "b:*"))
        assert store.keys() == [Key("laptop", digest_of(secret), "admin", -2, 3, 5, ("a", "b:*"))]
        assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
        for path in store.path.parent.iterdir():
            assert secret.encode() not in path.read_bytes()

    def test_a_name_is_given_once(self, store: KeyStore) -> None:
        add(store, "laptop")
        with pytest.raises(InvalidRequest, match="already"):
            add(store, "laptop")
        assert store.remove("laptop")
        assert not store.remove("laptop")
        add(store, "laptop")

    def test_usage_adds_up(self, store: KeyStore) -> None:
        store.add_usage([UsageRow("2026-12-04", "a", "m", 1, 10, 5, 2)])
        store.add_usage([UsageRow("2026-12-04", "a", "m", 2, 1, 1, 1), UsageRow("2026-12-05", "a", "m", 1)])
        assert store.usage("2026-12-04")[0] == UsageRow("2026-12-04", "a", "m", 3, 11, 6, 3)
        assert [row.day for row in store.usage("2026-12-05")] == ["2026-12-05"]

    def test_a_file_that_is_no_database_is_an_error_that_names_it(self, store: KeyStore) -> None:
        store.path.parent.mkdir()
        store.path.write_text("not a database, and long enough to be looked at" * 10)
        with pytest.raises(StoreError, match=r"keys\.sqlite"):
            store.keys()


class TestRates:
    def test_a_minute_slides(self) -> None:
        rates, key = RequestRates(), Key("a", b"", rpm=2)
        rates.admit(key, 0.0)
        rates.admit(key, 30.0)
        with pytest.raises(RateLimited) as caught:
            rates.admit(key, 45.5)
        assert caught.value.details["retry_after"] == 15
        rates.admit(key, 60.0)
        with pytest.raises(RateLimited):
            rates.admit(key, 89.0)
        rates.admit(key, 90.0)

    def test_keys_do_not_share(self) -> None:
        rates = RequestRates()
        rates.admit(Key("a", b"", rpm=1), 0.0)
        rates.admit(Key("b", b"", rpm=1), 0.0)
        for _ in range(100):
            rates.admit(Key("c", b""), 0.0)


class TestAccounts:
    def test_without_keys_everybody_may_in_unless_one_is_needed(self, store: KeyStore, clock: Clock) -> None:
        assert accounts_of(store, clock).authenticate("") is None
        assert accounts_of(store, clock).authenticate("whatever") is None
        with pytest.raises(InvalidKey, match="needed"):
            accounts_of(store, clock, is_key_needed=True).authenticate("")

    def test_keys_count_and_stop_counting_at_once(self, store: KeyStore, clock: Clock) -> None:
        accounts = accounts_of(store, clock)
        assert accounts.authenticate("") is None
        secret = add(store, "a")
        found = accounts.authenticate(secret)
        assert found is not None and found.name == "a"
        with pytest.raises(InvalidKey, match="not valid"):
            accounts.authenticate("llm-other")
        second = add(store, "b")
        assert accounts.authenticate(second) is not None
        store.remove("a")
        with pytest.raises(InvalidKey):
            accounts.authenticate(secret)

    def test_a_broken_file_lets_nobody_in(self, store: KeyStore, clock: Clock) -> None:
        secret = add(store, "a")
        accounts = accounts_of(store, clock)
        accounts.authenticate(secret)
        store.path.write_bytes(b"x" * 4096)
        with pytest.raises(StoreError):
            accounts.authenticate(secret)

    def test_scopes_are_kept_to(self, store: KeyStore, clock: Clock) -> None:
        accounts = accounts_of(store, clock)
        accounts.admit(Key("a", b""), "read")
        with pytest.raises(Forbidden, match=r'"inference".*"admin"'):
            accounts.admit(Key("a", b""), "admin")

    async def test_a_days_tokens_are_counted_across_restarts_and_until_midnight(
        self, store: KeyStore, clock: Clock
    ) -> None:
        key, accounts = Key("a", b"", tokens_per_day=100), accounts_of(store, clock)
        accounts.note(key, "m", prompt_tokens=60, cached_tokens=10, output_tokens=30)
        accounts.admit(key, "inference")
        await accounts.flush()
        later = accounts_of(store, clock)
        later.note(key, "m", prompt_tokens=10, cached_tokens=0, output_tokens=0)
        for counted in (later,):
            with pytest.raises(QuotaExceeded, match="100 of its 100") as caught:
                counted.admit(key, "inference")
            assert caught.value.details["retry_after"] == 12 * 3600
            counted.admit(key, "read")
        clock.wait(12 * 3600)
        later.admit(key, "inference")
        await later.flush()
        assert [(row.requests, row.tokens) for row in store.usage("2026-12-04")] == [(2, 100)]

    async def test_a_clock_that_is_set_frees_nobody_and_locks_nobody_out(self, store: KeyStore, clock: Clock) -> None:
        key, accounts = Key("a", b"", tokens_per_day=50, rpm=1), accounts_of(store, clock)
        accounts.admit(key, "inference")
        clock.now += timedelta(hours=1)
        with pytest.raises(RateLimited):
            accounts.admit(key, "inference")
        accounts.note(key, "m", prompt_tokens=60, cached_tokens=0, output_tokens=0)
        clock.now -= timedelta(days=3)
        clock.monotonic += 60
        accounts.admit(key, "inference")
        clock.now += timedelta(days=3)
        clock.monotonic += 60
        with pytest.raises(QuotaExceeded):
            accounts.admit(key, "inference")
        await accounts.flush()

    async def test_usage_is_written_by_itself(
        self, store: KeyStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accounts_module, "FLUSH_SECONDS", 0.01)
        accounts = accounts_of(store, clock)
        for _ in range(3):
            accounts.note(Key("a", b""), "m", prompt_tokens=1, cached_tokens=0, output_tokens=1)
        for _ in range(500):
            if store.usage("2026-12-04"):
                break
            await asyncio.sleep(0.01)
        assert store.usage("2026-12-04")[0].requests == 3

    async def test_what_cannot_be_written_is_kept(self, store: KeyStore, clock: Clock) -> None:
        add(store, "a")
        accounts = accounts_of(store, clock)
        accounts.note(Key("a", b""), "m", prompt_tokens=1, cached_tokens=0, output_tokens=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("localllm.keys.store._BUSY_SECONDS", 0.01)
            blocker = sqlite3.connect(store.path)
            blocker.execute("BEGIN IMMEDIATE")
            await accounts.flush()
            blocker.rollback()
            blocker.close()
        assert store.usage("2026-12-04") == []
        await accounts.flush()
        assert store.usage("2026-12-04")[0].tokens == 2
