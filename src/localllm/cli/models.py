"""The commands about models that are not a conversation."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx

import localllm
from localllm.cli import output
from localllm.cli.client import Client
from localllm.cli.format import human_size, human_time, parse_time
from localllm.cli.launcher import client_for, find_daemon
from localllm.config import load_config
from localllm.errors import LocalLLMError, ModelNotFound

_FOREVER_YEARS = 20
_ID_LENGTH = 12
_LOCAL_STARTS = ("/", "./", "../", "~")


def print_version() -> None:
    """The daemon's version; warnings where there is none, or where it is not this command's. Raises nothing."""
    try:
        with client_for(load_config()) as client:
            version = find_daemon(client)
    except httpx.ConnectError:
        output.notice("Warning: no daemon is running")
        version = localllm.__version__
    except LocalLLMError as error:
        output.notice(f"Warning: {error.message}")
        version = localllm.__version__
    output.line(f"localllm version is {version}")
    if version != localllm.__version__:
        output.notice(f"Warning: client version is {localllm.__version__}")


# ---- pull ----


def local_file(reference: str) -> Path | None:
    """The GGUF that a reference means by its path; None for a name or an address."""
    path = Path(reference).expanduser()
    if reference.startswith(_LOCAL_STARTS) or (path.suffix.lower() == ".gguf" and path.is_file()):
        return path.absolute()
    return None


def pull_model(client: Client, reference: str, *, insecure: bool = False) -> None:
    """Pull with a bar on a terminal, silently elsewhere."""
    # The daemon has another working directory.
    model = str(local_file(reference) or reference)
    events = client.stream("/api/pull", {"model": model, "insecure": insecure})
    with contextlib.closing(events), output.pull_display() as show:
        for event in events:
            show(event)


# ---- list and ps ----


def list_models(client: Client, prefix: str, *, as_json: bool) -> None:
    models = client.call("GET", "/api/tags")["models"] or []
    models = [model for model in models if model["name"].lower().startswith(prefix.lower())]
    if as_json:
        output.print_json(models)
        return
    now = datetime.now(timezone.utc)
    rows = [
        [
            model["name"],
            model["digest"][:_ID_LENGTH],
            human_size(model["size"]),
            human_time(parse_time(model["modified_at"]), now),
        ]
        for model in models
    ]
    output.table(["NAME", "ID", "SIZE", "MODIFIED"], rows)


def list_running(client: Client, prefix: str, *, as_json: bool) -> None:
    models = client.call("GET", "/api/ps")["models"] or []
    models = [model for model in models if model["name"].startswith(prefix)]
    if as_json:
        output.print_json(models)
        return
    now = datetime.now(timezone.utc)
    rows = [
        [
            model["name"],
            model["digest"][:_ID_LENGTH],
            human_size(model["size"]),
            processor(model["size"], model["size_vram"]),
            str(model["context_length"]),
            _until(model, now),
        ]
        for model in models
    ]
    output.table(["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"], rows)


def processor(size: int, size_vram: int) -> str:
    """What runs the model, by how many of its bytes are where."""
    if size_vram == 0:
        return "100% CPU"
    if size == 0 or size_vram > size:
        return "Unknown"
    if size_vram == size:
        return "100% GPU"
    cpu = round(100 * (size - size_vram) / size)
    return f"{cpu}%/{100 - cpu}% CPU/GPU"


def _until(model: dict[str, Any], now: datetime) -> str:
    runner = model.get("runner", {})
    if runner.get("state") == "loading":
        return f"Loading... {runner.get('load_fraction', 0):.0%}"
    expires_at = parse_time(model["expires_at"])
    if runner.get("state") == "stopping" or expires_at <= now:
        return "Stopping..."
    if expires_at.year - now.year > _FOREVER_YEARS:
        return "Forever"
    return human_time(expires_at, now)


# ---- stop, cp and rm ----


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
