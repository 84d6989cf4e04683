from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.fixtures.fake_daemon import FakeDaemon

from localllm.cli import app
from localllm.cli.client import Client
from localllm.config import keys_file, parse_address
from localllm.errors import ConfigError
from localllm.keys.key import digest_of
from localllm.keys.store import KeyStore, UsageRow


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run(*arguments: str) -> int:
    return app.execute(arguments)


def test_a_key_is_made_shown_once_and_listed_without_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--scope", "admin", "--priority", "low", "--rpm", "30", "--tokens-per-day", "2e6"]
    assert run("keys", "add", "laptop", *limits, "--models", "qwen3:*,llama3", "--models", "tiny") == 0
    secret = capsys.readouterr().out.strip()
    (key,) = KeyStore(keys_file()).keys()
    assert key.digest == digest_of(secret)
    assert (key.scope, key.priority, key.rpm, key.tokens_per_day) == ("admin", 5, 30, 2_000_000)
    assert key.models == ("qwen3:*", "llama3", "tiny")
    assert run("keys", "list") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split() == ["laptop", "admin", "5", "30", "2000000", "qwen3:*,", "llama3,", "tiny"]
    assert secret not in shown
    assert run("keys", "list", "--json") == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["name"] == "laptop" and "digest" not in plain


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["add", "a b"], "name of a key", 1),
        (["add", "a", "--priority", "soon"], "not a priority", 1),
        (["add", "a", "--scope", "root"], "root", 2),
        (["add", "a", "--rpm", "-1"], "--rpm", 2),
        (["rm", "nobody"], 'no key "nobody"', 1),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", *arguments) == status
    assert words in capsys.readouterr().err
    assert KeyStore(keys_file()).keys() == []


def test_removing(capsys: pytest.CaptureFixture[str]) -> None:
    run("keys", "add", "a")
    run("keys", "add", "b")
    capsys.readouterr()
    assert run("keys", "rm", "a", "b") == 0
    assert capsys.readouterr().out == "removed 'a'\nremoved 'b'\n"
    assert KeyStore(keys_file()).keys() == []


def test_usage_is_a_table_of_the_last_days(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage") == 0
    assert capsys.readouterr().out.split() == ["DAY", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT"]
    KeyStore(keys_file()).add_usage([UsageRow("2000-01-01", "a", "m", 9), UsageRow("2999-01-01", "a", "m", 1, 2, 3, 4)])
    assert run("usage", "--days", "30") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["2999-01-01", "a", "m", "1", "2", "3", "4"]
    ]
    assert run("usage", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["output_tokens"] == 4


def test_the_command_line_sends_the_key_of_its_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    send = httpx.Client.send

    def watch(self: httpx.Client, request: httpx.Request, **options: object) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return send(self, request, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(httpx.Client, "send", watch)
    monkeypatch.setenv("LOCALLLM_HOST", daemon.url)
    assert run("list") == 0
    monkeypatch.setenv("LOCALLLM_API_KEY", "llm-abc")
    assert run("list") == 0
    assert set(seen[: len(seen) // 2]) == {None}
    assert set(seen[len(seen) // 2 :]) == {"Bearer llm-abc"}


def test_a_key_that_no_header_can_hold_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match="API key"):
        Client(parse_address("127.0.0.1"), api_key="ключ")
