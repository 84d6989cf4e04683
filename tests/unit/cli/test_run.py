"""`run` with a prompt, where stdout is no terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.fake_daemon import CUT, FakeDaemon, Reply, error, generated, not_found
from tests.unit.cli.conftest import Run

FACTS = Reply({"details": {}, "model_info": {}, "capabilities": ["completion"]})


@pytest.fixture(autouse=True)
def answer(daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("Hel", "lo"))
    daemon.on("POST", "/api/pull", [{"status": "success"}])


def body(daemon: FakeDaemon) -> Any:
    (found,) = daemon.bodies("/api/generate")
    return found


def test_prints_the_answer_and_two_newlines(run: Run, daemon: FakeDaemon) -> None:
    result = run("run", "m", "Why", "is the", "sky blue?")
    assert (result.status, result.out, result.err) == (0, "Hello\n\n", "")
    assert body(daemon) == {"model": "m", "prompt": "Why is the sky blue?"}


def test_flags_become_fields(run: Run, daemon: FakeDaemon) -> None:
    run("run", "m", "hi", "--keepalive", "-1m", "--format", '{"type": "object"}', "--think=low")
    assert body(daemon) == {
        "model": "m",
        "prompt": "hi",
        "keep_alive": "-1m",
        "format": {"type": "object"},
        "think": "low",
    }


@pytest.mark.parametrize(
    ("arguments", "think", "prompt"),
    [
        (["--think", "low", "key"], True, "low key"),
        (["hi", "--think"], True, "hi"),
        (["hi", "--think=false"], False, "hi"),
        (["--", "hi", "--think"], None, "hi --think"),
    ],
)
def test_the_value_of_think_follows_an_equals_sign(
    run: Run, daemon: FakeDaemon, arguments: list[str], think: Any, prompt: str
) -> None:
    run("run", "m", *arguments)
    assert (body(daemon).get("think"), body(daemon)["prompt"]) == (think, prompt)


def test_without_a_prompt_the_model_is_loaded(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", Reply({"done": True, "done_reason": "load"}))
    for arguments in (["run", "m"], ["run", "m", ""]):
        assert run(*arguments).out == ""
    assert daemon.bodies("/api/generate") == [{"model": "m", "prompt": "", "stream": False}] * 2


def test_bytes_that_are_no_text_do_not_break_the_request(run: Run, daemon: FakeDaemon) -> None:
    assert run("run", "m", "caf\udce9").status == 0
    assert body(daemon)["prompt"] == "caf\ufffd"


# ---- pulling first ----


def test_a_model_that_is_not_here_is_pulled(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"), FACTS)
    assert run("run", "m", "hi", "--insecure").out == "Hello\n\n"
    assert daemon.bodies("/api/pull") == [{"model": "m", "insecure": True}]


def test_a_model_that_is_here_is_not_pulled(run: Run, daemon: FakeDaemon) -> None:
    run("run", "m", "hi")
    assert daemon.bodies("/api/pull") == []


def test_other_errors_pull_nothing(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", error("the file is damaged", code="invalid_model_file", status=422))
    result = run("run", "m", "hi")
    assert (result.status, result.err) == (1, "Error: the file is damaged\n")
    assert daemon.bodies("/api/pull") == []


def test_a_failed_pull_ends_it(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"))
    daemon.on("POST", "/api/pull", [{"error": "nobody has it"}])
    result = run("run", "m", "hi")
    assert (result.status, result.out, result.err) == (1, "", "Error: nobody has it\n")


def test_a_file_runs_under_the_name_that_it_is_kept_under(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "My Model.Q4_0.gguf"
    path.touch()
    run("run", str(path), "hi")
    assert daemon.bodies("/api/pull") == [{"model": str(path), "insecure": False}]
    assert body(daemon)["model"] == "my-model.q4_0:latest"


def test_an_address_is_pulled_once(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/show", not_found("m"), FACTS)
    for _ in range(2):
        run("run", "https://example.org/files/M.gguf?download=true", "hi")
    assert daemon.bodies("/api/pull") == [
        {"model": "https://example.org/files/M.gguf?download=true", "insecure": False}
    ]
    assert {found["model"] for found in daemon.bodies("/api/generate")} == {"m:latest"}


# ---- thinking ----


THOUGHTS = [{"thinking": "Let me ", "response": ""}, {"thinking": "see.", "response": ""}, *generated("Blue.")]


def test_thinking_stands_between_its_marks(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", THOUGHTS)
    assert run("run", "m", "hi").out == "Thinking...\nLet me see.\n...done thinking.\n\nBlue.\n\n"


def test_thinking_can_be_hidden(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", THOUGHTS)
    assert run("run", "m", "hi", "--hidethinking").out == "Blue.\n\n"


# ---- the end ----


def test_verbose_prints_timings_to_stderr(run: Run, daemon: FakeDaemon) -> None:
    final = {
        "total_duration": 4_935_886_791,
        "load_duration": 534_986_708,
        "prompt_eval_count": 26,
        "prompt_eval_duration": 107_345_000,
        "eval_count": 237,
        "eval_duration": 4_289_432_000,
    }
    daemon.on("POST", "/api/generate", generated("Hi", **final))
    assert run("run", "m", "hi", "--verbose").err == (
        "total duration:       4.935886791s\n"
        "load duration:        534.986708ms\n"
        "prompt eval count:    26 token(s)\n"
        "prompt eval duration: 107.345ms\n"
        "prompt eval rate:     242.21 tokens/s\n"
        "eval count:           237 token(s)\n"
        "eval duration:        4.289432s\n"
        "eval rate:            55.25 tokens/s\n"
    )


def test_an_error_in_the_middle_follows_what_was_said(run: Run, daemon: FakeDaemon) -> None:
    broken = {"error": "the runner died", "code": "runner_crashed", "hint": "Try again."}
    daemon.on("POST", "/api/generate", [*generated("Hel")[:-1], broken])
    result = run("run", "m", "hi")
    assert (result.status, result.out, result.err) == (1, "Hel", "Error: the runner died\nHint: Try again.\n")


def test_a_daemon_that_dies_in_the_middle_is_an_error(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", [*generated("Hel")[:-1], CUT])
    result = run("run", "m", "hi")
    assert (result.status, result.out) == (1, "Hel")
    assert result.err.startswith("Error: the daemon went away")


def test_a_stream_without_an_end_is_an_error(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", generated("Hel")[:-1])
    result = run("run", "m", "hi")
    assert (result.status, result.out) == (1, "Hel")
    assert result.err.startswith("Error: the answer broke off before its end\n")


def test_what_the_daemon_refuses_is_its_error(run: Run, daemon: FakeDaemon) -> None:
    daemon.on("POST", "/api/generate", error('"m" does not support thinking', code="invalid_request", status=400))
    result = run("run", "m", "hi", "--think")
    assert (result.status, result.err) == (1, 'Error: "m" does not support thinking\n')
