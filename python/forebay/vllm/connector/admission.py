"""Decides when a background load may begin, so that an engine with few blocks cannot lock up.

It knows how many blocks there are, how many a request may come to need, and how vLLM's scheduler
looks at waiting requests: in order, up to the first one that has no room. A load's blocks are free
only after its request was admitted and has ended. So vLLM 0.26 stops for ever if a request without
room is before one whose load has ended, or if two loaded requests each hold what the other lacks
(https://github.com/vllm-project/vllm/pull/45406). From 0.32 on it looks at requests that hold
blocks first, but stops among these at one whose load has failed. Three rules keep all of them going:

- A background load begins only if all requests that wait with blocks fit in full. One always may.
- After a pass in which a request had no room although a load had ended, requests without blocks are
  passed over for one pass. By the first rule a loaded request has room when nobody runs.
- A request that has no room for a load although nothing runs, loads or holds blocks is computed.
  vLLM reserves room for a request whose load has failed, and counts that against its next load.
"""

from collections.abc import Iterable

# So many idle passes in a row count as stuck: steps unknown here may still be in flight.
IDLE_PASSES = 8


class LoadAdmission:
    """What vLLM's scheduler is told in a pass, so that blocks come back."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.needs: dict[str, int] = {}  # requests that wait with blocks: those needed in full
        self.ended: set[str] = set()  # those of them whose load has ended
        self.is_full = False  # a load had to wait in this pass, so later ones wait too
        self.favours_loaded = False  # in this pass, while there are loads that have ended
        self.idle_passes = 0  # in a row, in which a request was refused while nothing was in flight

    def may_begin(self, blocks: int) -> bool:
        """Whether a background load may begin for a request that needs so many blocks in full."""
        if self.needs and (self.is_full or sum(self.needs.values()) + blocks > self.blocks):
            self.is_full = True
            return False
        return True

    @property
    def loaded_go_first(self) -> bool:
        """Whether requests without blocks are passed over now."""
        return self.favours_loaded and bool(self.ended)

    @property
    def is_stuck(self) -> bool:
        """Whether vLLM refuses loads although nothing is in their way."""
        return self.idle_passes >= IDLE_PASSES

    def load_began(self, name: str, blocks: int) -> None:
        """A background load has begun for a request that needs so many blocks in full."""
        self.needs[name] = blocks

    def load_ended(self, names: Iterable[str]) -> None:
        """vLLM was told that the loads of these requests have ended."""
        self.ended.update(name for name in names if name in self.needs)

    def left(self, name: str) -> None:
        """A request no longer waits with blocks: it was admitted, asked for again, or ended."""
        self.needs.pop(name, None)
        self.ended.discard(name)

    def end_pass(self, refused: bool, idle: bool) -> None:
        """vLLM has scheduled. `refused`: a request was answered and not admitted. `idle`: nothing
        is computed, loaded, or still to be stored.
        """
        self.is_full = False
        self.favours_loaded = refused and bool(self.ended) and not self.favours_loaded
        self.idle_passes = self.idle_passes + 1 if idle and refused and not self.needs else 0
