"""The `localllm` command: every command and its options; what they do is in the modules beside this one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import output
from localllm.cli.keys_app import keys_app
from localllm.cli.status import Status
from localllm.config import config_file, load_config, settings
from localllm.errors import AddressInUse, InvalidUsage, LocalLLMError

if TYPE_CHECKING:
    from localllm.cli.client import Client


def _examples(*lines: str) -> str:
    # The mark keeps the lines as they are.
    return "\n  ".join(["\b\nExamples:", *lines])


app = typer.Typer(
    name="localllm",
    help="Run GGUF models on your own machine.",
    epilog=_examples('localllm run smollm2 "Why is the sky blue?"', "localllm pull qwen3", "localllm list"),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if output.can_redraw(sys.stdout) else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="Name of a model, for example llama3.2:1b.")]
Prefix = Annotated[str, typer.Argument(help="Only names that begin with this.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Let a pull from a registry use plain HTTP.")]


def _client(*, start: bool = True) -> Client:
    from localllm.cli.launcher import connect

    return connect(load_config(), start=start)


def _print_version(wanted: bool) -> None:
    if wanted:
        from localllm.cli.models import print_version

        print_version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _global(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        output.line(context.get_help())


@app.command(
    epilog=_examples(
        "localllm run smollm2",
        'localllm run smollm2 "Tell me a joke"',
        "cat notes.txt | localllm run qwen3 Summarise:",
        "localllm run ./model.gguf Hello",
    )
)
def run(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Argument(help="What to say; without it, a conversation begins.")] = None,
    keepalive: Annotated[
        str, typer.Option(metavar="TIME", help="How long the model stays loaded, for example 5m.", show_default=False)
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print timings to stderr.")] = False,
    insecure: Insecure = False,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Do not wrap lines on a terminal.")] = False,
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format of the answer: json or a JSON schema.", show_default=False)
    ] = "",
    think: Annotated[
        str,
        typer.Option(
            metavar="[=LEVEL]", help="Think first: true, false, low, medium, high or max.", show_default=False
        ),
    ] = "",
    hidethinking: Annotated[bool, typer.Option("--hidethinking", help="Do not print the thinking.")] = False,
) -> None:
    """Talk to a model; it is pulled first if it is not here."""
    from localllm.cli.run import RunOptions, run_model

    options = RunOptions(keepalive, verbose, insecure, not nowordwrap, format, think, hidethinking)
    run_model(load_config(), model, prompt or [], options)


@app.command(
    epilog=_examples("localllm pull llama3.2:1b", "localllm pull hf.co/user/repo:Q4_0", "localllm pull ./model.gguf")
)
def pull(model: Model, insecure: Insecure = False) -> None:
    """Fetch a model by name, from Hugging Face, a URL or a file."""
    from localllm.cli.models import pull_model

    with _client() as client:
        pull_model(client, model, insecure=insecure)


@app.command("list", epilog=_examples("localllm list", "localllm ls llama --json"))
def list_(prefix: Prefix = "", json: Json = False) -> None:
    """List the models that are here, newest first."""
    from localllm.cli.models import list_models

    with _client() as client:
        list_models(client, prefix, as_json=json)


app.command("ls", hidden=True)(list_)


@app.command(epilog=_examples("localllm show smollm2", "localllm show smollm2 --modelfile"))
def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Only the licence.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Only the Modelfile.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Only the parameters.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Only the system message.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Only the template.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Metadata and tensors, too.")] = False,
    json: Json = False,
) -> None:
    """Show what a model is."""
    from localllm.cli.show import choose_part, show_model

    flags = {"license": license, "modelfile": modelfile, "parameters": parameters}
    part = choose_part({**flags, "system": system, "template": template})
    with _client() as client:
        show_model(client, model, part, verbose=verbose, as_json=json)


@app.command(epilog=_examples("localllm ps", "localllm ps --json"))
def ps(prefix: Prefix = "", json: Json = False) -> None:
    """List the models that are loaded."""
    from localllm.cli.models import list_running

    with _client() as client:
        list_running(client, prefix, as_json=json)


@app.command(epilog=_examples("localllm stop smollm2"))
def stop(model: Model) -> None:
    """Unload a model."""
    from localllm.cli.models import stop_model

    with _client(start=False) as client:
        stop_model(client, model)


@app.command(epilog=_examples("localllm cp smollm2 my-assistant"))
def cp(
    source: Annotated[str, typer.Argument(help="The model to copy.")],
    destination: Annotated[str, typer.Argument(help="Its second name.")],
) -> None:
    """Give a model a second name; it takes no space."""
    from localllm.cli.models import copy_model

    with _client() as client:
        copy_model(client, source, destination)


@app.command(epilog=_examples("localllm rm smollm2", "localllm rm llama3 qwen3"))
def rm(models: Annotated[list[str], typer.Argument(help="Names of models.")]) -> None:
    """Remove models."""
    from localllm.cli.models import remove_models

    with _client() as client:
        remove_models(client, models)


app.add_typer(keys_app, name="keys")


@app.command(epilog=_examples("localllm usage", "localllm usage --days 30 --json"))
def usage(
    days: Annotated[int, typer.Option("--days", min=1, help="Of the last so many days, today included.")] = 7,
    json: Json = False,
) -> None:
    """Show what each API key has used."""
    from localllm.cli.keys import show_usage

    show_usage(days, as_json=json)


def _settings_help() -> str:
    lines = ["\b\nSettings, from the environment, or by their names (host, models, ...) from", f"{config_file()}:"]
    for setting in settings():
        lines.append(f"  {setting.env}{f' or {setting.alias}' if setting.alias else ''}")
        lines += textwrap.wrap(setting.help, 76, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


@app.command(epilog=_settings_help())
def serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen, for example 127.0.0.1:11500.", show_default=False)
    ] = "",
    models: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of the model store.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log more.")] = False,
) -> None:
    """Run the daemon here; other commands start it by themselves."""
    from localllm.cli.serve import serve as serve_here

    flags = {"host": host, "models": str(models or ""), "debug": "1" if debug else ""}
    raise typer.Exit(serve_here({key: value for key, value in flags.items() if value}))


app.command("start", hidden=True, epilog=_settings_help())(serve)


def main() -> None:
    """The console script."""
    output.prepare()
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: Sequence[str]) -> int:
    """The exit status. All expected errors become a line and a hint here."""
    try:
        status = app(_with_think_values(arguments), prog_name="localllm", standalone_mode=False) or Status.OK
    except typer.TyperException as error:
        output.print_error(_usage_error(error))
        return Status.USAGE
    except InvalidUsage as error:
        output.print_error(error)
        return Status.USAGE
    except LocalLLMError as error:
        output.print_error(error)
        return Status.ADDRESS_IN_USE if isinstance(error, AddressInUse) else Status.ERROR
    if status == Status.INTERRUPTED:
        output.end_interrupted_line()
    return int(status)


def _with_think_values(arguments: Sequence[str]) -> list[str]:
    """The value of --think is optional and only ever follows an equals sign, which the option parser cannot express."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--think=true" if argument == "--think" else argument for argument in arguments[:end]] + list(
        arguments[end:]
    )


def _usage_error(error: typer.TyperException) -> InvalidUsage:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "localllm"
    return InvalidUsage(error.format_message(), hint=f"See `{command} --help`.")
