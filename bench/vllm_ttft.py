#!/usr/bin/env python3
"""Time to the first token of a prompt whose KV is nowhere, in HBM, in host memory or on an SSD.

    bench/vllm_ttft.py FOLDER --part PART     measures one part; `bench/vllm.sh` runs them all
    bench/vllm_ttft.py FOLDER                 makes ttft.json and restore.svg of the parts that are there

A part is `links` (what copies from host memory reach), `plain` (vLLM alone: recompute, and a hit in HBM), a
peer or one of ours. Each is one engine with a model shaped like Llama-3.1-8B and weights drawn from a seed;
each prompt is computed once, dropped from HBM, and asked for again. What is said must be what vLLM alone
says. Knows what is measured and how rows are made of it; how engines and nodes are started is
`vllm_engine`'s affair.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine
import vllm_plot
from vllm_engine import ALL_LINKS, CHUNK_TOKENS, FROM_DISK, GIB, OURS, PEERS, WAYS, Node, Site, row

SIZES = [1024 << step for step in range(8)]
TINY_SIZES = [256, 1024, 2048]
TAIL_TOKENS = 8  # Behind the prefix, so that all ways compute the same few tokens of a warm prompt.
SAID_TOKENS = 8
FILL_TRIES = 4
DROP_LIMIT_S = 120.0
RECONNECT_LIMIT_S = 60.0
RELAYS_LIMIT_S = 120.0
WRITE_LIMIT_S = 120.0
DISK_REST_S = 5.0
WARM_UP_TOKENS = 512
LINK_RUNS = 5


@dataclass
class Size:
    """One prompt. Times in seconds, in order."""

    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # Prefix tokens that were not computed, of each warm run.
    said: list[list[int]] = field(default_factory=list)  # Tokens: cold and warm for `plain`, else warm.
    said_cached: int | None = None  # Prefix tokens that were not computed when it was said, if known.
    said_cold: list[int] = field(default_factory=list)  # Where nothing was there to load: the first token.
    disk_bytes_s: list[float] = field(default_factory=list)  # Plain reads, in turns with warm runs.
    bubble_s: list[float] = field(default_factory=list)  # How long warm runs of ours waited for layers.
    layers_late: list[int] = field(default_factory=list)  # For how many, of each.


@dataclass
class Part:
    """What one engine did."""

    way: str
    version: str
    ready_s: float
    sizes: dict[str, Size] = field(default_factory=dict)


class Engine:
    """A vLLM in this process, asked for one prompt at a time."""

    def __init__(self, site: Site, way: str, most_tokens: int) -> None:
        import vllm

        begun = time.perf_counter()
        arguments = vllm_engine.engine_arguments(site, way, most_tokens + 64)
        self.llm = vllm.LLM(**arguments)
        self.llm.collective_rpc(vllm_engine.seed_weights)
        self.ready_s, self.version = time.perf_counter() - begun, vllm.__version__
        self.vocabulary = site.model["vocab_size"]
        self.nudges = random.Random("nudges")
        self.sampling = lambda tokens: vllm.SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )

    def ask(self, prompt: list[int], tokens: int) -> tuple[float, int, list[int]]:
        """Seconds, prefix tokens that were not computed, and what was said."""
        begun = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": prompt}], self.sampling(tokens), use_tqdm=False)
        seconds = time.perf_counter() - begun
        return seconds, answers[0].num_cached_tokens or 0, list(answers[0].outputs[0].token_ids)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that shares nothing with those of other lengths."""
        return random.Random(tokens).choices(range(3, self.vocabulary), k=tokens + TAIL_TOKENS)

    def waited(self) -> tuple[float, int]:
        """Seconds that steps have waited for layers so far, and for how many. For ours alone."""
        (counted,) = self.llm.collective_rpc(counted_by_ours)
        return counted["bubble_us"] / 1e6, counted["layers_late"]

    def wait_for_relays(self) -> None:
        """Waits until the node has pinned its memory, and its GPUs relay for ours."""
        end = time.monotonic() + RELAYS_LIMIT_S
        while not self.llm.collective_rpc(counted_by_ours)[0]["relays"]:
            if time.monotonic() > end:
                sys.exit(f"no GPU of the node relays {RELAYS_LIMIT_S:.0f} s after the start")
            time.sleep(0.2)

    def drop(self) -> None:
        """Empties HBM's prefix cache. Blocks still being stored hold it up, and only steps let go of them."""
        end = time.monotonic() + DROP_LIMIT_S
        self.nudge()
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                sys.exit(f"blocks are still held {DROP_LIMIT_S:.0f} s after the last request")
            time.sleep(0.02)
            self.nudge()

    def nudge(self) -> None:
        """A request shorter than a block, for the sake of its steps."""
        self.ask(self.nudges.choices(range(3, self.vocabulary), k=4), 2)


