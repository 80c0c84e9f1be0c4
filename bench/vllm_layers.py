#!/usr/bin/env python3
"""What a prefix takes to come layer by layer while layers before it compute: pages as vLLM has, no vLLM.

    bench/vllm_layers.py FOLDER [--tokens 1024 8192 32768] [--beside 1 64 192] [--runs N] [--way WAY]

A step loads a prefix and computes a few tokens behind it: each layer's matrix products stand in the stream
behind the wait for that layer's pages, as in vLLM. Without the engine around them a run takes milliseconds,
so that what an engine's copies are waited for can be told from what else a first token takes. The ceiling is
the longer one of the bytes over the links of all GPUs that are visible and the computing, and of the
shorter one what one layer has: the first layer must be there before anything is computed, or the last one
computed behind all bytes. With `--way multipath` (the default) this process sees all GPUs, with `memory` one,
and with `relay` one beside a node that relays over all of them. Knows `forebay.PagedCache` and torch; must
never know an engine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import vllm_engine
from vllm_engine import BF16_BYTES, BLOCK_TOKENS, CHUNK_TOKENS, GIB, Site, row

import forebay

if TYPE_CHECKING:
    import torch

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
TINY_SIZES = (256, 1024)
BESIDE = (1, 64, 192)
WAYS = ("memory", "multipath", "relay")
Verifier = Literal["gpu", "host", "both"]
LIMIT_S = 60.0
LINK_BYTES = 256 << 20
LINK_RUNS = 9
NAMESPACE: dict[str, Any] = {
    "weights": bytes(32),
    "dtype": "bfloat16",
    "order": "HND",
    "block_tokens": BLOCK_TOKENS,
    "tp": (0, 1),
    "pp": (0, 1),
    "attention": {},
    "lora": None,
    "salt": b"",
}


class Pages:
    """Layers of KV in pages, and the cache that moves them."""

    def __init__(
        self, site: Site, device: "torch.device", tokens: int, verify: Verifier | None = None
    ) -> None:
        """Room for one prefix, in blocks that lie anywhere."""
        import torch

        model, self.device = site.model, device
        self.heads, self.layers = model["num_key_value_heads"], model["num_hidden_layers"]
        blocks = tokens // BLOCK_TOKENS
        shape = (self.layers, blocks, self.heads, BLOCK_TOKENS, 2 * model["head_dim"])
        self.kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        page_bytes = self.kv[0, 0].numel() * BF16_BYTES
        self.cache = forebay.PagedCache(
            str(site.socket),
            [(layer.data_ptr(), blocks, page_bytes, page_bytes, 0) for layer in self.kv],
            page_tokens=[BLOCK_TOKENS],
            chunk_tokens=site.chunk_tokens,
            heads=[self.heads],
            device=device.index if device.type == "cuda" else None,
            verify=verify,
        )
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self.job = 0

    def wait(self) -> None:
        """Until the GPU has done all."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_for_relays(self) -> None:
        """Until the node has pinned its memory, and its GPUs relay for this process."""
        end = time.monotonic() + LIMIT_S
        while not self.cache.stats()["relays"]:
            if time.monotonic() > end:
                sys.exit(f"no GPU of the node relays {LIMIT_S:.0f} s after the start")
            time.sleep(0.2)

    def blocks(self, tokens: int) -> Any:
        """The pages of a prefix."""
        return self.order[: tokens // BLOCK_TOKENS].numpy()

    def draw(self) -> None:
        """Fills all pages anew."""
        self.kv.normal_()
        self.wait()

    def store(self, ids: list[bytes], tokens: int) -> None:
        """Has the node keep a prefix."""
        chunk_tokens = tokens // len(ids)
        for at in range(0, len(ids), 64):  # A cache refuses what is beyond its share of bytes under way.
            self.job += 1
            chunks = [
                (ids[n], ids[n - 1] if n else None, chunk_tokens) for n in range(at, min(at + 64, len(ids)))
            ]
            per = chunk_tokens // BLOCK_TOKENS
            pages = self.blocks(tokens)[at * per : (at + 64) * per]
            self.cache.store(self.job, [chunks], [pages], stream=self.stream)
            if not self.cache.wait_stored([self.job], LIMIT_S):
                sys.exit(f"chunks were not stored in {LIMIT_S:.0f} s")
            if (ended := self.cache.take_ended()[1]) != [(self.job, [])]:
                sys.exit(f"not all chunks were stored: {ended}")

    def load(self, ids: list[bytes], tokens: int, compute: Callable[[], None] | None) -> float:
        """A step: seconds until all of it has come, and all is computed if anything is."""
        self.job += 1
        self.wait()
        begun, layerwise = time.perf_counter(), compute is not None
        self.cache.load(
            self.job,
            [(ids, 0, 0, self.heads)],
            [self.blocks(tokens)],
            tokens=tokens,
            layerwise=layerwise,
            stream=self.stream,
        )
        if compute is not None:
            for layer in range(self.layers):
                self.cache.wait_layer(layer, self.stream)
                compute()
        self.cache.wait_loaded([self.job], LIMIT_S)
        self.wait()
        took_s = time.perf_counter() - begun
        if (ended := self.cache.take_ended()[0]) != [(self.job, tokens, None)]:
            sys.exit(f"not all of {tokens} tokens were loaded: {ended}")
        return took_s


class Layer:
    """The matrix products of one layer for some tokens."""

    def __init__(self, site: Site, device: "torch.device", tokens: int) -> None:
        """Weights are read anew by each: no cache holds a layer of the large model."""
        import torch

        model = site.model
        hidden, inner = model["hidden_size"], model["intermediate_size"]
        heads = model["num_attention_heads"] + 2 * model["num_key_value_heads"]
        shapes = [(hidden, heads * model["head_dim"]), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
        dtype = torch.bfloat16
        self.weights = [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]
        self.inputs = [torch.ones((tokens, rows), dtype=dtype, device=device) for rows, _ in shapes]

    def __call__(self) -> None:
        """Submits them."""
        for given, weight in zip(self.inputs, self.weights, strict=True):
            given @ weight


@dataclass
class Host:
    """What the hardware does by itself."""

    link: float  # Bytes per second of pinned memory, over the links of all GPUs that are visible.
    gpus: list[str]


def host(device: "torch.device") -> Host:
    """Pinned memory to all GPUs at once, the best of some; on a CPU, a copy of memory."""
    import torch

    on_gpu = device.type == "cuda"
    places = [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())] if on_gpu else ["cpu"]
    here = [torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in places]
    there = [torch.zeros(LINK_BYTES, dtype=torch.uint8, device=place) for place in places]

    def rate() -> float:
        begun = time.perf_counter()
        for to, source in zip(there, here, strict=True):
            to.copy_(source, non_blocking=True)
        for place in places if on_gpu else ():
            torch.cuda.synchronize(place)
        return len(places) * LINK_BYTES / (time.perf_counter() - begun)

    best = max(rate() for _ in range(LINK_RUNS))
    return Host(best, [torch.cuda.get_device_name(place) for place in places] if on_gpu else [])


def measure(site: Site, way: str, sizes: list[int], beside: list[int], runs: int) -> dict[str, Any]:
    """All rows, in one process with a node beside it."""
    os.environ.update(site.environment(way))  # Before anybody looks how many GPUs there are.
    import torch

    device = torch.device("cpu") if site.tiny else torch.device("cuda", 0)
    known = host(device)
    with vllm_engine.node_beside(site, way):
        pages = Pages(site, device, max(sizes))
        if way == "relay":
            pages.wait_for_relays()
        rows = [line for tokens in sizes for line in of_prefix(site, pages, known, tokens, beside, runs)]
        pages.cache.close()
    return vllm_engine.results("vllm_layers", known.gpus, None, rows)


def of_prefix(
    site: Site, pages: Pages, known: Host, tokens: int, beside: list[int], runs: int
) -> Iterator[dict[str, Any]]:
    """The rows of one length."""
    key = forebay.namespace_key(NAMESPACE | {"salt": str(tokens).encode()})
    ids = forebay.chunk_ids(key, list(range(tokens)), site.chunk_tokens)
    pages.draw()
    pages.store(ids, tokens)
    kept = pages.kv[:, pages.order[: tokens // BLOCK_TOKENS].long()].clone()
    link_s = tokens * site.bytes_per_token / known.link
    for new in (None, *beside):
        layer = None if new is None else Layer(site, pages.device, new)
        pages.kv.zero_()
        pages.load(ids, tokens, layer)
        if not (pages.kv[:, pages.order[: tokens // BLOCK_TOKENS].long()] == kept).all():
            sys.exit(f"the pages of {tokens} tokens are not those that were stored")
        alone_s = 0.0 if layer is None else min(computing(pages, layer) for _ in range(runs))
        took_ms = [1e3 * pages.load(ids, tokens, layer) for _ in range(runs)]
        ceiling_ms = 1e3 * (max(link_s, alone_s) + min(link_s, alone_s) / pages.layers)
        name = "background" if new is None else f"beside_{new}"
        line = row(f"layers.load_ms.{tokens}.{name}", "ms", took_ms)
        line |= {"ceiling": ceiling_ms, "ratio": line["value"] / ceiling_ms, "computing_ms": 1e3 * alone_s}
        print(
            f"{line['name']:<40} {line['value']:9.3f} {line['unit']} {line['min']:9.3f} to {line['max']:9.3f}"
            f"  ceiling {ceiling_ms:9.3f} ratio {line['ratio']:.2f}  computing alone {1e3 * alone_s:.3f}",
            flush=True,
        )
        yield line


def computing(pages: Pages, layer: Layer) -> float:
    """Seconds that the layers compute without a load."""
    pages.wait()
    begun = time.perf_counter()
    for _ in range(pages.layers):
        layer()
    pages.wait()
    return time.perf_counter() - begun


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where layers.json goes")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prefixes, multiples of the chunk")
    parser.add_argument("--beside", type=int, nargs="+", default=BESIDE, help="tokens that are computed")
    parser.add_argument("--runs", type=int, default=15, help="of each figure (default 15)")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="default: as the connector")
    parser.add_argument("--way", choices=WAYS, default="multipath", help="whose links (default multipath)")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with a few MB")
    args = parser.parse_args()
    sizes = args.tokens or list(TINY_SIZES if args.tiny else SIZES)
    if args.runs < 1 or any(tokens < 1 or tokens % args.chunk_tokens for tokens in sizes):
        parser.error(f"--runs {args.runs} --tokens {sizes}: allowed are 1 run and more, and whole chunks")
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    memory = GIB // 4 if args.tiny else 12 * GIB
    site = Site(folder, args.tiny, memory, 0, vllm_engine.program(args.forebay), args.chunk_tokens)
    made = measure(site, args.way, sizes, list(args.beside), args.runs)
    (folder / "layers.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
