"""Throughput and latency of the daemon, alone and against llama-server built from the same source of llama.cpp.

Everything runs in turn, again and again, so that a machine whose speed drifts drifts for all. Quote ratios, not
absolute numbers. `compare` builds llama-server once (about ten minutes on two cores; it needs cmake and a compiler).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from benchmark import load, servers
from benchmark.load import Result, closed_loop, gap_of_streams
from benchmark.models import model_file

Server = tuple[str, str]
Measure = Callable[[Server, int], Awaitable[Result]]


@dataclass(frozen=True)
class Workload:
    """`better` says which figure counts: "tok/s" more is better, "TTFT" and "gap" less."""

    name: str
    figure: str
    target: str
    measure: Measure


def loop(prompt: Callable[[int], load.Messages], clients: int, requests: int, tokens: int, **more: object) -> Measure:
    async def measure(server: Server, seed: int) -> Result:
        options = {"clients": clients, "requests": requests, "max_tokens": tokens, "seed": seed, **more}
        return await closed_loop(*server, prompt, **options)  # type: ignore[arg-type]

    return measure


async def _gap(server: Server, seed: int) -> Result:
    return await gap_of_streams(*server, seed=seed)


def workloads(tokens: int) -> list[Workload]:
    return [
        Workload("1 client, unique prompts", "tok/s", "≥ 0.97", loop(load.unique, 1, 4, tokens)),
        Workload("10 clients, unique prompts", "tok/s", "≥ 1.0", loop(load.unique, 10, 30, tokens)),
        Workload("50 clients, unique prompts", "tok/s", "≥ 1.0", loop(load.unique, 50, 100, tokens)),
        Workload("50 clients, unique prompts", "TTFT", "≤ 0.5", loop(load.unique, 50, 100, tokens)),
        Workload("100 clients, unique prompts", "tok/s", "≥ 1.0", loop(load.unique, 100, 200, tokens)),
        Workload("100 clients, unique prompts", "TTFT", "≤ 0.5", loop(load.unique, 100, 200, tokens)),
        Workload("10 clients, one system prompt of 400 tokens", "tok/s", "≥ 2.0", loop(load.shared, 10, 30, tokens)),
        Workload("4 clients, chats of 4 turns", "tok/s", "≥ 1.1", loop(load.unique, 4, 8, tokens, turns=4)),
        Workload("copy task, 1 client, greedy", "tok/s", "≥ 1.5", loop(load.copy_task, 1, 4, 128, temperature=0)),
        Workload("4 streams when a prompt of 4,000 tokens arrives", "gap", "≤ 0.33", _gap),
    ]


FIGURES: dict[str, Callable[[Result], float]] = {
    "tok/s": lambda result: result.tokens_per_second,
    "TTFT": lambda result: result.ttft,
    "gap": lambda result: result.worst_gap,
}


def measure_all(
    choices: list[Workload], targets: dict[str, Server], repeats: int
) -> dict[str, dict[str, list[Result]]]:
    """Results by workload and server. Workloads that differ only in their figure share their runs."""
    results: dict[str, dict[str, list[Result]]] = {}
    for repeat in range(repeats):
        for index, workload in enumerate(choices):
            runs = results.setdefault(workload.name, {name: [] for name in targets})
            for name, server in targets.items():
                if len(runs[name]) > repeat:
                    continue
                seed = 1_000_000 * (repeat + 1) + 10_000 * index
                runs[name].append(asyncio.run(_measure(workload, server, seed)))
                last = runs[name][-1]
                print(
                    f"run {repeat + 1}: {workload.name}: {name}: {last.tokens_per_second:.1f} tok/s, TTFT "
                    f"{last.ttft * 1e3:.0f} ms, ITL {last.itl * 1e3:.0f} ms, worst gap {last.worst_gap * 1e3:.0f} ms",
                    file=sys.stderr,
                )
    return results


async def _measure(workload: Workload, server: Server, seed: int) -> Result:
    return await workload.measure(server, seed)


def print_ratios(choices: list[Workload], results: dict[str, dict[str, list[Result]]]) -> None:
    print("\n| workload | figure | localllm | llama-server | ratio: median (min – max) | target |")
    print("|---|---|---|---|---|---|")
    for workload in choices:
        figure = FIGURES[workload.figure]
        ours, theirs = ([figure(r) for r in results[workload.name][name]] for name in ("localllm", "llama-server"))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        scale = 1 if workload.figure == "tok/s" else 1e3
        left, right = (f"{statistics.median(values) * scale:.1f}" for values in (ours, theirs))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} – {ratios[-1]:.2f})"
        unit = "tok/s" if workload.figure == "tok/s" else f"{workload.figure}, ms"
        print(f"| {workload.name} | {unit} | {left} | {right} | {spread} | {workload.target} |")


def compare(arguments: argparse.Namespace, file: Path, folder: Path) -> None:
    binary = arguments.llama_server or servers.find_llama_server(arguments.cache)
    with contextlib.ExitStack() as stack:
        ours = servers.daemon(folder, file, slots=arguments.slots, num_ctx=arguments.num_ctx)
        theirs = servers.llama_server(binary, folder, file, slots=16, num_ctx=arguments.num_ctx)
        targets = {"localllm": stack.enter_context(ours), "llama-server": stack.enter_context(theirs)}
        for server in targets.values():
            asyncio.run(closed_loop(*server, load.short, clients=2, requests=4, max_tokens=16, seed=1))
        choices = [w for w in workloads(arguments.tokens) if any(word in w.name for word in arguments.only or [""])]
        print_ratios(choices, measure_all(choices, targets, arguments.repeats))


def scale_alone(arguments: argparse.Namespace, file: Path, folder: Path) -> None:
    """How much more several clients get than the first number of them, of the daemon alone."""
    prompt = {"short": load.short, "unique": load.unique}[arguments.prompt]
    with servers.daemon(folder, file, slots=max(arguments.clients), num_ctx=1024) as server:
        asyncio.run(closed_loop(*server, prompt, clients=1, requests=1, max_tokens=32, seed=1))
        runs: dict[int, list[Result]] = {clients: [] for clients in arguments.clients}
        for repeat in range(arguments.repeats):
            for clients in arguments.clients:
                measure = loop(prompt, clients, max(8, 5 * clients), arguments.tokens)
                result = asyncio.run(_measure(Workload("", "", "", measure), server, 10_000 * (repeat * 100 + clients)))
                runs[clients].append(result)
                print(f"run {repeat + 1}: {clients} clients: {result.tokens_per_second:.1f} tok/s", file=sys.stderr)
    print("\n| clients | tok/s: median (min – max) | ratio of medians | TTFT, ms | ITL, ms |\n|---|---|---|---|---|")
    base = statistics.median(r.tokens_per_second for r in runs[arguments.clients[0]])
    for clients, results in runs.items():
        speeds = sorted(r.tokens_per_second for r in results)
        ttft, itl = (statistics.median(getattr(r, key) for r in results) * 1e3 for key in ("ttft", "itl"))
        median = statistics.median(speeds)
        spread = f"{median:.1f} ({speeds[0]:.1f} – {speeds[-1]:.1f})"
        print(f"| {clients} | {spread} | {median / base:.2f} | {ttft:.0f} | {itl:.1f} |")


def restart(arguments: argparse.Namespace, file: Path, folder: Path) -> None:
    """TTFT of a prompt of 2,000 tokens, cold and after the daemon was restarted."""
    ratios = []
    for repeat in range(arguments.repeats):
        prompt = load.long_prompt(repeat + 1, 1950)
        times = []
        for _ in range(2):
            with servers.daemon(folder, file, slots=4, num_ctx=4096) as server:
                asyncio.run(load.ask(*server, load.short(1), 4, 1))
                times.append(asyncio.run(load.ask(*server, prompt, 8, 1)).ttft)
        ratios.append(times[1] / times[0])
        print(f"run {repeat + 1}: cold {times[0]:.3f} s, after a restart {times[1]:.3f} s", file=sys.stderr)
    print(
        f"\nTTFT after a restart ÷ cold: median {statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="scale", choices=["scale", "compare", "restart"])
    parser.add_argument("--model", default="smollm2:Q4_0", help="smollm2:Q4_0, smollm2:Q4_K_M or random-1b:Q4_K_M")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is run")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16], help="scale: numbers of clients")
    parser.add_argument("--prompt", default="short", choices=["short", "unique"], help="scale: kind of prompt")
    parser.add_argument("--slots", type=int, default=64, help="compare: LOCALLLM_NUM_PARALLEL (llama-server has 16)")
    parser.add_argument("--num-ctx", type=int, default=5120, help="compare: window of each slot in tokens")
    parser.add_argument("--only", nargs="+", help="compare: workloads whose names contain one of these")
    parser.add_argument("--llama-server", type=Path, help="compare: a binary to use instead of building one")
    arguments = parser.parse_args()
    arguments.cache = platformdirs.user_cache_path("localllm-bench", ensure_exists=True)
    file = model_file(arguments.cache, arguments.model)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        {"scale": scale_alone, "compare": compare, "restart": restart}[arguments.what](arguments, file, Path(folder))
    print(f"\n{arguments.model}, {arguments.repeats} runs, {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