def counted_by_ours(_: Any) -> dict[str, int]:
    """The counters of our connector's worker. Called by vLLM, with its worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group()._worker.cache.stats())


def measure_plain(engine: Engine, part: Part, tokens: int, runs: int) -> None:
    """Recompute and hits in HBM."""
    size, prompt = part.sizes[str(tokens)], engine.prompt(tokens)
    for _ in range(runs):
        engine.drop()
        size.cold_s.append(engine.ask(prompt, 1)[0])
        warm_s, cached, _ = engine.ask(prompt, 1)
        size.warm_s.append(warm_s)
        size.cached.append(cached)
    engine.drop()
    size.said = [engine.ask(prompt, SAID_TOKENS)[2] for _ in ("cold", "warm")]


def fill(engine: Engine, part: Part, tokens: int) -> None:
    """Computes a prompt until all of its prefix is kept, and looks at what a warm one says."""
    size, prompt = part.sizes[str(tokens)], engine.prompt(tokens)
    engine.drop()
    cold_s, _, size.said_cold = engine.ask(prompt, 1)
    size.cold_s.append(cold_s)
    for _ in range(FILL_TRIES):
        engine.drop()
        _, cached, said = engine.ask(prompt, SAID_TOKENS)
        if cached >= tokens:
            break
        time.sleep(1)
    print(f"{part.way}: {cached} of {tokens} tokens are kept", file=sys.stderr, flush=True)
    size.said.append(said)
    size.said_cached = cached


def measure_warm(engine: Engine, part: Part, tokens: int) -> None:
    """One warm run. How much of the prefix came from where it is kept goes with it."""
    size, prompt, ours = part.sizes[str(tokens)], engine.prompt(tokens), part.way in OURS
    engine.drop()
    before_s, late_before = engine.waited() if ours else (0.0, 0)
    warm_s, cached, _ = engine.ask(prompt, 1)
    size.warm_s.append(warm_s)
    size.cached.append(cached)
    if ours:
        engine.drop()  # A load says what was waited for when it has ended.
        after_s, late_after = engine.waited()
        size.bubble_s.append(after_s - before_s)
        size.layers_late.append(late_after - late_before)


def empty_memory(engine: Engine, node: Node) -> None:
    """Starts the node again, so that only its disk has anything, and waits until the engine has found it."""
    engine.drop()  # What is still to be stored would be, in the new memory.
    clients = node.figure("forebay_clients")
    node.restart()
    end = time.monotonic() + RECONNECT_LIMIT_S
    while node.figure("forebay_clients") < clients:
        if time.monotonic() > end:
            sys.exit(f"the engine has not found the restarted node in {RECONNECT_LIMIT_S:.0f} s")
        engine.drop()
        time.sleep(0.5)


def run_way(site: Site, way: str, sizes: list[int], runs: int, keep: Callable[[Part], None]) -> None:
    """One engine, with a node beside it if it needs one. What there is is kept after each step."""
    with vllm_engine.node_beside(site, way) as node:
        engine = Engine(site, way, max(sizes) + TAIL_TOKENS + SAID_TOKENS)
        part = Part(way, engine.version, engine.ready_s, {str(tokens): Size() for tokens in sizes})
        engine.ask(engine.prompt(WARM_UP_TOKENS), 2)  # Kernels are compiled by their first use.
        if way == "plain":
            for tokens in sizes:
                measure_plain(engine, part, tokens, runs)
                keep(part)
            return
        if way == "relay":
            engine.wait_for_relays()
        for tokens in sizes:
            fill(engine, part, tokens)
        disk = None
        if node is not None and way in FROM_DISK:
            engine.drop()
            node.wait_written(WRITE_LIMIT_S)
            disk = Disk(node.log)
        for run in range(runs):
            if node is not None and disk is not None:
                empty_memory(engine, node)
                engine.ask(engine.prompt(WARM_UP_TOKENS), 1)  # The engine gets the new memory ready.
            for tokens in sizes:
                if disk is None:
                    measure_warm(engine, part, tokens)
                else:
                    measure_from_disk(engine, part, tokens, disk, tokens * site.bytes_per_token, run % 2 == 0)
            keep(part)


def measure_from_disk(
    engine: Engine, part: Part, tokens: int, disk: "Disk", prefix_bytes: int, plain_first: bool
) -> None:
    """One warm run, and plain reads of as many bytes. A virtual disk may be fast for a while and slow after
    that: each gets the same rest before it, and comes first as often as the other.
    """
    for plain in (plain_first, not plain_first):
        engine.drop()
        time.sleep(DISK_REST_S)
        if plain:
            part.sizes[str(tokens)].disk_bytes_s.append(disk.rate(prefix_bytes))
        else:
            measure_warm(engine, part, tokens)


class Disk:
    """Plain reads of a log past the page cache, 16 of up to 4 MiB at a time, each behind the last ones."""

    UNIT, AT_A_TIME = 4 << 20, 16

    def __init__(self, file: Path) -> None:
        """Of what is written now. Reading what a log has set aside and not written costs a disk nothing."""
        self.file, self.at = file, 0
        self.parts = [
            (offset, min(self.UNIT, end - offset))
            for start, end in written(file)
            for offset in range(start, end, self.UNIT)
        ]

    def rate(self, wanted: int) -> float:
        """Bytes per second of as much as is wanted, or of all that there is."""
        import mmap
        from concurrent.futures import ThreadPoolExecutor

        ahead, these = self.parts[self.at :] + self.parts[: self.at], []
        while len(these) < len(ahead) and sum(length for _, length in these) < wanted:
            these.append(ahead[len(these)])
        self.at = (self.at + len(these)) % len(self.parts)
        handle = os.open(self.file, os.O_RDONLY | os.O_DIRECT)

        def read(worker: int) -> int:
            page = memoryview(mmap.mmap(-1, self.UNIT))
            mine = these[worker :: self.AT_A_TIME]
            return sum(os.preadv(handle, [page[:length]], offset) for offset, length in mine)

        begun = time.perf_counter()
        try:
            with ThreadPoolExecutor(self.AT_A_TIME) as threads:
                read_bytes = sum(threads.map(read, range(self.AT_A_TIME)))
                return read_bytes / (time.perf_counter() - begun)
        finally:
            os.close(handle)


def written(file: Path) -> Iterator[tuple[int, int]]:
    """The stretches of a file that were written, in whole pages."""
    with file.open("rb") as opened:
        end = 0
        while True:
            try:
                start = os.lseek(opened.fileno(), end, os.SEEK_DATA)
            except OSError:  # There is none behind it.
                return
            end = os.lseek(opened.fileno(), start, os.SEEK_HOLE)
            yield start, end


def run_links(tiny: bool) -> dict[str, Any]:
    """Pinned memory to GPU 0, and to all GPUs at once, in bytes per second; on a CPU, a copy of memory."""
    import torch

    count, chunk = (1, 64 << 20) if tiny else (torch.cuda.device_count(), GIB)
    wait = (lambda gpu: None) if tiny else torch.cuda.synchronize
    places = ["cpu"] if tiny else [f"cuda:{gpu}" for gpu in range(count)]
    host = [torch.zeros(chunk, dtype=torch.uint8, pin_memory=not tiny) for _ in places]
    device = [torch.zeros(chunk, dtype=torch.uint8, device=place) for place in places]

    def rate(gpus: range) -> float:
        for gpu in gpus:
            wait(gpu)
        begun = time.perf_counter()
        for _ in range(8):
            for gpu in gpus:
                device[gpu].copy_(host[gpu], non_blocking=True)
        for gpu in gpus:
            wait(gpu)
        return 8 * len(gpus) * chunk / (time.perf_counter() - begun)

    names = [] if tiny else [torch.cuda.get_device_name(gpu) for gpu in range(count)]
    one, every = (max(rate(gpus) for _ in range(LINK_RUNS)) for gpus in (range(1), range(count)))
    return {"gpus": names, "one": one, "all": every}


def links_apart(folder: Path, tiny: bool) -> dict[str, Any]:
    """The same, measured by a process of its own, which leaves nothing on the GPU."""
    command = [sys.executable, __file__, str(folder), "--part", "links", *(["--tiny"] if tiny else [])]
    subprocess.run(command, check=True)
    return dict(json.loads((folder / "links.json").read_text()))


def label(tokens: int) -> str:
    """How a size is called in the names of rows."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@dataclass
