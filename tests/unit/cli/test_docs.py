from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from localllm.cli.app import app
from localllm.cli.status import Status

TEXT = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_documented(name: str) -> None:
    assert re.search(rf"`{name}[ `]", TEXT)
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert f"`{parameter.opts[0]}" in TEXT


@pytest.mark.parametrize("status", Status)
def test_every_exit_status_is_documented(status: Status) -> None:
    assert re.search(rf"^\| {int(status)} \|", TEXT, re.MULTILINE)
