"""`localllm show`: what a model is, in sections or one part of it raw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.cli import output
from localllm.cli.client import Client
from localllm.errors import InvalidUsage

_ENDS_WITH_NEWLINE = ("license", "modelfile", "parameters")
_NUM_FIRST_LINES = 2
_NUM_ITEMS = 3


def choose_part(flags: Mapping[str, bool]) -> str:
    """The one part that was asked for, by the names of the flags; empty for all. Raises InvalidUsage for two."""
    wanted = [name for name, is_given in flags.items() if is_given]
    if len(wanted) > 1:
        *names, last = (f"'--{name}'" for name in flags)
        raise InvalidUsage(f"only one of {', '.join(names)}, or {last} can be specified")
    return "".join(wanted)


def show_model(client: Client, model: str, part: str, *, verbose: bool, as_json: bool) -> None:
    shown = client.call("POST", "/api/show", {"model": model, "verbose": verbose})
    if as_json:
        output.print_json(shown.get(part, "") if part else shown)
    elif part:
        output.write(shown.get(part, "") + ("\n" if part in _ENDS_WITH_NEWLINE else ""))
    else:
        _print_sections(shown, verbose=verbose)


def _print_sections(shown: dict[str, Any], *, verbose: bool) -> None:
    info, projector = shown.get("model_info") or {}, shown.get("projector_info") or {}
    _section("Model", _model_rows(shown, info))
    _section("Capabilities", [[name] for name in shown.get("capabilities") or ()])
    _section("Projector", _projector_rows(projector))
    _section("Parameters", [row.split(None, 1) for row in shown.get("parameters", "").splitlines()])
    if verbose:
        _section("Metadata", [[key, _abbreviated(value)] for key, value in sorted(info.items())])
        _section("Tensors", [[t["name"], t["type"], str(t["shape"])] for t in shown.get("tensors") or ()])
    _section("System", _first_lines(shown.get("system", "")))
    _section("License", _first_lines(shown.get("license", "")))


def _model_rows(shown: dict[str, Any], info: dict[str, Any]) -> list[list[str]]:
    details = shown.get("details") or {}
    architecture = info.get("general.architecture") or details.get("family", "")
    return _filled(
        {
            "architecture": architecture,
            "parameters": details.get("parameter_size"),
            "context length": info.get(f"{architecture}.context_length"),
            "embedding length": info.get(f"{architecture}.embedding_length"),
            "quantization": details.get("quantization_level"),
            "requires": shown.get("requires"),
        }
    )


def _projector_rows(info: dict[str, Any]) -> list[list[str]]:
    architecture = info.get("general.architecture", "")
    count = info.get("general.parameter_count")
    return _filled(
        {
            "architecture": architecture,
            "parameters": f"{count / 1e6:.2f}M" if count else "",
            "embedding length": info.get(f"{architecture}.vision.embedding_length"),
            "dimensions": info.get(f"{architecture}.vision.projection_dim"),
        }
    )


def _filled(values: dict[str, Any]) -> list[list[str]]:
    return [[name, str(value)] for name, value in values.items() if value]


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    """A title indented by two, rows by four, columns aligned, a blank line after; nothing for no rows."""
    if not rows:
        return
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))]
    output.line(f"  {title}")
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
        output.line(f"    {'    '.join(cells)}".rstrip())
    output.line()


def _first_lines(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [[line] for line in lines[:_NUM_FIRST_LINES]] + ([["..."]] if len(lines) > _NUM_FIRST_LINES else [])


def _abbreviated(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    rest = len(value) - _NUM_ITEMS
    return f"[{', '.join(map(str, value[:_NUM_ITEMS]))}{f', ...+{rest} more' if rest > 0 else ''}]"
