#!/usr/bin/env python3
"""Sleep and wake-up of a real vLLM on a GPU, Forebay's beside its own, on a model shaped like Llama-3.1-8B.

Starts one engine after the other, each in a process of its own: vLLM as it is, vLLM with our worker, and with
`--preload LIBRARY` vLLM as it is under that library. Each sleeps (level 1) and wakes `--rounds` times after
the first. The SHA-256 of every parameter and buffer must be the same after each wake, and so must the tokens
of a generation: nothing is written otherwise. The ceiling is what all GPUs' links move together.

Needs vLLM and torch, no network and no weights: vLLM's dummy loader makes them, from a seed. It knows vLLM's
public interface and how results are written; how bytes travel is the affair of what it measures.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine

# The worker is in this process: its parameters can be looked at.
QUIET = vllm_engine.QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
WORKER = "forebay.vllm.worker.Worker"
ENGINE_LIMIT_S = 400
PROMPT = [3 + index * 7919 % 30000 for index in range(512)]
MIB = 1 << 20


@dataclass
class Engine:
    """What one engine did. Times in seconds, in order."""

    version: str
    weights_bytes: int
    ready_s: float
    first_sleep_s: float = 0.0
    later_sleeps_s: list[float] = field(default_factory=list)
    wakes_s: list[float] = field(default_factory=list)
    wakes_cpu_s: list[float] = field(default_factory=list)


@dataclass
class Links:
    """What all GPUs' links move together, in bytes per second."""

    gpus: list[str]
    h2d: float
    d2h: float


def digests(worker: Any) -> dict[str, str]:
    """The SHA-256 of each parameter and buffer. Called by vLLM, with its worker."""
    import torch

    def digest(item: tuple[str, Any]) -> tuple[str, str]:
        flat = item[1].detach().reshape(-1).contiguous().view(torch.uint8)
        return item[0], hashlib.sha256(flat.cpu().numpy()).hexdigest()

    model = worker.get_model()
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    with ThreadPoolExecutor(8) as threads:
        return dict(threads.map(digest, tensors))


def weights_bytes(worker: Any) -> int:
    """What a sleep at level 1 has to keep."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocations = get_mem_allocator_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.tag == "weights")


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of all processors of this process."""
    begun, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - begun, time.process_time() - cpu


