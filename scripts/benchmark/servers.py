"""The servers that are compared: this checkout's daemon, and llama-server from the same source of llama.cpp."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], url: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """A server for as long as the block runs, from the moment that it answers /health with 200."""
    with log.open("a") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise SystemExit(f"{command[0]} did not start: see {log}")
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def daemon(folder: Path, model_file: Path, *, slots: int, num_ctx: int) -> Iterator[tuple[str, str]]:
    """A daemon with a store of its own in `folder`; yields its base URL and the model's name."""
    address = f"127.0.0.1:{free_port()}"
    environment = {
        "LOCALLLM_HOST": address,
        "LOCALLLM_MODELS": str(folder / "models"),
        "LOCALLLM_NUM_PARALLEL": str(slots),
        "LOCALLLM_CONTEXT_LENGTH": str(num_ctx),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    url = f"http://{address}"
    with running([sys.executable, "-m", "localllm", "serve"], url, folder / "daemon.log", environment):
        body = {"model": str(model_file), "stream": False}
        httpx.post(f"{url}/api/pull", json=body, timeout=None).raise_for_status()
        models = httpx.get(f"{url}/api/tags").raise_for_status().json()["models"]
        yield url, models[0]["name"]


@contextlib.contextmanager
def llama_server(
    binary: Path, folder: Path, model_file: Path, *, slots: int, num_ctx: int
) -> Iterator[tuple[str, str]]:
    """llama-server with the flags that serve it best; the memory for prompts that it keeps is its default."""
    port = free_port()
    command = [str(binary), "-m", str(model_file), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * num_ctx), "-fa", "on", "-cb", "--jinja"]
    command += ["-t", str(os.cpu_count()), "-tb", str(os.cpu_count())]
    url = f"http://127.0.0.1:{port}"
    with running(command, url, folder / "llama-server.log", {}):
        yield url, "model"


def find_llama_server(cache: Path) -> Path:
    """llama-server of the installed llama-cpp-python's own llama.cpp, built once from its source package."""
    number = version("llama-cpp-python")
    binary = cache / f"llama-server-{number}"
    if not binary.exists():
        print(f"building llama-server from the source package of llama-cpp-python {number}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            built = _build(Path(folder), number)
            shutil.copy(built, binary.with_suffix(".partial"))
        binary.with_suffix(".partial").rename(binary)
    return binary


def _build(folder: Path, number: str) -> Path:
    wanted = f"llama-cpp-python=={number}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
    subprocess.run([*pip, wanted], check=True, stdout=sys.stderr)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    (source,) = folder.glob("*/vendor/llama.cpp")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
    options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_WEBUI=OFF"]
    build = folder / "build"
    subprocess.run(["cmake", "-S", str(source), "-B", str(build), *options], check=True, stdout=sys.stderr)
    jobs = str(os.cpu_count() or 1)
    target = ["--target", "llama-server", "--parallel", jobs]
    subprocess.run(["cmake", "--build", str(build), *target], check=True, stdout=sys.stderr)
    return build / "bin" / "llama-server"
