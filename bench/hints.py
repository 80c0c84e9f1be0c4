"""How long the engine's thread of vLLM is busy with a request's hints: `docs/hints.md`.

    .venv-vllm/bin/python bench/hints.py bench/results/hints.json

It needs vLLM, and no node: what the node does is not waited for.
"""

import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay.vllm.connector.hints import Hints
from forebay.vllm.connector.load_or_compute import CostModel
from forebay.vllm.connector.stats import Counts
from forebay.vllm.connector.tenants import Tenants

REQUESTS = 2000
ROUNDS = 9
CASES = {
    "none": None,
    "pin": [("kv.pin", {"ttl_ms": 60_000})],
    "three": [("kv.pin", {"ttl_ms": 60_000}), ("kv.demote", {}), ("kv.prefetch", {"back_in_ms": 30_000})],
    "malformed": [("kv.pin", {"ttl_ms": -1})],
}


class Silent:
    """A node that does nothing."""

    def __getattr__(self, verb: str) -> Any:
        return lambda ids, **more: []


def params(actions: list[tuple[str, dict[str, Any]]] | None) -> dict[str, Any] | None:
    """What comes with a request."""
    if actions is None:
        return None
    said = [
        {"action_id": name, "action_type": name, "action_version": "1.0", "payload": payload}
        for name, payload in actions
    ]
    return {"kv_hint": {"protocol_version": "0.1", "message_id": "one", "actions": said}}


def round_of(case: list[tuple[str, dict[str, Any]]] | None) -> list[float]:
    """Microseconds of each request, from its coming to the answers."""
    facts: Any = SimpleNamespace(chunk_tokens=64, chunk_bytes=8 << 20, layers=32, has_states=False)
    node: Any = Silent()
    hints, took = Hints(node, facts, Counts(), "any", Tenants(0, {}), CostModel(facts, None)), []
    for number in range(-1, REQUESTS):
        name = str(number)
        # The first one starts the thread that talks to the node, once for an engine.
        request: Any = SimpleNamespace(
            request_id=name,
            num_computed_tokens=4096,
            kv_hints=None,
            kv_transfer_params=params(CASES["pin"] if number < 0 else case),
        )
        # Its stores never end here, so that what is measured is this thread alone.
        tracked: Any = SimpleNamespace(
            name=name, stores={1}, is_stored=False, ids=SimpleNamespace(ranks=[[]]), request=request
        )
        before = time.perf_counter_ns()
        hints.added(request)
        hints.shared_tokens(name)
        hints.tracked(tracked)
        hints.finished(name)
        if number >= 0:
            took.append((time.perf_counter_ns() - before) / 1000)
        with hints.executor.changed:
            hints.executor.waiting.clear()
    hints.close()
    return took


def main() -> None:
    """Measures all cases, one after the other."""
    rows = []
    for name, case in CASES.items():
        rounds = [sorted(round_of(case)) for _ in range(ROUNDS)]
        middles = [statistics.median(took) for took in rounds]
        ends = [took[int(len(took) * 0.99)] for took in rounds]
        for what, values in (("p50", middles), ("p99", ends)):
            rows.append(
                {
                    "name": f"hints.thread_us.{name}.{what}",
                    "unit": "us",
                    "value": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                    "runs": ROUNDS,
                    "target": 50,
                }
            )
            spread = f"{min(values):.2f} to {max(values):.2f}"
            print(f"hints.thread_us.{name}.{what:10} {statistics.median(values):8.2f} us ({spread})")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = {"bench": "hints", "commit": commit[:12], "date": date, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
