"""When loading KV from an SSD takes no longer than computing it, and how many addresses a load needs.

Computing `new` tokens behind `prefix` tokens takes `linear * new + attention * new * (prefix + new / 2)`, as
`forebay_steps::StepModel::prefill_us` has it; loading takes bytes / rate. Knows these formulas, where a
profile has its constants, and nothing of how a rate was measured.
"""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

PROFILES = Path(__file__).parents[1] / "crates/steps/profiles"
# Of NVMe: a PRP entry names one page of the controller, an SGL descriptor one piece of memory of
# any length.
PRP_ENTRY_BYTES = 8
PRP_PAGE_BYTES = 4 << 10
SGL_DESCRIPTOR_BYTES = 16


@dataclass(frozen=True)
class Costs:
    """What computing and keeping a token costs."""

    linear_s: float  # For each new token.
    pair_s: float  # For each pair of a query and a key.
    token_bytes: int  # KV of a token.

    def prefill_s(self, new: float, prefix: float) -> float:
        """How long computing so many tokens behind a prefix takes."""
        return self.linear_s * new + self.pair_s * new * (prefix + new / 2)

    def load_s(self, tokens: float, bytes_per_s: float) -> float:
        """How long loading the KV of so many tokens takes."""
        return tokens * self.token_bytes / bytes_per_s

    def crossover(self, tokens: int, bytes_per_s: float) -> float:
        """The share of a prompt that is loaded in the time in which the rest is computed.

        A smaller share hides behind computing. A larger one keeps the GPU waiting. With b = pair_s / 2, the
        prefix p solves b p^2 + (linear_s + bytes / rate) p = linear_s N + b N^2.
        """
        b, slope = self.pair_s / 2, self.linear_s + self.token_bytes / bytes_per_s
        all_of_it = self.prefill_s(tokens, 0)
        # In this form nothing is lost where `b` is small or 0.
        prefix = 2 * all_of_it / (slope + math.sqrt(slope**2 + 4 * b * all_of_it))
        return prefix / tokens

    def worth_loading_tokens(self, bytes_per_s: float) -> float:
        """The length from which a prefix is loaded sooner than computed; infinite if none is."""
        left_s = self.token_bytes / bytes_per_s - self.linear_s
        if left_s <= 0:
            return 0.0
        return left_s / (self.pair_s / 2) if self.pair_s else math.inf


def profile(name: str) -> Costs:
    """The costs of a shipped profile."""
    said = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    step = said["step"]
    return Costs(
        linear_s=step["linear_us_per_token"] * 1e-6,
        pair_s=step["attention_ns_per_pair"] * 1e-9,
        token_bytes=said["model"]["kv_bytes_per_token"],
    )


def prp_bytes(transfer_bytes: int) -> int:
    """PRP entries of a transfer, one behind the other."""
    return transfer_bytes // PRP_PAGE_BYTES * PRP_ENTRY_BYTES


def prp_list_bytes(transfer_bytes: int, command_bytes: int, list_bytes: int) -> int:
    """The same if each command has a list of its own of that size, however little of it is used."""
    return transfer_bytes // command_bytes * list_bytes


def sgl_bytes(transfer_bytes: int, piece_bytes: int) -> int:
    """SGL descriptors of a transfer whose memory is in pieces of that size."""
    return transfer_bytes // piece_bytes * SGL_DESCRIPTOR_BYTES
