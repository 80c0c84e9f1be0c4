#!/usr/bin/env python3
"""Time to the first token, and what the GPU waits, by the share of a prompt that comes from an SSD.

    bench/vllm_crossover.py FOLDER [--tokens 8192 32768 131072] [--rounds N]

A prompt is a prefix that is on the disk and new tokens behind it. The prefix is loaded layer by layer while
the new tokens are computed. Up to some share that hides the load, but for its first layer; behind it the GPU
waits. That share is the crossover. It is predicted by `ssd_formulas`, of the rate of plain reads and of what
computing costs, both of this run, and measured: where the wait begins to grow. Shares around it are tried.
Before each one the node is started again, so that its memory is empty. Knows what is asked, and how rows are
made of it; engines and nodes are started by `vllm_engine`.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine
from ssd_formulas import Costs
from vllm_engine import CHUNK_TOKENS, GIB, Node, Site, row
from vllm_ttft import (
    SAID_TOKENS,
    TAIL_TOKENS,
    WARM_UP_TOKENS,
    WRITE_LIMIT_S,
    Disk,
    Engine,
    empty_memory,
    label,
)

SIZES = (8 << 10, 32 << 10, 128 << 10)
TINY_SIZES = (1 << 10, 2 << 10)
AROUND = (0.4, 0.7, 0.9, 1.0, 1.06, 1.15)  # Of the predicted crossover.
WAY = "ssd-always"
HIDDEN_LAYERS = 3  # A load hides that is waited for no longer than so many times what its first layer takes.
BEND_TOKENS = 16  # How closely the crossover is looked for.
OFFERS = 2
PLAIN_BYTES = 2 << 30  # At most, in turns with a load.


@dataclass
class Share:
    """One prefix of a prompt. Times in seconds, in order."""

    prefix: int
    ttft_s: list[float] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)  # The same with the prefix in HBM.
    bubble_s: list[float] = field(default_factory=list)
    layers_late: list[int] = field(default_factory=list)
    layerwise: bool = True  # All loads came layer by layer while the step computed.


@dataclass
class Length:
    """Prompts of one length."""

    tokens: int
    cold_s: list[float] = field(default_factory=list)
    whole: Share = field(default_factory=lambda: Share(0))
    shares: list[Share] = field(default_factory=list)
    disk_bytes_s: list[float] = field(default_factory=list)  # Plain reads, in turns with loads.

    @property
    def tried(self) -> list[Share]:
        """Those that were loaded already, the shortest first."""
        return sorted((share for share in self.shares if share.ttft_s), key=lambda one: one.prefix)

    @property
    def layerwise(self) -> list[Share]:
        """Those of them that came while the step computed."""
        return [share for share in self.tried if share.layerwise]

    @property
    def plain_rate(self) -> float:
        """Bytes per second of plain reads."""
        return statistics.median(self.disk_bytes_s)

    def rate(self, site: Site) -> float:
        """Bytes per second of a whole load: what its first token took, less what a hit in HBM takes."""
        ttft_s, hit_s = (statistics.median(runs) for runs in (self.whole.ttft_s, self.whole.computing_s))
        spent_s = ttft_s - hit_s if ttft_s > hit_s else ttft_s
        return self.whole.prefix * site.bytes_per_token / spent_s

    def first_layer_s(self, site: Site, share: Share) -> float:
        """What one layer of a prefix takes from the disk, at the rate of plain reads."""
        layer = share.prefix * site.bytes_per_token / site.model["num_hidden_layers"]
        return layer / self.plain_rate


class Prompts:
    """One prefix for each length, and tails that nobody has asked for before."""

    def __init__(self, vocabulary: int) -> None:
        self.tokens, self.fresh = range(3, vocabulary), random.Random("tails")

    def ask(self, tokens: int, prefix: int) -> list[int]:
        """So many tokens, of which a prefix is that of this length; a few more if all are."""
        known = random.Random(tokens).choices(self.tokens, k=prefix)
        return known + self.fresh.choices(self.tokens, k=max(TAIL_TOKENS, tokens - prefix))


def count_layers(_: Any) -> None:
    """Has waits for layers of a load counted. Called by vLLM, with its worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    here = get_kv_transfer_group()._worker
    inner, here.waits = here.wait_for_layer, 0

    def wait_for_layer(name: str) -> None:
        here.waits += bool(here.layerwise)
        inner(name)

    here.wait_for_layer = wait_for_layer


