"""The commands about models that are not a conversation."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import localllm
from localllm.cli import output
from localllm.cli.client import Client
from localllm.config import Config
from localllm.errors import DaemonUnavailable, InvalidRequest, LocalLLMError, ModelNotFound

_FOREVER_YEARS = 20
_SECTION_LINES = 2
_ID_LENGTH = 12


def print_version(config: Config) -> None:
    """The running daemon's version; a warning where there is none, or where it is not this one's."""
    try:
        version = str(Client(config).call("GET", "/api/version")["version"])
    except (DaemonUnavailable, LocalLLMError, KeyError):
        output.notice("Warning: no daemon is running")
        version = localllm.__version__
    output.line(f"localllm version is {version}")
    if version != localllm.__version__:
        output.notice(f"Warning: client version is {localllm.__version__}")


def pull_model(client: Client, model: str, *, insecure: bool = False) -> None:
    """Pull with a bar on a terminal, silently elsewhere."""
    if "/" in model and model.startswith((".", "~")):
        from pathlib import Path

        # The daemon has another working directory.
        model = str(Path(model).expanduser().absolute())
    body = {"model": model, "insecure": insecure}
    with output.transfer_progress() as progress:
        tasks: dict[str, Any] = {}
        for event in client.stream("/api/pull", body):
            if progress is None:
                continue
            status, total = event["status"], event.get("total")
            if not total:
                progress.console.print(status, highlight=False)
            elif status not in tasks:
                tasks[status] = progress.add_task(status, total=total, completed=event.get("completed", 0))
            else:
                progress.update(tasks[status], total=total, completed=event.get("completed", 0))


def list_models(client: Client, prefix: str, *, as_json: bool) -> None:
    models = client.call("GET", "/api/tags")["models"]
    models = [model for model in models if model["name"].lower().startswith(prefix.lower())]
    if as_json:
        output.print_json(models)
        return
    rows = [
        [
            model["name"],
            model["digest"][:_ID_LENGTH],
            output.human_size(model["size"]),
            output.human_time(output.parse_time(model["modified_at"])),
        ]
        for model in models
    ]
    output.table(["NAME", "ID", "SIZE", "MODIFIED"], rows)


def list_running(client: Client, prefix: str, *, as_json: bool) -> None:
    models = client.call("GET", "/api/ps")["models"]
    models = [model for model in models if model["name"].startswith(prefix)]
    if as_json:
        output.print_json(models)
        return
    rows = [
        [
            model["name"],
            model["digest"][:_ID_LENGTH],
            output.human_size(model["size"]),
            _processor(model["size"], model["size_vram"]),
            str(model["context_length"]),
            _until(output.parse_time(model["expires_at"])),
        ]
        for model in models
    ]
    output.table(["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"], rows)


def _processor(size: int, size_vram: int) -> str:
    if size_vram == 0:
        return "100% CPU"
    if size_vram > size or size == 0:
        return "Unknown"
    if size_vram == size:
        return "100% GPU"
    cpu = round(100 * (size - size_vram) / size)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"


def _until(expires_at: datetime) -> str:
    now = datetime.now(timezone.utc)
    if expires_at <= now:
        return "Stopping..."
    if expires_at.year - now.year > _FOREVER_YEARS:
        return "Forever"
    return output.human_time(expires_at, now)


def stop_model(client: Client, model: str) -> None:
    try:
        client.call("POST", "/api/show", {"model": model})
    except ModelNotFound as error:
        raise ModelNotFound(f'couldn\'t find model "{model}" to stop', hint=error.hint) from None
    client.call("POST", "/api/generate", {"model": model, "keep_alive": 0, "stream": False})


def copy_model(client: Client, source: str, destination: str) -> None:
    client.call("POST", "/api/copy", {"source": source, "destination": destination})
    output.line(f"copied '{source}' to '{destination}'")


def remove_models(client: Client, models: list[str]) -> None:
    """Remove one after the other; stops at the first that cannot be removed."""
    for model in models:
        client.call("DELETE", "/api/delete", {"model": model})
        output.line(f"deleted '{model}'")


def show_model(client: Client, model: str, selected: list[str], *, verbose: bool, as_json: bool) -> None:
    if len(selected) > 1:
        raise InvalidRequest(
            "only one of '--license', '--modelfile', '--parameters', '--system', or '--template' can be specified"
        )
    shown = client.call("POST", "/api/show", {"model": model, "verbose": verbose})
    if as_json:
        output.print_json(shown)
    elif selected:
        text = str(shown.get(selected[0], ""))
        output.write(text + ("\n" if selected[0] in ("license", "modelfile", "parameters") else ""))
    else:
        _print_sections(shown, verbose=verbose)


def _print_sections(shown: dict[str, Any], *, verbose: bool) -> None:
    info = shown["model_info"]
    _section("Model", _model_rows(shown["details"], info))
    _section("Capabilities", [[name] for name in shown.get("capabilities", [])])
    _section("Parameters", [row.split(None, 1) for row in shown.get("parameters", "").splitlines()])
    if verbose:
        _section("Metadata", [[key, _abbreviate(value)] for key, value in sorted(info.items())])
        _section("Tensors", [[t["name"], t["type"], str(t["shape"])] for t in shown.get("tensors", [])])
    _section("System", _first_lines(shown.get("system", "")))
    _section("License", _first_lines(shown.get("license", "")))


def _model_rows(details: dict[str, Any], info: dict[str, Any]) -> list[list[str]]:
    architecture = info.get("general.architecture", details.get("family", ""))
    rows = [
        ["architecture", architecture],
        ["parameters", details.get("parameter_size", "")],
        ["context length", str(info.get(f"{architecture}.context_length", ""))],
        ["embedding length", str(info.get(f"{architecture}.embedding_length", ""))],
        ["quantization", details.get("quantization_level", "")],
    ]
    return [row for row in rows if row[1]]


def _section(title: str, rows: list[list[str]]) -> None:
    """A title indented by two, rows by four, columns aligned, a blank line after; nothing for no rows."""
    if not rows:
        return
    width = max(len(row[0]) for row in rows)
    output.line(f"  {title}")
    for first, *rest in rows:
        output.line(f"    {first:{width}}    {'    '.join(rest)}".rstrip() if rest else f"    {first}")
    output.line()


def _first_lines(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [[line] for line in lines[:_SECTION_LINES]] + ([["..."]] if len(lines) > _SECTION_LINES else [])


def _abbreviate(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return f"[{', '.join(map(str, value[:3]))}{f', ...+{len(value) - 3} more' if len(value) > 3 else ''}]"