class Found:
    """Everything that the parts of one folder say."""

    links: dict[str, Any]
    parts: dict[str, Part]
    bytes_per_token: int

    def warm(self, way: str, tokens: int) -> float:
        """The median of warm runs."""
        return statistics.median(self.parts[way].sizes[str(tokens)].warm_s)

    def has(self, way: str, tokens: int) -> bool:
        """Whether there is a figure."""
        part = self.parts.get(way)
        return part is not None and str(tokens) in part.sizes and bool(part.sizes[str(tokens)].warm_s)

    def loaded(self, way: str, tokens: int) -> bool:
        """Whether every warm run loaded something. If not, it was computed: nothing was restored."""
        return self.has(way, tokens) and min(self.parts[way].sizes[str(tokens)].cached) > 0

    def floor(self, way: str, tokens: int) -> float:
        """What it takes at best: the bytes over the links or from the disk, then what a hit in HBM takes."""
        disk = self.parts[way].sizes[str(tokens)].disk_bytes_s
        rate = statistics.median(disk) if disk else self.links["all" if way in ALL_LINKS else "one"]
        return tokens * self.bytes_per_token / rate + self.warm("plain", tokens)

    def sizes(self) -> list[int]:
        """All that vLLM alone was measured with: nothing can be said of others."""
        return [int(tokens) for tokens in self.parts["plain"].sizes if self.has("plain", int(tokens))]


