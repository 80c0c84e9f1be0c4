"""`python -m forebay.vllm.profile`: measures how long a model computes new tokens behind a prefix.

The connector's setting `profile` names the file that this writes. With it the connector knows from
the first prompt on whether loading or computing is faster; else it learns that from requests.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forebay.errors import InvalidError

NEW_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192)
PREFIX_TOKENS = (0, 1024, 4096, 16384, 65536, 131072)
RUNS = 3
VERSION = 1  # Of the profile.
ANSWER_TOKENS = 1
TOKEN_MIN = 3  # Lower ids are often special.


class Timer:
    """An engine in this process, asked for one step at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(**arguments)
        config = self.llm.llm_engine.vllm_config
        # As the connector counts them: with pipeline stages, those of the first one.
        groups = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        self.layers = sum(len(group.layer_names) for group in groups)
        self.most_tokens = int(config.model_config.max_model_len)
        self.most_new = int(config.scheduler_config.max_num_batched_tokens)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.block_tokens = int(config.cache_config.block_size)
        self.sampling = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True, detokenize=False
        )
        self.random = random.Random(0)
        self.asked = 0

    def draw(self, tokens: int) -> list[int]:
        return self.random.choices(range(TOKEN_MIN, self.vocabulary), k=tokens)

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds that a prompt takes, and how many of its tokens were in the prefix cache."""
        engine, cached = self.llm.llm_engine, 0
        self.asked += 1
        engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, self.sampling)
        begun = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                cached = output.num_cached_tokens or 0
        return time.perf_counter() - begun, cached


def plan(most_tokens: int, most_new: int, block_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Prefixes of whole blocks, each longer than the last, and the steps to time behind each."""
    for prefix in PREFIX_TOKENS:
        whole = prefix // block_tokens * block_tokens
        steps = [new for new in NEW_TOKENS if new <= most_new and whole + new + ANSWER_TOKENS <= most_tokens]
        if steps:
            yield whole, steps


def times(timer: Timer) -> Iterator[tuple[int, int, float]]:
    """New tokens, prefix tokens and seconds of each timed step. The first run warms the kernels."""
    prefix: list[int] = []
    for length, steps in plan(timer.most_tokens, timer.most_new, timer.block_tokens):
        prefix += timer.draw(length - len(prefix))
        if prefix:
            timer.ask(prefix)
        for new in steps:
            for run in range(RUNS + 1):
                seconds, cached = timer.ask(prefix + timer.draw(new))
                if cached != length:
                    print(f"{new} behind {length}: {cached} were there, not timed", file=sys.stderr)
                elif run > 0:
                    yield new, length, seconds


def profile_of(layers: int, steps: Iterable[tuple[int, int, float]]) -> str:
    """The profile, with the median of steps that are alike."""
    alike: dict[tuple[int, int], list[float]] = {}
    for new, prefix, seconds in steps:
        print(f"{new:>7} new behind {prefix:>7}: {1e3 * seconds:8.2f} ms", file=sys.stderr)
        alike.setdefault((new, prefix), []).append(seconds)
    found = [
        {"new_tokens": new, "prefix_tokens": prefix, "seconds": statistics.median(runs), "count": len(runs)}
        for (new, prefix), runs in alike.items()
    ]
    return json.dumps({"version": VERSION, "layers": layers, "steps": found}, indent=1)


def engine_arguments(model: str, more: str) -> dict[str, Any]:
    """The engine's arguments: with a prefix cache, and without a connector, which would load."""
    try:
        given = json.loads(more)
    except ValueError as error:
        raise InvalidError(f"--engine is {more!r}, no JSON ({error}); allowed is an object") from error
    if not isinstance(given, dict):
        raise InvalidError(f'--engine is {more!r}; allowed is an object, such as {{"dtype": "float32"}}')
    ours = {"model": model, "enable_prefix_caching": True, "kv_transfer_config": None}
    return {"skip_tokenizer_init": True, **given, **ours}


def check_out(out: Path) -> None:
    """Refuses a file that cannot be written, before minutes are spent on it."""
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InvalidError(
            f"--out is {str(out)!r}; allowed is a file that can be written, in a folder that is there"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m forebay.vllm.profile", description=__doc__)
    parser.add_argument("--model", required=True, help="as for `vllm serve`")
    parser.add_argument("--out", type=Path, required=True, help="where the profile goes")
    parser.add_argument(
        "--engine", default="{}", metavar="JSON", help="more arguments of vllm.LLM, as the server has them"
    )
    args = parser.parse_args()
    try:
        arguments = engine_arguments(args.model, args.engine)
        check_out(args.out)
    except InvalidError as error:
        parser.error(str(error))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Steps are timed where they are made.
    timer = Timer(arguments)
    args.out.write_text(profile_of(timer.layers, times(timer)) + "\n")


if __name__ == "__main__":
    main()