def counted_layers(_: Any) -> int:
    """How many there were. Called by vLLM, with its worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return int(get_kv_transfer_group()._worker.waits)


class Run:
    """One engine beside a node with a disk."""

    def __init__(self, site: Site, node: Node, most_tokens: int) -> None:
        self.site, self.node = site, node
        self.engine = Engine(site, WAY, most_tokens + TAIL_TOKENS + SAID_TOKENS)
        self.prompts = Prompts(self.engine.vocabulary)
        self.engine.llm.collective_rpc(count_layers)
        self.engine.ask(self.engine.prompt(WARM_UP_TOKENS), 2)  # Kernels are compiled by their first use.

    def store(self, lengths: list[Length]) -> Disk:
        """Computes each prompt, so that it is on the disk."""
        for length in lengths:
            self.compute(length, length.tokens)
        for _ in range(OFFERS):
            self.engine.drop()
            self.node.wait_written(WRITE_LIMIT_S)
            # What waited too long for the disk is offered to it again when it is used.
            for length in lengths:
                self.engine.drop()
                self.engine.ask(self.prompts.ask(length.tokens, length.tokens), 1)
        self.engine.drop()
        self.node.wait_written(WRITE_LIMIT_S)
        # From its next start on, nothing is written that nobody has asked for again.
        said = self.node.config.read_text()
        self.node.config.write_text(said.replace('write_back = "all"', 'write_back = "second-hit"'))
        return Disk(self.node.log)

    def compute(self, length: Length, prefix: int = 0) -> None:
        """One cold run, of a prompt that is not known or of the one that is stored."""
        self.engine.drop()
        length.cold_s.append(self.engine.ask(self.prompts.ask(length.tokens, prefix), 1)[0])

    def from_disk(self, these: list[tuple[Length, Share]], disk: Disk) -> None:
        """One warm run of a share of each length, and plain reads of as many bytes."""
        empty_memory(self.engine, self.node)
        self.engine.ask(self.engine.prompt(WARM_UP_TOKENS), 1)  # The engine gets the new memory ready.
        for length, share in these:
            plain_bytes = min(share.prefix * self.site.bytes_per_token, PLAIN_BYTES)
            length.disk_bytes_s.append(disk.rate(plain_bytes))
            self.measure(length.tokens, share)

    def measure(self, tokens: int, share: Share) -> None:
        """One warm run, and the same with the prefix in HBM."""
        engine = self.engine
        engine.drop()
        before_s, late = engine.waited()
        (counted,) = engine.llm.collective_rpc(counted_layers)
        ttft_s, loaded, _ = engine.ask(self.prompts.ask(tokens, share.prefix), 1)
        (layers,) = engine.llm.collective_rpc(counted_layers)
        computing_s, in_hbm, _ = engine.ask(self.prompts.ask(tokens, share.prefix), 1)
        engine.drop()  # A load says what was waited for when it has ended.
        if min(loaded, in_hbm) < share.prefix:
            sys.exit(f"{tokens} tokens: {loaded} of {share.prefix} were loaded, {in_hbm} were in HBM")
        waited_s, late_then = engine.waited()
        share.ttft_s.append(ttft_s)
        share.computing_s.append(computing_s)
        share.bubble_s.append(waited_s - before_s)
        share.layers_late.append(late_then - late)
        share.layerwise &= layers > counted
        print(
            f"{tokens} tokens, {share.prefix} loaded: {ttft_s:.3f} s, computing {computing_s:.3f}, "
            f"waited {share.bubble_s[-1]:.3f} for {share.layers_late[-1]} of {layers - counted} layers",
            file=sys.stderr,
            flush=True,
        )


def measure_all(site: Site, lengths: list[Length], rounds: int, keep: Callable[[str], None]) -> None:
    """Stores prompts, loads them whole, and then shares of them."""
    with vllm_engine.node_beside(site, WAY) as node:
        assert node is not None
        run = Run(site, node, max(length.tokens for length in lengths))
        disk = run.store(lengths)
        for length in lengths:
            length.whole = Share(length.tokens)
        for _ in range(rounds):
            run.from_disk([(length, length.whole) for length in lengths], disk)
            for length in lengths:
                run.compute(length)
        found = costs(site, lengths)
        for length in lengths:
            predicted = found.crossover(length.tokens, length.plain_rate)
            # Two parts may be of as many chunks.
            prefixes = dict.fromkeys(chunks_of(length.tokens, predicted * part) for part in AROUND)
            length.shares = [Share(prefix) for prefix in prefixes]
        for _ in range(rounds):
            for shares in itertools.zip_longest(*(length.shares for length in lengths)):
                these = zip(lengths, shares, strict=True)
                run.from_disk([(length, share) for length, share in these if share], disk)
                keep(run.engine.version)


def chunks_of(tokens: int, share: float) -> int:
    """A share of a prompt in whole chunks: one at least, and not all of them."""
    chunks = min(max(1, round(tokens * share / CHUNK_TOKENS)), tokens // CHUNK_TOKENS - 1)
    return chunks * CHUNK_TOKENS


def costs(site: Site, lengths: list[Length]) -> Costs:
    """What computing takes, of cold prompts of the shortest and the longest length."""
    few, many = lengths[0], lengths[-1]
    per_token = [min(length.cold_s) / length.tokens for length in (few, many)]
    # Computing N tokens takes linear * N + pair * N^2 / 2.
    pair_s = 2 * (per_token[1] - per_token[0]) / (many.tokens - few.tokens) if few is not many else 0.0
    return Costs(per_token[0] - max(0.0, pair_s) * few.tokens / 2, max(0.0, pair_s), site.bytes_per_token)


def crossover(site: Site, length: Length) -> float | None:
    """The share behind which waits grow: a bend in the line through all of them.

    Up to there a wait is what the first layer takes, or a few times that, and behind it each token more adds
    to it. Of all places the one is taken that leaves the least squares. None if there is no such place.
    """
    waits = [
        (share.prefix, length.first_layer_s(site, share), bubble_s)
        for share in length.layerwise
        for bubble_s in share.bubble_s
    ]
    prefixes = sorted({prefix for prefix, _, _ in waits})
    if len(prefixes) < 3:
        return None
    places = range(prefixes[0], prefixes[-1], BEND_TOKENS)
    found = min((bend(waits, place), place) for place in places)
    is_within = prefixes[0] < found[1] < prefixes[-2] and found[0] < math.inf
    return found[1] / length.tokens if is_within else None


def bend(waits: list[tuple[int, float, float]], place: int) -> float:
    """The squares that are left with the bend at this place; infinite if waits do not grow behind it."""
    points = [(first_s, max(0, prefix - place), bubble_s) for prefix, first_s, bubble_s in waits]
    dot = lambda one, other: sum(point[one] * point[other] for point in points)  # noqa: E731
    determinant = dot(0, 0) * dot(1, 1) - dot(0, 1) ** 2
    if determinant <= 0:
        return math.inf
    layers = (dot(0, 2) * dot(1, 1) - dot(1, 2) * dot(0, 1)) / determinant
    growth = (dot(1, 2) * dot(0, 0) - dot(0, 2) * dot(0, 1)) / determinant
    if not 0 <= layers <= HIDDEN_LAYERS or growth <= 0:
        return math.inf
    return sum((layers * first_s + growth * behind - wait_s) ** 2 for first_s, behind, wait_s in points)


def rows(site: Site, lengths: list[Length]) -> Iterator[dict[str, Any]]:
    """All rows, length by length."""
    found = costs(site, lengths)
    for length in lengths:
        name = label(length.tokens)
        yield row(f"vllm.share.recompute_s.{name}", "s", length.cold_s)
        yield rate_row(site, length)
        for share in (*length.tried, length.whole):
            yield ttft_row(site, length, share)
        for share in length.layerwise:
            first_ms = 1e3 * length.first_layer_s(site, share)
            bubble_ms = [1e3 * one for one in share.bubble_s]
            line = row(f"vllm.bubble_ms.{name}.{share.prefix}", "ms", bubble_ms, ceiling=first_ms)
            yield line | {"ratio": line["value"] / first_ms, "layers_late": share.layers_late}
        measured, predicted = crossover(site, length), 100 * found.crossover(length.tokens, length.plain_rate)
        if measured is not None:
            line = row(f"vllm.crossover.{name}", "%", [100 * measured], predicted=predicted)
            yield line | {"predicted_minus_measured": predicted - line["value"]}


def rate_row(site: Site, length: Length) -> dict[str, Any]:
    """How fast a whole prefix came, beside plain reads."""
    value, ceiling = length.rate(site) / 1e9, length.plain_rate / 1e9
    name = f"vllm.share.load_gbps.{label(length.tokens)}"
    spread = {"ceiling_min": min(length.disk_bytes_s) / 1e9, "ceiling_max": max(length.disk_bytes_s) / 1e9}
    return row(name, "GB/s", [value], ceiling=ceiling, ratio=value / ceiling, **spread)


def ttft_row(site: Site, length: Length, share: Share) -> dict[str, Any]:
    """Time to the first token. At best the longer one of loading and computing, and a layer of the other."""
    load_s = share.prefix * site.bytes_per_token / length.plain_rate
    computing_s = statistics.median(share.computing_s)
    least_s = max(load_s, computing_s) + min(load_s, computing_s) / site.model["num_hidden_layers"]
    line = row(f"vllm.share.ttft_s.{label(length.tokens)}.{share.prefix}", "s", share.ttft_s, ceiling=least_s)
    recompute_s = statistics.median(length.cold_s)
    more = {"ratio": line["value"] / least_s, "x_recompute": line["value"] / recompute_s}
    about = {"share": share.prefix / length.tokens, "layerwise": share.layerwise}
    return line | more | {"computing_s": computing_s} | about


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where crossover.json goes")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prompts, multiples of a chunk, rising")
    parser.add_argument("--rounds", type=int, default=2, help="of each figure (default 2)")
    parser.add_argument("--memory-gib", type=float, help="host memory for KV (default 24)")
    parser.add_argument("--scratch", type=Path, help="where the log on an SSD lies (default: in FOLDER)")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    sizes = args.tokens or list(TINY_SIZES if args.tiny else SIZES)
    if (
        args.rounds < 1
        or sorted(set(sizes)) != sizes
        or any(size % CHUNK_TOKENS or size < 256 for size in sizes)
    ):
        parser.error(
            f"--rounds {args.rounds} --tokens {sizes}: allowed are 1 round and more, and rising multiples of "
            f"{CHUNK_TOKENS} tokens from 256 on"
        )
    folder = args.folder.absolute()
    scratch = (args.scratch or folder / "scratch").absolute()
    for made in (folder, scratch):
        made.mkdir(parents=True, exist_ok=True)
    memory = int((args.memory_gib or (0.25 if args.tiny else 24)) * GIB)
    disk = GIB if args.tiny else 48 * GIB
    site = Site(scratch, args.tiny, memory, disk, vllm_engine.program(args.forebay))
    vllm_engine.in_environment(site.environment(WAY) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    lengths = [Length(tokens) for tokens in sizes]

    def keep(version: str) -> None:
        made = vllm_engine.results("vllm_crossover", gpus(args.tiny), str(scratch), list(rows(site, lengths)))
        (folder / "crossover.json").write_text(json.dumps(made | {"vllm": version}, indent=2) + "\n")

    measure_all(site, lengths, args.rounds, keep)


def gpus(tiny: bool) -> list[str]:
    """The GPU's name."""
    import torch

    return [] if tiny else [torch.cuda.get_device_name(0)]


if __name__ == "__main__":
    main()