def rows(found: Found) -> Iterator[dict[str, Any]]:
    """All rows, size by size."""
    for tokens in found.sizes():
        size, plain = found.parts["plain"].sizes[str(tokens)], label(tokens)
        yield row(f"vllm.ttft.recompute.{plain}", "s", size.cold_s)
        yield row(f"vllm.ttft.hbm.{plain}", "s", size.warm_s)
        for way in (*PEERS, *OURS):
            if found.has(way, tokens):
                yield ttft_row(found, way, tokens)
                if found.loaded(way, tokens):
                    yield restore_row(found, way, tokens)


def ttft_row(found: Found, way: str, tokens: int) -> dict[str, Any]:
    """Time to the first token of a warm prompt. Less is better, so a ratio of 1 is the best there can be."""
    size, plain = found.parts[way].sizes[str(tokens)], found.parts["plain"].sizes[str(tokens)]
    value, floor = found.warm(way, tokens), found.floor(way, tokens)
    more: dict[str, Any] = {
        "ceiling": floor,
        "ratio": value / floor,
        "x_recompute": value / statistics.median(plain.cold_s),
        "cold_s": statistics.median(size.cold_s),
        "loaded_tokens": min(size.cached),
    }
    if size.bubble_s:
        more["bubble_s"] = statistics.median(size.bubble_s)
        more["layers_late"] = statistics.median(size.layers_late)
    if way in OURS and found.has("offloading", tokens):
        peer = found.parts["offloading"]
        more["peer"] = {
            "name": PEERS["offloading"],
            "version": peer.version,
            "value": found.warm("offloading", tokens),
        }
    return row(f"vllm.ttft.{way}.{label(tokens)}", "s", size.warm_s, **more)


def restore_row(found: Found, way: str, tokens: int) -> dict[str, Any]:
    """KV bytes over the whole time to the first token."""
    moved = tokens * found.bytes_per_token / 1e9
    runs = [moved / seconds for seconds in found.parts[way].sizes[str(tokens)].warm_s]
    ceiling = moved / found.floor(way, tokens)
    name = f"vllm.restore_gbps.{label(tokens)}" + ("" if way == "memory" else f".{way}")
    return row(name, "GB/s", runs, ceiling=ceiling, ratio=statistics.median(runs) / ceiling)


def wrong_tokens(found: Found) -> list[str]:
    """What was said otherwise than by vLLM alone.

    That may say one thing cold and another warm: it computes a prompt in other pieces then. So does who loads
    a part of the prefix because computing the rest is no slower; that is told, and not compared. An engine
    whose kernels come from vLLM's cache of compiled ones may round otherwise than one that has just compiled
    them: if its first token was another one when there was nothing to load, it has to say that one again.
    """
    wrong = []
    for way, part in found.parts.items():
        for tokens, size in part.sizes.items():
            if size.said_cached not in (None, 0, int(tokens)):
                print(f"{way} {tokens}: {size.said_cached} were loaded, others computed: not compared")
                continue
            right = found.parts["plain"].sizes.get(tokens, Size()).said
            if size.said_cold and all(size.said_cold != plain[:1] for plain in right):
                print(f"{way} {tokens}: computes otherwise than vLLM alone, compared with what it said cold")
                right = [size.said_cold]
            others = (said for said in size.said if all(said[: len(one)] != one for one in right))
            wrong += [f"{way} {tokens}: {said}, not one of {right}" for said in others]
    return wrong


def read_parts(folder: Path, bytes_per_token: int) -> Found:
    """What there is in the folder."""
    parts = {}
    for way in WAYS:
        file = folder / f"{way}.json"
        if file.exists():
            said = json.loads(file.read_text())
            said["sizes"] = {tokens: Size(**size) for tokens, size in said["sizes"].items()}
            parts[way] = Part(**said)
    missing = [name for name in ("links", "plain") if not (folder / f"{name}.json").exists()]
    if missing:
        sys.exit(f"{folder} has no {' and no '.join(missing)}: measure that first")
    return Found(json.loads((folder / "links.json").read_text()), parts, bytes_per_token)


