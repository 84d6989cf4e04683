"""The `localllm` command: every command and its options; what they do is in the modules beside this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.cli import output
from localllm.config import load_config, settings
from localllm.errors import LocalLLMError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(lines)


app = typer.Typer(
    name="localllm",
    help="Run GGUF models on your own machine.",
    epilog=_examples('localllm run smollm2 "Why is the sky blue?"', "localllm pull qwen3", "localllm list"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="Name of a model, for example llama3.2:1b.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Prefix = Annotated[str, typer.Argument(help="Only names that begin with this.", show_default=False)]


def _client(*, start: bool = True) -> Any:
    from localllm.cli.launcher import connect

    return connect(load_config(), start=start)


def _print_version(wanted: bool) -> None:
    if wanted:
        from localllm.cli import models

        models.print_version(load_config())
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", "-v", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_examples('localllm run smollm2 "Tell me a joke"', "cat notes.txt | localllm run qwen3 Summarise:"))
def run(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Argument(help="What to say; without it, a conversation begins.")] = None,
    keepalive: Annotated[str, typer.Option(help="How long the model stays loaded afterwards, for example 5m.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print timings to stderr.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let a pull use plain http.")] = False,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Do not wrap words on a terminal.")] = False,
    format: Annotated[str, typer.Option(help="Format of the answer: json or a JSON schema.")] = "",
    think: Annotated[str, typer.Option(help="--think, or --think=false|low|medium|high|max.")] = "",
    hidethinking: Annotated[bool, typer.Option("--hidethinking", help="Do not show thinking.")] = False,
) -> None:
    """Talk to a model; it is pulled first if it is not here."""
    from localllm.cli.run import RunOptions, run_model

    options = RunOptions(model, keepalive, verbose, insecure, not nowordwrap, format, think, hidethinking)
    run_model(_client(), options, prompt or [])


@app.command(
    epilog=_examples("localllm pull llama3.2:1b", "localllm pull hf.co/user/repo:Q4_0", "localllm pull ./m.gguf")
)
def pull(
    model: Model,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use plain http.")] = False,
) -> None:
    """Fetch a model: by name, from Hugging Face, from an address, or from a local file."""
    from localllm.cli.models import pull_model

    pull_model(_client(), model, insecure=insecure)


@app.command("list", epilog=_examples("localllm list", "localllm list llama --json"))
def list_(prefix: Prefix = "", json: Json = False) -> None:
    """List the models that are here."""
    from localllm.cli.models import list_models

    list_models(_client(), prefix, as_json=json)


app.command("ls", hidden=True)(list_)


@app.command(epilog=_examples("localllm show smollm2", "localllm show smollm2 --modelfile"))
def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Only the licence.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Only the Modelfile.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Only the parameters.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Only the system message.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Only the template.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="All metadata and tensors.")] = False,
    json: Json = False,
) -> None:
    """Show what a model is."""
    from localllm.cli.models import show_model

    flags = {
        "license": license,
        "modelfile": modelfile,
        "parameters": parameters,
        "system": system,
        "template": template,
    }
    show_model(_client(), model, [name for name, wanted in flags.items() if wanted], verbose=verbose, as_json=json)


@app.command(epilog=_examples("localllm ps", "localllm ps --json"))
def ps(prefix: Prefix = "", json: Json = False) -> None:
    """List the models that are loaded."""
    from localllm.cli.models import list_running

    list_running(_client(), prefix, as_json=json)


@app.command(epilog=_examples("localllm stop smollm2"))
def stop(model: Model) -> None:
    """Unload a model."""
    from localllm.cli.models import stop_model

    stop_model(_client(start=False), model)


@app.command(epilog=_examples("localllm cp smollm2 my-assistant"))
def cp(
    source: Annotated[str, typer.Argument(help="The model to copy.", show_default=False)],
    destination: Annotated[str, typer.Argument(help="Its second name.", show_default=False)],
) -> None:
    """Give a model a second name; it takes no space."""
    from localllm.cli.models import copy_model

    copy_model(_client(), source, destination)


@app.command(epilog=_examples("localllm rm smollm2", "localllm rm llama3 qwen3"))
def rm(models: Annotated[list[str], typer.Argument(help="Names of models.", show_default=False)]) -> None:
    """Remove models."""
    from localllm.cli.models import remove_models

    remove_models(_client(), models)


def _settings_help() -> str:
    rows = (f"{s.env}{f' ({s.alias})' if s.alias else ''}: {s.help}" for s in settings())
    return "Settings, as environment variables or in the configuration file:\n\n" + "\n\n".join(rows)


@app.command(epilog=_settings_help())
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on, for example 127.0.0.1:11500.")] = "",
    models: Annotated[Path | None, typer.Option(help="Folder of the model store.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Log more.")] = False,
) -> None:
    """Run the daemon in the foreground; other commands start one in the background by themselves."""
    from localllm.cli.serve import serve as serve_here

    flags = {"host": host, "models": str(models or ""), "debug": "1" if debug else ""}
    raise typer.Exit(serve_here({key: value for key, value in flags.items() if value}))


app.command("start", hidden=True, epilog=_settings_help())(serve)


def main() -> None:
    """The console script. Expected errors become one line and a hint; the exit codes are listed in docs/cli.md."""
    # The value of --think is optional, which the option parser cannot express.
    arguments = ["--think=true" if argument == "--think" else argument for argument in sys.argv[1:]]
    try:
        app(arguments)
    except LocalLLMError as error:
        output.print_error(error)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has had enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
