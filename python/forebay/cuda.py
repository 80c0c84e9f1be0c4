"""Pinned host memory, and copies between it and GPUs over every path of the host.

`PinnedPool` keeps what it pinned, because pinning costs more than copying; `PinnedBuffer` is memory of it, a
buffer as Python has them. `Copier` moves bytes between pinned memory and GPUs, over the links of all GPUs at
once; with `relays`, or `FOREBAY_RELAYS` in the environment, also over those of GPUs that only the node sees,
for memory of a pool that is `shared`. Knows names only.
"""

from forebay._forebay import Copier, PinnedBuffer, PinnedPool

__all__ = ["Copier", "PinnedBuffer", "PinnedPool"]
