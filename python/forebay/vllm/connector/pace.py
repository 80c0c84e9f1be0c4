"""How fast steps and loads are, learned while they run, and what is worth loading at that pace.

Knows times and sizes; takes time as an argument. The model is `forebay.Slack`'s.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import forebay
from forebay.vllm.connector.config import refuse
from forebay.vllm.connector.metadata import Rate
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import TIERS, Found, Loading, Tracked

# Steps whose end is not known yet; more are forgotten, the oldest first.
STEPS_KEPT = 64
# Steps of one size do not say what a token costs: all of it could be what any step costs.
SIZES_NEEDED = 2


def read(profile: str) -> str:
    """What the file says that the setting `profile` names."""
    try:
        return Path(profile).read_text()
    except (OSError, ValueError) as error:
        raise refuse("profile", profile, f"a file that forebay.vllm.profile wrote ({error})") from error


class Pace:
    """What was measured in this engine."""

    def __init__(self, facts: Facts, profile: str | None, gate: bool = True) -> None:
        """Begins with what a profile says, if there is one. Without the gate all is worth loading."""
        text = None if profile is None else read(profile)
        self.slack = forebay.Slack(facts.layers, text)
        self.facts, self.gate = facts, gate
        self.profiled = text is not None
        self.sizes: set[int] = set()  # powers of two of new tokens of the steps that were timed
        self.steps: dict[int, tuple[float, int, int]] = {}  # when it began, new tokens, tokens before them
        self.last_s = 0.0
        self.queued = dict.fromkeys(TIERS, 0)  # bytes that are being loaded

    def began(
        self, step: int, scheduled: Mapping[str, int], tracked: Mapping[str, Tracked], now: float
    ) -> None:
        """A step begins that computes prompts, maybe beside decodes. None of the loads began with it."""
        before = [tracked[name].request.num_computed_tokens for name in scheduled if name in tracked]
        self.steps[step] = now, sum(scheduled.values()), max(before, default=0)
        if len(self.steps) > STEPS_KEPT:
            del self.steps[next(iter(self.steps))]

    def ended(self, step: int | None, now: float) -> None:
        """A step has ended, None for one that is not timed. One that was begun while another one ran took the
        time since that one's end, which nobody needs to tell as long as there are no `steps`.
        """
        begun = None if step is None else self.steps.pop(step, None)
        if begun is not None:
            self.sizes.add(begun[1].bit_length())
            self.slack.note_step(begun[1], begun[2], max(0.0, now - max(begun[0], self.last_s)))
        self.last_s = now

    def load_began(self, load: Loading) -> None:
        """A load begins, which those behind it wait for."""
        for tier, chunks in load.tiers.items():
            self.queued[tier] += chunks * self.facts.chunk_bytes

    def load_ended(self, load: Loading) -> None:
        """A load has ended."""
        for tier, chunks in load.tiers.items():
            self.queued[tier] -= chunks * self.facts.chunk_bytes

    def measured(self, rates: Iterable[Rate]) -> None:
        """What workers say that loads took. They measure it: here their ends are heard of a step later."""
        for tier, load_bytes, seconds in rates:
            self.slack.note_load(tier, load_bytes, seconds)

    def load_s(self, found: Found, held: int) -> float | None:
        """How long it will take to load what is not held, as far as that is known."""
        return self.slack.load_s(self.sizes_of(found, held), self.in_queue())

    def compute_s(self, tokens: int, prefix_tokens: int) -> float:
        """How long a step computes so many tokens behind so many others; 0 as long as that is not known."""
        return self.slack.layer_us(tokens, prefix_tokens) * self.facts.layers / 1e6

    def sizes_of(self, found: Found, held: int) -> tuple[int, int, int]:
        """Bytes of one rank to be loaded from memory, disk and other nodes."""
        tiers, size = found.tiers(held // self.facts.chunk_tokens), self.facts.chunk_bytes
        return tiers["memory"] * size, tiers["disk"] * size, tiers["peer"] * size

    def in_queue(self) -> tuple[int, int, int]:
        """Bytes of one rank that are being loaded from memory, disk and other nodes."""
        return self.queued["memory"], self.queued["disk"], self.queued["peer"]

    def worth(self, found: Found, prompt_tokens: int, held: int, others: int) -> int:
        """How many of the chunks that were found are to be loaded.

        By that this request and the `others`, which compute meanwhile, wait least.
        """
        known = self.profiled or len(self.sizes) >= SIZES_NEEDED
        if found.tokens <= held or not known or not self.gate:
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
            queued=self.in_queue(),
            others=others,
        )
