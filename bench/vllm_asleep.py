#!/usr/bin/env python3
"""What KV is there after vLLM has slept: in the node, and in HBM where it is to be kept.

    bench/vllm_asleep.py FOLDER      `bench/vllm.sh FOLDER asleep` runs it

One engine with our connector and our sleep mode. It sleeps as soon as a prompt was answered, while what was
computed is still being stored, and again with KV kept. What it says afterwards must be what it said before;
the time to it and the tokens that were not computed are written to asleep.json. Needs a GPU. Knows vLLM's
calls of sleep mode; how engines and nodes are started is `vllm_engine`'s affair.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_engine import GIB, Site
from vllm_ttft import SAID_TOKENS, Engine

TOKENS = 32768
WORKER = "forebay.vllm.worker.Worker"


def engine(site: Site) -> Engine:
    """Sleeps, and goes on with what the node has: its weights never change."""
    plain = vllm_engine.engine_arguments

    def sleeping(site: Site, way: str, most_tokens: int) -> dict[str, Any]:
        arguments = plain(site, way, most_tokens)
        # All that is there is loaded, also a last chunk that is computed as soon.
        own = {"keep_on_reset": True, "gate": False}
        arguments["kv_transfer_config"]["kv_connector_extra_config"] |= own
        # StoreResult KV takes as much pinned memory.
        return arguments | {
            "enable_sleep_mode": True,
            "worker_cls": WORKER,
            "num_gpu_blocks_override": 4 * TOKENS // site.block_tokens,
        }

    vllm_engine.engine_arguments = sleeping
    return Engine(site, "memory", TOKENS + 64)


def ask(asked: Engine, prompt: list[int]) -> dict[str, Any]:
    """Seconds, tokens that were not computed, and what was said."""
    seconds, cached, said = asked.ask(prompt, SAID_TOKENS)
    return {"seconds": seconds, "cached": cached, "said": said}


def exercise(one: Engine) -> dict[str, Any]:
    """Both kinds of sleep."""
    prompt, llm = one.prompt(TOKENS), one.llm
    found = {"cold": ask(one, prompt)}
    llm.sleep(level=1)
    llm.wake_up()
    found["after sleep, from the node"] = ask(one, prompt)
    found["from HBM"] = ask(one, prompt)
    llm.sleep(level=0, mode="keep")
    llm.collective_rpc("sleep")
    llm.collective_rpc("wake_up")
    llm.wake_up(tags=["scheduling"])
    found["after sleep with KV kept, from HBM"] = ask(one, prompt)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the result goes")
    parser.add_argument("--scratch", type=Path, help="for the model and the socket (default: in FOLDER)")
    parser.add_argument("--forebay", help="the forebay program")
    args = parser.parse_args()
    scratch = (args.scratch or args.folder / "scratch").absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    site = Site(scratch, False, 16 * GIB, 0, vllm_engine.program(args.forebay))
    # The engine has a process of its own, as in servers: it takes steps until all is stored, then
    # it sleeps.
    own = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "FOREBAY_SLEEP_KEEP_KV": "1"}
    vllm_engine.in_environment(site.environment("memory") | own)
    with vllm_engine.node_beside(site, "memory"):
        found = exercise(engine(site))
    (args.folder / "asleep.json").write_text(json.dumps(found, indent=1))
    for name, answer in found.items():
        print(f"{name:<36} {answer['seconds']:.3f} s, {answer['cached']} of {TOKENS} tokens not computed")
    wrong = [name for name, answer in found.items() if answer["said"] != found["cold"]["said"]]
    short = [name for name, answer in found.items() if name != "cold" and answer["cached"] < TOKENS]
    if wrong or short:
        sys.exit(f"other tokens than before: {wrong}; computed again: {short}")


if __name__ == "__main__":
    main()