def curves(found: Found, way: str) -> list[vllm_plot.Curve]:
    """The lines of one panel: the best there could be, the peers, and ours. No peer reads from a disk."""

    def rate(other: str, seconds: Callable[[str, int], float]) -> list[tuple[int, float]]:
        gigabytes = found.bytes_per_token / 1e9
        return [(t, t * gigabytes / seconds(other, t)) for t in found.sizes() if found.loaded(other, t)]

    peers = [
        vllm_plot.Curve(name, colour, False, rate(peer, found.warm))
        for peer, name, colour in (
            ("offloading", PEERS["offloading"], "#6b7280"),
            ("simple", PEERS["simple"], "#9ca3af"),
        )
        if peer in found.parts and way not in FROM_DISK
    ]
    best = vllm_plot.Curve("bytes, then a hit in HBM", "#b45309", True, rate(way, found.floor))
    return [best, *peers, vllm_plot.Curve("Forebay", "#1d4ed8", False, rate(way, found.warm))]


def merge(folder: Path, site: Site) -> None:
    """Makes the results object and the picture; an error if anything was said wrongly."""
    found = read_parts(folder, site.bytes_per_token)
    made = vllm_engine.results("vllm_ttft", found.links["gpus"], None, list(rows(found)))
    (folder / "ttft.json").write_text(json.dumps(made, indent=2) + "\n")
    titles = {
        "memory": "from host memory, one link",
        "multipath": "over all links",
        "relay": "over all links, of which the engine sees one",
        "ssd-always": "from an SSD",
    }
    panels = [(title, curves(found, way)) for way, title in titles.items() if way in found.parts]
    (folder / "restore.svg").write_text(vllm_plot.svg(panels))
    print(f"{'row':<36} {'median':>8} {'min':>8} {'max':>8} {'ceiling':>8} {'ratio':>6} {'peer':>8}")
    for line in made["rows"]:
        figures = " ".join(f"{line[name]:>8.3f}" for name in ("value", "min", "max"))
        ceiling = f"{line['ceiling']:>8.3f} {line['ratio']:>6.2f}" if "ceiling" in line else ""
        peer = f"{line['peer']['value']:>8.3f}" if "peer" in line else ""
        print(f"{line['name']:<36} {figures} {ceiling} {peer}")
    wrong = wrong_tokens(found)
    if wrong:
        sys.exit("wrong tokens:\n" + "\n".join(wrong))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where parts and results go")
    parser.add_argument("--part", choices=("links", *WAYS), help="measure this part")
    parser.add_argument("--runs", type=int, default=3, help="of each figure (default 3)")
    parser.add_argument("--sizes", type=int, nargs="+", help="tokens of prompts, multiples of 256")
    parser.add_argument("--memory-gib", type=float, help="host memory for KV (default 40; 24 before an SSD)")
    parser.add_argument("--scratch", type=Path, help="where the log on an SSD lies (default: in FOLDER)")
    parser.add_argument(
        "--chunk-tokens", type=int, default=CHUNK_TOKENS, help="of ours (default: as the connector)"
    )
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    sizes = args.sizes or (TINY_SIZES if args.tiny else SIZES)
    if args.runs < 1 or any(tokens % 256 or tokens < 256 for tokens in sizes):
        parser.error(
            f"--runs {args.runs} --sizes {sizes}: allowed are 1 run and more, and multiples of 256 tokens"
        )
    memory_gib = args.memory_gib or (0.25 if args.tiny else 24 if args.part in FROM_DISK else 40)
    folder = args.folder.absolute()
    scratch = (args.scratch or folder / "scratch").absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    site = Site(
        scratch,
        args.tiny,
        int(memory_gib * GIB),
        GIB if args.tiny else 48 * GIB,
        vllm_engine.program(args.forebay) if args.part in OURS else "",
        args.chunk_tokens,
    )
    if args.part is None:
        merge(folder, site)
        return
    out = folder / f"{args.part}.json"
    if args.part == "links":
        out.write_text(json.dumps(run_links(args.tiny)))
        return
    vllm_engine.in_environment(site.environment(args.part) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    run_way(site, args.part, sizes, args.runs, lambda part: keep(out, part))


def keep(file: Path, part: Part) -> None:
    """Writes what there is."""
    file.write_text(json.dumps(asdict(part)))


if __name__ == "__main__":
    main()
