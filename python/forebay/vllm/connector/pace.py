"""How fast steps and loads are, learned while they run, and what is worth loading at that pace.

Knows times and sizes; takes time as an argument. The model is `forebay.Slack`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import forebay
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import Found, Loading, Tracked

# Steps whose end is not known yet; more are forgotten, the oldest first.
STEPS_KEPT = 64
# Share of a new rate in the average.
NEW = 0.3
# Steps of one size do not say what a token costs: all of it could be what any step costs.
SIZES_NEEDED = 2


class Pace:
    """What was measured in this engine."""

    def __init__(self, facts: Facts, profile: str | None) -> None:
        """Begins with what a profile says, if there is one."""
        text = None if profile is None else Path(profile).read_text()
        self.slack = forebay.Slack(facts.layers, text)
        self.facts = facts
        self.profiled = text is not None
        self.sizes: set[int] = set()  # powers of two of new tokens of the steps that were timed
        self.steps: dict[int, tuple[float, int, int]] = {}  # when it began, new tokens, tokens before them
        self.last_s = 0.0
        self.bytes_per_s: float | None = None

    def began(
        self, step: int, scheduled: Mapping[str, int], tracked: Mapping[str, Tracked], now: float
    ) -> None:
        """A step begins that computes prompts, maybe beside decodes. None of the loads began with it."""
        before = [tracked[name].request.num_computed_tokens for name in scheduled if name in tracked]
        self.steps[step] = now, sum(scheduled.values()), max(before, default=0)
        if len(self.steps) > STEPS_KEPT:
            del self.steps[next(iter(self.steps))]

    def ended(self, step: int, now: float) -> None:
        """A step has ended. One that was begun while another one ran took the time since that one's end."""
        begun = self.steps.pop(step, None)
        if begun is not None:
            self.sizes.add(begun[1].bit_length())
            self.slack.note_step(begun[1], begun[2], max(0.0, now - max(begun[0], self.last_s)))
        self.last_s = now

    def loaded(self, load: Loading, now: float) -> None:
        """A load in the background has ended well."""
        took_s = max(1e-6, now - load.began_s)
        rate = load.bytes / took_s
        before = rate if self.bytes_per_s is None else self.bytes_per_s
        self.bytes_per_s = before + NEW * (rate - before)
        where = [tier for tier, chunks in load.tiers.items() if chunks]
        if len(where) == 1:
            self.slack.note_load(cast(Literal["memory", "disk", "peer"], where[0]), load.bytes, took_s)

    def load_s(self, load_bytes: int) -> float | None:
        """How long a load will take, as far as that is known."""
        return None if self.bytes_per_s is None else load_bytes / self.bytes_per_s

    def worth(self, found: Found, prompt_tokens: int, held: int) -> int:
        """How many of the chunks that were found are to be loaded so that the prompt is ready soonest."""
        if found.tokens <= held or not (self.profiled or len(self.sizes) >= SIZES_NEEDED):
            return found.chunks
        first = held // self.facts.chunk_tokens
        tiers = found.tiers(first)
        return first + self.slack.worth(
            prompt_tokens=prompt_tokens,
            held_tokens=held,
            chunk_tokens=self.facts.chunk_tokens,
            chunk_bytes=self.facts.chunk_bytes,
            in_memory=tiers["memory"],
            on_disk=tiers["disk"],
            on_peers=tiers["peer"],
        )
