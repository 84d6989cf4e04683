from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from localllm.cli import output
from localllm.errors import LocalLLMError

CLI = Path(output.__file__).parent
# Names whose use is printing, or getting hold of something that prints.
PRINTERS = {"print", "input", "echo", "secho", "Console", "stdout", "stderr", "pprint"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


OnTerminal = Callable[[], contextlib.AbstractContextManager[io.StringIO]]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    """What is printed inside the block it gives goes to a terminal with colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return lambda: contextlib.redirect_stdout(Terminal())


def uses_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_only_output_prints(path: Path) -> None:
    if path.name == "output.py":
        return
    # The help is in colours or not according to what stdout is.
    allowed = {"stdout"} if path.name == "app.py" else set()
    assert not uses_of(path) & (PRINTERS - allowed)


def test_a_table_has_gaps_of_four_and_padded_rows(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["NAME", "SIZE"], [["smollm2:latest", "98 MB"], ["日本", "1 GB"]])
    assert capsys.readouterr().out == (
        "NAME              SIZE     \nsmollm2:latest    98 MB    \n日本              1 GB     \n"
    )


def test_a_table_without_rows_has_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["NAME", "ID"], [])
    assert capsys.readouterr().out == "NAME    ID    \n"


def test_control_characters_do_not_reach_a_terminal(on_terminal: OnTerminal) -> None:
    with on_terminal() as terminal:
        output.write("a\x1b]0;title\x07b\x9b1mc\r\n\td")
    assert terminal.getvalue() == "a]0;titleb1mc\n\td"


def test_data_in_a_pipe_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    output.write("a\x1b[1mb\r\n")
    assert capsys.readouterr().out == "a\x1b[1mb\r\n"


def test_dim_text_is_grey_on_a_terminal(on_terminal: OnTerminal) -> None:
    with on_terminal():
        assert output.dim("x") == "\x1b[90mx\x1b[0m"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_dim_text_is_plain_for_who_wants_no_colour(
    on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with on_terminal():
        assert output.dim("x") == "x"


def test_dim_text_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.dim("x") == "x"


def test_an_error_is_one_line_and_its_hint_another(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(LocalLLMError("no", hint="Do this."))
    output.print_error(LocalLLMError("never"))
    assert capsys.readouterr() == ("", "Error: no\nHint: Do this.\nError: never\n")


def test_a_pull_shows_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with output.pull_display() as show:
        show({"status": "pulling manifest"})
        show({"status": "pulling abc", "total": 10, "completed": 5})
    assert capsys.readouterr() == ("", "")


def test_a_pull_shows_each_status_once_where_nothing_can_be_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with output.pull_display() as show:
        for completed in (1, 2, 3):
            show({"status": "pulling abc", "total": 3, "completed": completed})
        show({"status": "success"})
    assert stream.getvalue() == "pulling abc\nsuccess\n"


@pytest.fixture
def progress() -> Progress:
    return Progress(console=Console(file=io.StringIO()))


def bars(progress: Progress, *events: tuple[str, int, int]) -> list[tuple[str, float, float | None]]:
    shown = output._Bars(progress)
    for status, completed, total in events:
        shown.show({"status": status, "completed": completed, "total": total})
    return [(task.description, task.completed, task.total) for task in progress.tasks]


def test_each_file_has_a_bar(progress: Progress) -> None:
    events = [("pulling a", 1, 10), ("pulling b", 2, 20), ("pulling a", 10, 10), ("pulling b", 20, 20)]
    assert bars(progress, *events) == [("pulling a", 10, 10), ("pulling b", 20, 20)]


def test_a_file_that_gets_its_name_at_the_end_has_one_bar(progress: Progress) -> None:
    events = [("pulling file.gguf", 9, 10), ("pulling abc", 10, 10), ("pulling def", 5, 5)]
    assert bars(progress, *events) == [("pulling abc", 10, 10), ("pulling def", 5, 5)]
