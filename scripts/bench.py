"""Throughput of one model at several numbers of concurrent clients, in a closed loop.

Pulls SmolLM2-135M-Instruct, quantises it to Q4_0 (a format whose kernels gain from batches), starts a daemon of its own
on a free port with a store of its own, and runs the loads in turn, so that a machine whose speed drifts drifts for all
of them. Quote the ratio of the medians, not the absolute numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import platformdirs

from localllm.store.library import ModelStore

WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty", "knoll", "larch")


@dataclass(frozen=True)
class Run:
    tokens_per_second: float
    ttft_p50: float
    itl_p50: float


async def one_request(url: httpx.URL, model: str, number: int, arguments: argparse.Namespace) -> list[float]:
    """Times of arrival of each piece of one streamed answer, the start of the request first; last the token count.

    Reads the socket itself: a client library would take more of a small machine's cores than the daemon does.
    """
    rng = random.Random(number)
    words = " ".join(rng.choice(WORDS) for _ in range(arguments.prompt_words))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Story {number}. Tell a long story with these words: {words}"}],
        "stream": True,
        "max_tokens": arguments.tokens,
        "seed": number,
        "stream_options": {"include_usage": True},
    }
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    times, usage = [time.perf_counter()], b""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head.encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the daemon answered {status.decode().strip()}")
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise SystemExit("the daemon closed the connection")
        if b'"content":"' in line:
            times.append(time.perf_counter())
        elif b'"completion_tokens"' in line:
            usage = line
    writer.close()
    return [*times, float(json.loads(usage[6:])["usage"]["completion_tokens"])]


async def run_load(url: str, model: str, num_clients: int, seed: int, arguments: argparse.Namespace) -> Run:
    """`num_clients` clients, each sending its next request when the last one is answered.

    What counts is the time in which all of them are at work: from the start until the first finds no request left.
    """
    numbers = iter(range(seed, seed + max(arguments.requests, num_clients * arguments.rounds)))
    results: list[list[float]] = []

    ends: list[float] = []

    async def worker() -> None:
        for number in numbers:
            results.append(await one_request(httpx.URL(url), model, number, arguments))
        ends.append(time.perf_counter())

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(num_clients)))
    gaps = [later - earlier for r in results for earlier, later in itertools.pairwise(r[1:-1])]
    return Run(
        sum(_tokens_until(ends[0], r) for r in results) / (ends[0] - started),
        statistics.median(r[1] - r[0] for r in results),
        statistics.median(gaps) if gaps else 0.0,
    )


def _tokens_until(end: float, result: list[float]) -> float:
    """How many of an answer's tokens came before `end`, judged by its pieces."""
    pieces = result[1:-1]
    return result[-1] * sum(time <= end for time in pieces) / len(pieces) if pieces else 0.0


def quantised_model(folder: Path) -> Path:
    """SmolLM2 as Q4_0, made once. The daemon never loads native code; this script may."""
    target = folder / "smollm2-135m-q4_0.gguf"
    if not target.exists():
        store = ModelStore(folder / "models")
        asyncio.run(_pull(store))
        source = store.resolve("smollm2").model_path
        code = (
            "import sys, llama_cpp as lib; p = lib.llama_model_quantize_default_params();"
            "p.ftype = lib.LLAMA_FTYPE_MOSTLY_Q4_0; p.allow_requantize = True;"
            "sys.exit(lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
        )
        partial = target.with_suffix(".partial")
        subprocess.run([sys.executable, "-c", code, str(source), str(partial)], check=True, capture_output=True)
        partial.rename(target)
    return target


async def _pull(store: ModelStore) -> None:
    async for event in store.pull("smollm2"):
        if not event.total:
            print(event.status, file=sys.stderr)


@contextlib.contextmanager
def running_daemon(num_parallel: int, folder: Path) -> Iterator[str]:
    """A daemon of our own; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "LOCALLLM_HOST": address,
        "LOCALLLM_MODELS": str(folder / "models"),
        "LOCALLLM_NUM_PARALLEL": str(num_parallel),
        "LOCALLLM_CONTEXT_LENGTH": "1024",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    log = (folder / "daemon.log").open("w")
    process = subprocess.Popen([sys.executable, "-m", "localllm", "serve"], env=environment, stdout=log, stderr=log)
    try:
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def measure(arguments: argparse.Namespace) -> dict[int, list[Run]]:
    cache = platformdirs.user_cache_path("localllm-bench", ensure_exists=True)
    model_file = quantised_model(cache)
    runs: dict[int, list[Run]] = {clients: [] for clients in arguments.clients}
    with tempfile.TemporaryDirectory() as folder, running_daemon(max(arguments.clients), Path(folder)) as url:
        httpx.post(f"{url}/api/pull", json={"model": str(model_file), "stream": False}, timeout=None).raise_for_status()
        model = httpx.get(f"{url}/api/tags").json()["models"][0]["name"]
        asyncio.run(run_load(url, model, 1, 0, argparse.Namespace(**{**vars(arguments), "requests": 1, "rounds": 1})))
        for repeat in range(arguments.repeats):
            for clients in arguments.clients:
                run = asyncio.run(run_load(url, model, clients, 1000 * (repeat + 1) + 100 * clients, arguments))
                runs[clients].append(run)
                print(f"run {repeat + 1}: {clients:3} clients {run.tokens_per_second:7.1f} tok/s", file=sys.stderr)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16], help="numbers of clients to compare")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--prompt-words", type=int, default=4, help="random words in each prompt")
    parser.add_argument("--requests", type=int, default=8, help="requests per load, at least")
    parser.add_argument("--rounds", type=int, default=6, help="requests per client, at least")
    parser.add_argument("--repeats", type=int, default=5, help="how often each load is run")
    runs = measure(parser.parse_args())
    base = statistics.median(run.tokens_per_second for run in next(iter(runs.values())))
    print("clients   tok/s (min median max)   ratio   TTFT p50   ITL p50")
    for clients, results in runs.items():
        speeds = sorted(run.tokens_per_second for run in results)
        median = statistics.median(speeds)
        ttft, itl = (statistics.median(getattr(r, name) for r in results) * 1e3 for name in ("ttft_p50", "itl_p50"))
        print(
            f"{clients:7} {speeds[0]:9.1f} {median:7.1f} {speeds[-1]:7.1f} {median / base:7.2f} "
            f"{ttft:7.0f} ms {itl:6.1f} ms"
        )


if __name__ == "__main__":
    main()