def exercise(llm: Any, engine: Engine, rounds: int) -> None:
    """Sleeps and wakes, and looks at every byte after each wake."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)

    def tokens() -> list[int]:
        llm.reset_prefix_cache()
        return list(
            llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0].token_ids
        )

    before, said = llm.collective_rpc(digests), tokens()
    for round_number in range(rounds + 1):
        sleep_s, _ = timed(lambda: llm.sleep(level=1))
        wake_s, wake_cpu_s = timed(llm.wake_up)
        if round_number == 0:
            engine.first_sleep_s = sleep_s
        else:
            engine.later_sleeps_s.append(sleep_s)
        engine.wakes_s.append(wake_s)
        engine.wakes_cpu_s.append(wake_cpu_s)
        wrong = [name for name, digest in llm.collective_rpc(digests)[0].items() if before[0][name] != digest]
        if wrong:
            sys.exit(
                f"wake {round_number}: {len(wrong)} of {len(before[0])} parameters differ, such as {wrong[0]}"
            )
        if tokens() != said:
            sys.exit(f"wake {round_number}: other tokens than before")


def run_engine(kind: str, model: Path, rounds: int) -> Engine:
    """One engine, in this process."""
    import vllm

    begun = time.perf_counter()
    llm = vllm.LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_sleep_mode=True,
        max_model_len=4096,
        gpu_memory_utilization=0.5,
        **({"worker_cls": WORKER} if kind == "forebay" else {}),
    )
    ready_s = time.perf_counter() - begun
    engine = Engine(vllm.__version__, llm.collective_rpc(weights_bytes)[0], ready_s)
    exercise(llm, engine, rounds)
    return engine


def run_links() -> Links:
    """Pinned memory to and from all GPUs at once, 8 times 1 GiB each, on a stream for each GPU."""
    import torch

    gpus = range(torch.cuda.device_count())
    host = [torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True) for _ in gpus]
    device = [torch.empty(1024 * MIB, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
    passes = 8

    def seconds(targets: list[Any], sources: list[Any]) -> float:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        begun = time.perf_counter()
        for _ in range(passes):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return time.perf_counter() - begun

    moved = passes * len(gpus) * 1024 * MIB
    h2d, d2h = (max(moved / seconds(*ends) for _ in range(3)) for ends in ((device, host), (host, device)))
    return Links([torch.cuda.get_device_name(gpu) for gpu in gpus], h2d, d2h)


def child(part: str, model: Path, rounds: int, preload: str | None, out: Path) -> dict[str, Any]:
    """Runs a part of this file in a process of its own and returns what it found."""
    environment = os.environ | QUIET
    if part == "preload" and preload:
        environment["LD_PRELOAD"] = preload
    command = [sys.executable, __file__, "--part", part, "--model", str(model), "--rounds", str(rounds)]
    print(f"{part} ...", file=sys.stderr, flush=True)
    # Its output is vLLM's log; what it found is in the file.
    done = subprocess.run(
        [*command, "--json", str(out)], env=environment, stdout=sys.stderr, timeout=ENGINE_LIMIT_S
    )
    if done.returncode != 0:
        sys.exit(f"{part} failed with exit code {done.returncode}: see its output above")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def row(name: str, runs: list[float], peer: dict[str, Any], ceiling: float, **more: float) -> dict[str, Any]:
    """A row of the results. Less is better, so that a ratio of 1 is the best there can be."""
    value = statistics.median(runs)
    figures = {
        "name": name,
        "unit": "s",
        "value": value,
        "min": min(runs),
        "max": max(runs),
        "runs": len(runs),
    }
    return figures | {"ceiling": ceiling, "ratio": value / ceiling} | more | {"peer": peer}


def rows(links: Links, stock: Engine, ours: Engine, suffix: str) -> list[dict[str, Any]]:
    """Ours beside vLLM's own."""

    def beside(runs: list[float]) -> dict[str, Any]:
        return {"name": "vLLM", "version": stock.version, "value": statistics.median(runs)}

    out_s, back_s = ours.weights_bytes / links.d2h, ours.weights_bytes / links.h2d
    cpu = statistics.median(ours.wakes_cpu_s) / (ours.weights_bytes / 1e9)
    first, later, wake = (f"sleep.{what}.8b{suffix}" for what in ("first_sleep_s", "later_sleep_s", "wake_s"))
    return [
        row(wake, ours.wakes_s, beside(stock.wakes_s), back_s, cpu_s_per_gb=cpu),
        row(first, [ours.first_sleep_s], beside([stock.first_sleep_s]), out_s),
        row(later, ours.later_sleeps_s, beside(stock.later_sleeps_s), out_s),
    ]


def compare(rounds: int, preload: str | None) -> dict[str, Any]:
    """All engines in turn; the results object."""
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "llama-8b", Path(folder) / "found.json"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(vllm_engine.LLAMA_8B))
        links = Links(**child("links", model, rounds, None, out))
        stock = Engine(**child("stock", model, rounds, None, out))
        made = rows(links, stock, Engine(**child("forebay", model, rounds, None, out)), "")
        if preload:
            made += rows(links, stock, Engine(**child("preload", model, rounds, preload, out)), ".preload")
    return vllm_engine.results("sleep", links.gpus, None, made)


def show(results: dict[str, Any]) -> None:
    """The rows, as a table."""
    print(f"{'row':<32} {'median':>8} {'min':>8} {'max':>8} {'ceiling':>8} {'ratio':>6}  peer")
    for line in results["rows"]:
        figures = " ".join(f"{line[name]:>8.3f}" for name in ("value", "min", "max", "ceiling"))
        peer = "{name} {version} {value:.3f} s".format(**line["peer"])
        print(f"{line['name']:<32} {figures} {line['ratio']:>6.2f}  {peer}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results object to this file")
    parser.add_argument("--rounds", type=int, default=5, help="sleeps and wakes after the first (default 5)")
    parser.add_argument(
        "--preload", metavar="LIBRARY", help="measure vLLM under libforebay_preload.so as well"
    )
    parser.add_argument("--part", choices=("links", "stock", "forebay", "preload"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; allowed are 1 and more")
    if args.part:
        found = run_links() if args.part == "links" else run_engine(args.part, args.model, args.rounds)
        args.json.write_text(json.dumps(asdict(found)))
        return
    results = compare(args.rounds, args.preload)
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
