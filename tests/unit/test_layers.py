"""The import law: who may import whom inside the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "localllm"

BASE = {"errors", "types", "localllm"}
ALLOWED = {
    "errors": set(),
    "types": {"errors"},
    "config": {"config_file", "errors", "localllm"},
    "config_file": {"errors"},
    "log": {"localllm"},
    "protocol": {"errors", "types"},
    "keys": {"errors"},
    "store": BASE | {"config"},
    "llama": BASE,
    "chat": BASE,
    "runner": BASE | {"protocol", "llama", "chat", "log"},
    "daemon": BASE | {"store", "protocol", "config", "keys", "log"},
    "api": BASE | {"daemon", "store", "config", "keys", "log", "protocol"},
    "cli": BASE | {"config", "keys", "log"},
}

# Modules that compose layers, and what that lets them import beyond their layer.
EXCEPTIONS = {
    "daemon/server.py": {"api"},
    "cli/serve.py": {"daemon"},
}
# What the command line may handle of the store: names, and the language that Modelfiles are written in.
STORE_FOR_CLI = {"localllm.store.names", "localllm.store.modelfile", "localllm.store.parameters"}

PURE = {
    "daemon/backoff.py",
    "daemon/decisions.py",
    "daemon/entry.py",
    "daemon/eviction.py",
    "daemon/failures.py",
    "daemon/memory.py",
    "daemon/refusals.py",
    "daemon/residency.py",
    "daemon/room.py",
    "daemon/standing.py",
    "keys/key.py",
    "keys/limits.py",
    "runner/scheduler.py",
    "runner/prefix_cache.py",
    "runner/cost.py",
    "runner/sequence.py",
    "store/modelfile.py",
    "store/names.py",
    "store/parameters.py",
    "store/templates.py",
}
IMPURE_IMPORTS = {"asyncio", "ctypes", "os", "pathlib", "socket", "subprocess", "threading", "time"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full dotted names of everything that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "localllm"}
    return found


def layer(dotted: str) -> str:
    """The layer that a name inside the package belongs to; the package itself counts as "localllm"."""
    parts = dotted.split(".")
    if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()):
        return parts[1]
    return "localllm"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_law(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    allowed = ALLOWED[own] | {own} | EXCEPTIONS.get(relative.as_posix(), set())
    inside = {name for name in imports(path) if name.split(".")[0] == "localllm"}
    bad = {name for name in inside if layer(name) not in allowed | {"localllm"}}
    if own == "cli":
        bad -= STORE_FOR_CLI
    assert not bad, f"{relative} may not import {sorted(bad)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_llama_package_touches_llama_cpp(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] != "llama":
        assert not {name for name in imports(path) if name.split(".")[0] == "llama_cpp"}


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_do_no_io(name: str) -> None:
    assert not {module.split(".")[0] for module in imports(PACKAGE / name)} & IMPURE_IMPORTS


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400, "a module over 400 lines wants to be two"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is over 60 lines"
