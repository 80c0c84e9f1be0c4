"""Says, for each request, how many of the chunks that were found are loaded; the rest is computed.

`CostModel.chunks_to_load` asks `forebay.Slack`, which is `CostModel` in Rust: the decision itself is
`choose` in `crates/paged/src/cost_model/choose.rs`. It weighs the time to load against the time to
compute, for this request and for those that wait meanwhile, as this engine's steps and loads have
taught it. Without the setting `gate`, all is loaded; so it is until steps of two size classes are
timed, unless there is a profile. How a load then runs is decided in `load_mode.py`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import forebay
from forebay.vllm.connector.config import refuse
from forebay.vllm.connector.metadata import Rate
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import TIERS, Found, Loading, TrackedRequest

# Timed steps whose end is not known yet. Beyond this the oldest are forgotten.
STEPS_KEPT = 64
# Steps of one size alone cannot tell the cost of a token from the fixed cost of a step.
SIZES_NEEDED = 2


def read_profile(path: str) -> str:
    """The text of a profile that `forebay.vllm.profile` wrote."""
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise refuse("profile", path, f"a file that forebay.vllm.profile wrote ({error})") from error


class CostModel:
    """What loading and computing cost in this engine, and which of them is cheaper."""

    def __init__(self, facts: Facts, profile: str | None, gate: bool = True) -> None:
        """Starts from a profile if there is one. Without `gate` everything found is loaded."""
        text = None if profile is None else read_profile(profile)
        self.learned = forebay.Slack(facts.layers, text)
        self.facts, self.gate = facts, gate
        self.profiled = text is not None
        self.sizes: set[int] = set()  # sizes of timed steps, as powers of two of new tokens
        self.steps: dict[int, tuple[float, int, int]] = {}  # start, new tokens, tokens before them
        self.last_s = 0.0
        self.queued = Counter(dict.fromkeys(TIERS, 0))  # chunks that are being loaded

    def chunks_to_load(self, found: Found, prompt_tokens: int, held: int, others: int) -> int:
        """How many of the found chunks to load.

        The answer minimises the time that this request and the `others`, which compute meanwhile,
        wait in total. Until step times are known, everything is loaded.
        """
        known = self.profiled or len(self.sizes) >= SIZES_NEEDED
        if found.tokens <= held or not known or not self.gate:
            return found.chunks
        first = held // self.facts.chunk_tokens
        tiers = found.tiers(first)
        return first + self.learned.worth(
            prompt_tokens=prompt_tokens,
            held_tokens=held,
            chunk_tokens=self.facts.chunk_tokens,
            chunk_bytes=self.facts.chunk_bytes,
            in_memory=tiers["memory"],
            on_disk=tiers["disk"],
            on_peers=tiers["peer"],
            queued=self.bytes_of(self.queued),
            others=others,
        )

    def load_s(self, found: Found, held: int) -> float | None:
        """How long it takes to load what vLLM does not hold; None if that is not known."""
        tiers = found.tiers(held // self.facts.chunk_tokens)
        return self.learned.load_s(self.bytes_of(tiers), self.bytes_of(self.queued))

    def disk_s(self, size: int) -> float | None:
        """How long it takes to load so many bytes of one rank from the disk; None if that is not known."""
        return self.learned.load_s((0, size, 0), (0, 0, 0))

    def compute_s(self, tokens: int, prefix_tokens: int) -> float:
        """How long a step computes so many tokens behind a prefix; 0 while that is not known."""
        return self.learned.layer_us(tokens, prefix_tokens) * self.facts.layers / 1e6

    def bytes_of(self, tiers: Mapping[str, int]) -> tuple[int, int, int]:
        """Bytes that one rank has of so many chunks in memory, on disk and at peers."""
        size = self.facts.chunk_bytes
        return tiers["memory"] * size, tiers["disk"] * size, tiers["peer"] * size

    # What it learns from.

    def step_began(
        self, step: int, scheduled: Mapping[str, int], tracked: Mapping[str, TrackedRequest], now: float
    ) -> None:
        """A step begins that computes prompts and starts no load."""
        before = [tracked[name].request.num_computed_tokens for name in scheduled if name in tracked]
        self.steps[step] = now, sum(scheduled.values()), max(before, default=0)
        if len(self.steps) > STEPS_KEPT:
            del self.steps[next(iter(self.steps))]

    def step_ended(self, step: int | None, now: float) -> None:
        """A step has ended; None stands for one that is not timed.

        A step that was scheduled while another one ran is timed from the end of that one. The ends
        of other steps need not be told while there are no `steps`.
        """
        begun = None if step is None else self.steps.pop(step, None)
        if begun is not None:
            self.sizes.add(begun[1].bit_length())
            self.learned.note_step(begun[1], begun[2], max(0.0, now - max(begun[0], self.last_s)))
        self.last_s = now

    def load_began(self, load: Loading) -> None:
        """A load begins. Later loads wait for it."""
        self.queued.update(load.tiers)

    def load_ended(self, load: Loading) -> None:
        self.queued.subtract(load.tiers)

    def note_rates(self, rates: Iterable[Rate]) -> None:
        """Takes in what workers measured: the scheduler hears of a load's end a step too late."""
        for tier, load_bytes, seconds in rates:
            self.learned.note_load(tier, load_bytes, seconds)
