"""The `localllm keys` commands: their options; what they do is in `keys`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

keys_app = typer.Typer(help="API keys for the daemon of this machine.", no_args_is_help=True)


class ScopeName(str, Enum):
    """Each allows what those before it do."""

    READ = "read"
    INFERENCE = "inference"
    ADMIN = "admin"


Name = Annotated[str, typer.Argument(help="What to call it, for example laptop.")]


@keys_app.command()
def add(
    name: Name,
    scope: Annotated[
        ScopeName, typer.Option(help="read: look; inference: also use models; admin: also pull and remove them.")
    ] = ScopeName.INFERENCE,
    priority: Annotated[str, typer.Option(help="high, normal, low, or -10 (first) to 10 (last).")] = "normal",
    rpm: Annotated[int, typer.Option(min=0, help="Requests a minute; 0 is no limit.")] = 0,
    tokens_per_day: Annotated[
        float, typer.Option(min=0, help="Prompt and answer tokens of a UTC day, 2e6 for example; 0 is no limit.")
    ] = 0,
    models: Annotated[
        list[str] | None, typer.Option(help="Names of the only models that it may use; * stands for anything.")
    ] = None,
) -> None:
    """Make a key, and print its secret: this once, and nowhere else."""
    from localllm.cli.keys import add_key

    add_key(name, scope.value, priority, rpm=rpm, tokens_per_day=int(tokens_per_day), models=models or [])


@keys_app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the keys, without their secrets."""
    from localllm.cli.keys import list_keys

    list_keys(as_json=json)


keys_app.command("ls", hidden=True)(list_)


@keys_app.command()
def rm(names: Annotated[list[str], typer.Argument(help="Names of keys.")]) -> None:
    """Remove keys; whoever has one is refused from the next request on."""
    from localllm.cli.keys import remove_keys

    remove_keys(names)
