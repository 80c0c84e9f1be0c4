#!/usr/bin/env python3
"""Which models' KV the connector takes, and whether all bytes of it come back.

    bench/vllm_models.py --json FILE

With a vLLM from 0.33 on, by the Python that has it and forebay. For each model vLLM makes the layout that it
would make on GPUs; `tests/vllm/layouts` has how. Each is run on one rank and on two: a prompt is stored and
loaded into other pages, handed over to its last token, loaded from a disk after the node has restarted,
loaded while one byte of it has changed, and while the node dies. Counted are the bytes that the model's
attention would read then, and which of them are wrong; and the bytes that are stored for a token of whole
chunks, beside those that a later token reads, which is what it must be.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_engine import results, row

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "vllm"), str(TESTS)]
WAYS = ("stored", "handed_over", "from_disk", "spoiled", "node_dies")


def measure(name: str, tp: int) -> dict[str, Any]:
    """One model on so many ranks."""
    from layouts.runs import house

    with tempfile.TemporaryDirectory() as folder, house(name, tp, Path(folder)) as made:
        before = made.bytes_stored()
        came = {"stored": made.stored()}
        now, kept, tokens = made.bytes_stored(), made.kept_bytes(), made.chunks * made.here.chunk
        came |= {way: getattr(made, way)() for way in WAYS[1:]}
        return {
            "compared": sum(one.compared for one in came.values()),
            "wrong": sum(one.wrong for one in came.values()) + made.free_blocks()[1],
            "loaded": {way: one.loaded for way, one in came.items()},
            # States are of one token, at the ends of chunks.
            "stored": (now[0] - before[0]) / tokens,
            "kept": kept[0] / made.here.chunk,
            "state": kept[1],
            "chunk": made.here.chunk,
            "layout": made.here.kv_configs[0].kv_cache_layout,
            "groups": len(made.here.kv_configs[0].kv_cache_groups),
        }


def rows_of(name: str, found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one model, by ranks."""
    key, rows = f"models.bytes.{name}", []
    for tp, one in found.items():
        at, stored, kept = f"{key}.tp{tp}", one["stored"], one["kept"]
        rows += [
            row(f"{at}.wrong_bytes", "B", [one["wrong"]]),
            row(f"{at}.compared_bytes", "B", [one["compared"]]),
            row(f"{at}.stored_bytes_per_token", "B", [stored], ceiling=kept, ratio=stored / kept),
            row(f"{at}.state_bytes", "B", [one["state"]]),
            row(f"{at}.chunk_tokens", "tokens", [one["chunk"]]),
        ]
        rows += [row(f"{at}.loaded_tokens.{way}", "tokens", [count]) for way, count in one["loaded"].items()]
    return [row(f"{key}.accepted", "models", [1.0]), *rows]


def main() -> None:
    """Measures what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("models", nargs="*", help="these alone")
    given = parser.parse_args()
    from layouts.models import MODELS

    from forebay.errors import InvalidError

    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    accepted = wrong = 0
    for model in MODELS:
        if given.models and model.name not in given.models:
            continue
        began = time.monotonic()
        try:
            found = {tp: measure(model.name, tp) for tp in (1, 2)}
        except InvalidError as error:
            refused[model.name] = str(error)
            rows.append(row(f"models.bytes.{model.name}.accepted", "models", [0.0], reason=str(error)))
            print(f"{model.name}: refused: {error}", flush=True)
            continue
        accepted += 1
        wrong += sum(one["wrong"] for one in found.values())
        rows += rows_of(model.name, found)
        print(f"{model.name}: {found}, {time.monotonic() - began:.1f} s", flush=True)
    rows += [
        row("models.bytes.accepted", "models", [float(accepted)]),
        row("models.bytes.refused", "models", [float(len(refused))]),
        row("models.bytes.wrong_bytes", "B", [float(wrong)]),
    ]
    given.json.write_text(json.dumps(results("vllm_models", [], None, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
