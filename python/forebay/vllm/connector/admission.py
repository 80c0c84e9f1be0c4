"""Requests that wait with blocks: those that are loaded in the background, until vLLM admits them.

Knows how many blocks there are, how many such a request may come to need, and how vLLM's scheduler
looks at requests. Must never know what is loaded, or from where.

vLLM looks at the requests that wait in their order, and stops at the first one that has no room. The
blocks of a load come back only when its request was admitted and ends. So an engine with vLLM 0.26
stops for ever when a request without room stands before one whose load has ended, or when two that
were loaded hold what each of them still lacks (https://github.com/vllm-project/vllm/pull/45406).
Newer versions look at requests that hold blocks first, but stop among these at one whose load has
failed. Three rules keep all of them going, by what a connector may answer:

- A load in the background begins only if all that wait with blocks fit together in full. One always
  may.
- After a pass in which somebody had no room although a load had ended, all that come before it are
  passed over for one pass. By the first rule whoever was loaded has room when nobody runs.
- Who has no room for a load although nobody runs, loads or holds anything, computes: vLLM reserves
  room for a request whose load has failed, and counts that against its next load.
"""

from collections.abc import Iterable

# So many passes in a row must have computed nothing: steps may be under way that nothing is known of here.
IDLE_PASSES = 8


class LoadAdmission:
    """What vLLM's scheduler is told in a pass, so that blocks come back."""

    def __init__(self, blocks: int) -> None:
        """Of an engine that has so many blocks for requests."""
        self.blocks = blocks
        self.needs: dict[str, int] = {}  # blocks in full, of those that wait with some
        self.ended: set[str] = set()  # of them, whose load has ended
        self.is_full = False  # in this pass a load had to wait: those that are asked for later wait too
        self.favours_loaded = (
            False  # this pass: all others are passed over until no load that has ended is left
        )
        self.idle_passes = 0  # in a row, in which somebody was refused while nothing was under way

    def may_begin(self, blocks: int) -> bool:
        """Whether a load in the background may begin for a request that needs so many blocks in full."""
        if self.needs and (self.is_full or sum(self.needs.values()) + blocks > self.blocks):
            self.is_full = True
            return False
        return True

    @property
    def loaded_go_first(self) -> bool:
        """Whether who holds nothing is passed over now."""
        return self.favours_loaded and bool(self.ended)

    @property
    def is_stuck(self) -> bool:
        """Whether vLLM refuses loads although nothing is in their way."""
        return self.idle_passes >= IDLE_PASSES

    def load_began(self, name: str, blocks: int) -> None:
        """A request is loaded in the background, and needs so many blocks in full."""
        self.needs[name] = blocks

    def load_ended(self, names: Iterable[str]) -> None:
        """vLLM was told that these requests' loads have ended."""
        self.ended.update(name for name in names if name in self.needs)

    def left(self, name: str) -> None:
        """A request does not wait with blocks: it is admitted, is asked for, or has ended."""
        self.needs.pop(name, None)
        self.ended.discard(name)

    def end_pass(self, refused: bool, idle: bool) -> None:
        """vLLM has scheduled. `refused`: it was told what there is for a request, and did not admit that.
        `idle`: nothing is computed, loaded, or still to be stored.
        """
        self.is_full = False
        self.favours_loaded = refused and bool(self.ended) and not self.favours_loaded
        if not (idle and refused and not self.needs):
            self.idle_passes = 0
        else:
            self.idle_passes += 1
