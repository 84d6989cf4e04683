"""The commands about models: what they ask the daemon, what they print, how they end."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.fake_daemon import FakeDaemon, Reply, error, not_found
from tests.unit.cli.conftest import Run

from localllm import __version__
from localllm.cli.models import processor
from localllm.cli.status import Status

DIGEST = "0123456789abcdef" * 4


def ago(**span: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(**span)).isoformat()


def listed(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "digest": DIGEST, "size": 98_362_432, "modified_at": ago(days=3), **fields}


def loaded(name: str, **fields: Any) -> dict[str, Any]:
    expires_at = ago(minutes=-4, seconds=-30)
    model = {"name": name, "digest": DIGEST, "size": 200_000_000, "size_vram": 0, "context_length": 4096}
    return {**model, "expires_at": expires_at, **fields}


# ---- list ----


def test_list_prints_a_table_in_the_daemons_order(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/tags", Reply({"models": [listed("zeta:latest"), listed("alpha:1b", size=2_019_393_189)]}))
    result = run("list")
    assert (result.status, result.err) == (0, "")
    assert result.out == (
        "NAME           ID              SIZE      MODIFIED      \n"
        "zeta:latest    0123456789ab    98 MB     3 days ago    \n"
        "alpha:1b       0123456789ab    2.0 GB    3 days ago    \n"
    )


def test_list_without_models_prints_the_header(run: Run) -> None:
    assert run("list").out == "NAME    ID    SIZE    MODIFIED    \n"


def test_ls_is_list_and_takes_a_prefix_of_any_case(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/tags", Reply({"models": [listed("Qwen3:latest"), listed("llama3:latest")]}))
    assert [line.split()[0] for line in run("ls", "qwen").out.splitlines()] == ["NAME", "Qwen3:latest"]


def test_list_as_json_is_what_the_daemon_said(run: Run, daemon: FakeDaemon) -> None:
    models = [listed("modèle:latest"), listed("other:latest")]
    daemon.on("GET", "/api/tags", Reply({"models": models}))
    assert json.loads(run("list", "mod", "--json").out) == models[:1]


# ---- ps ----


def test_ps_prints_a_table(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/ps", Reply({"models": [loaded("smollm2:latest")]}))
    assert run("ps").out == (
        "NAME              ID              SIZE      PROCESSOR    CONTEXT    UNTIL                 \n"
        "smollm2:latest    0123456789ab    200 MB    100% CPU     4096       4 minutes from now    \n"
    )


@pytest.mark.parametrize(
    ("fields", "until"),
    [
        ({"expires_at": "2318-01-01T00:00:00Z"}, "Forever"),
        ({"expires_at": ago(seconds=1)}, "Stopping..."),
        ({"runner": {"state": "stopping"}}, "Stopping..."),
        ({"runner": {"state": "loading", "load_fraction": 0.25}}, "Loading... 25%"),
        ({"runner": {"state": "ready"}}, "4 minutes from now"),
    ],
)
def test_ps_says_until_when(run: Run, daemon: FakeDaemon, fields: dict[str, Any], until: str) -> None:
    daemon.on("GET", "/api/ps", Reply({"models": [loaded("m:latest", **fields)]}))
    assert run("ps").out.splitlines()[1].strip().endswith(f"4096       {until}")


def test_ps_takes_a_prefix_and_json(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/ps", Reply({"models": [loaded("a:latest"), loaded("b:latest")]}))
    assert [model["name"] for model in json.loads(run("ps", "b", "--json").out)] == ["b:latest"]


@pytest.mark.parametrize(
    ("size", "vram", "text"),
    [
        (100, 0, "100% CPU"),
        (100, 100, "100% GPU"),
        (100, 75, "25%/75% CPU/GPU"),
        (100, 101, "Unknown"),
        (0, 1, "Unknown"),
    ],
)
def test_where_a_model_runs(size: int, vram: int, text: str) -> None:
    assert processor(size, vram) == text


# ---- stop, cp, rm, pull ----


def test_stop_unloads(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", Reply({"done": True, "done_reason": "unload"}))
    result = run("stop", "m")
    assert (result.status, result.out, result.err) == (0, "", "")
    assert daemon.bodies("/api/generate") == [{"model": "m", "keep_alive": 0, "stream": False}]


def test_stop_of_an_unknown_model_says_so(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"))
    result = run("stop", "m")
    assert (result.status, result.err) == (Status.ERROR, 'Error: couldn\'t find model "m" to stop\n')


def test_stop_starts_no_daemon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOST", "127.0.0.1:1")
    monkeypatch.setattr("localllm.cli.launcher._spawn", lambda *_: pytest.fail("a daemon was started"))
    result = run("stop", "m")
    assert result.status == Status.ERROR
    assert result.err.startswith(
        "Error: could not connect to a daemon at http://127.0.0.1:1: Connection refused\nHint:"
    )


def test_cp_copies(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/copy", Reply())
    assert run("cp", "a", "b").out == "copied 'a' to 'b'\n"
    assert daemon.bodies("/api/copy") == [{"source": "a", "destination": "b"}]


def test_rm_stops_at_the_first_that_cannot_be_removed(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("DELETE", "/api/delete", Reply(), not_found("b"))
    result = run("rm", "a", "b", "c")
    assert (result.status, result.out, result.err) == (1, "deleted 'a'\n", "Error: model 'b' not found\n")
    assert [body["model"] for body in daemon.bodies("/api/delete")] == ["a", "b"]


def test_pull_is_silent_when_nobody_watches(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/pull", [{"status": "pulling manifest"}, {"status": "success"}])
    result = run("pull", "smollm2", "--insecure")
    assert (result.status, result.out, result.err) == (0, "", "")
    assert daemon.bodies("/api/pull") == [{"model": "smollm2", "insecure": True}]


@pytest.mark.parametrize("reference", ["./m.gguf", "m.gguf", "../here/m.gguf"])
def test_a_file_is_pulled_by_its_whole_path(
    run: Run, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "m.gguf").touch()
    monkeypatch.chdir(folder)
    daemon.on("POST", "/api/pull", [{"status": "success"}])
    run("pull", reference)
    (body,) = daemon.bodies("/api/pull")
    assert Path(body["model"]).is_absolute()
    assert Path(body["model"]).samefile(folder / "m.gguf")


def test_a_pull_that_fails_is_one_error(run: Run, daemon: FakeDaemon) -> None:
    lines = [{"status": "pulling manifest"}, {"error": "no such model", "code": "not_found_at_source", "hint": "Look."}]
    daemon.on("POST", "/api/pull", lines)
    result = run("pull", "nobody")
    assert (result.status, result.out, result.err) == (1, "", "Error: no such model\nHint: Look.\n")


# ---- version, help and mistakes ----


def test_version_is_the_daemons(run: Run, daemon: FakeDaemon) -> None:
    assert run("--version").out == f"localllm version is {__version__}\n"
    daemon.on("GET", "/health", Reply({"server": "localllm", "version": "9.9"}))
    result = run("-v")
    assert (result.status, result.out) == (0, "localllm version is 9.9\n")
    assert f"Warning: client version is {__version__}" in result.err


@pytest.mark.parametrize("host", ["127.0.0.1:1", "127.0.0.1:nonsense"])
def test_version_needs_no_daemon(run: Run, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("LOCALLLM_HOST", host)
    result = run("--version")
    assert (result.status, result.out) == (0, f"localllm version is {__version__}\n")
    assert result.err.startswith("Warning: ")


def test_version_of_an_ollama_server_is_not_ours(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/health", Reply(b"", 404))
    result = run("--version")
    assert result.out == f"localllm version is {__version__}\n"
    assert "Warning: a different server (Ollama)" in result.err


def test_no_arguments_are_a_question_for_help(run: Run) -> None:
    result = run()
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("Usage: localllm [OPTIONS] COMMAND")


def test_help_of_serve_lists_the_settings(run: Run) -> None:
    assert "LOCALLLM_KEEP_ALIVE or OLLAMA_KEEP_ALIVE" in run("serve", "--help").out


def test_each_command_has_a_line_of_help_that_fits(run: Run) -> None:
    commands = run("--help").out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == [
        "run",
        "pull",
        "list",
        "show",
        "ps",
        "stop",
        "cp",
        "rm",
        "usage",
        "serve",
        "keys",
    ]
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "No such command 'lst'. Did you mean 'list', 'ls'?"),
        (["show"], "Missing argument"),
        (["list", "--jsn"], "No such option: --jsn"),
        (["cp", "only-one"], "Missing argument"),
        (["run", "m", "--think=hard"], 'invalid value for --think: "hard"'),
        (["run", "m", "--format", "yaml"], 'invalid value for --format: "yaml"'),
        (["run", "m", "--keepalive", "soon"], "invalid value for --keepalive:"),
        (
            ["show", "m", "--license", "--system"],
            "only one of '--license', '--modelfile', '--parameters', '--system', or",
        ),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    run: Run, daemon: FakeDaemon, arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert (result.status, result.out) == (Status.USAGE, "")
    assert result.err.startswith(f"Error: {message}")
    assert not daemon.asked


def test_a_wrong_setting_is_an_error_that_names_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_MAX_QUEUE", "many")
    result = run("list")
    assert result.status == Status.ERROR
    assert result.err.startswith('Error: LOCALLLM_MAX_QUEUE: "many" is not a valid max_queue')


def test_a_foreign_server_is_an_error_with_its_own_status(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/health", Reply(b"", 404))
    result = run("list")
    assert result.status == Status.ADDRESS_IN_USE
    assert result.err.startswith(f"Error: a different server (Ollama) answers at {daemon.url}\nHint: ")


def test_an_error_of_the_daemon_is_passed_on(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("GET", "/api/tags", error("the store is broken", code="store_error", hint="Mend it."))
    result = run("list")
    assert (result.status, result.err) == (1, "Error: the store is broken\nHint: Mend it.\n")
