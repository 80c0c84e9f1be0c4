"""Pinned host memory, and copies between it and GPUs over every path of the host.

`PinnedPool` keeps the memory that it has pinned, since pinning costs more than copying.
`PinnedBuffer` is memory of it, with Python's buffer protocol. `Copier` moves bytes between pinned
memory and GPUs over the links of all GPUs. With `relays`, or `FOREBAY_RELAYS` in the environment,
it also uses GPUs that only the node sees, for memory of a pool that is `shared`.
"""

from forebay._forebay import Copier, PinnedBuffer, PinnedPool

__all__ = ["Copier", "PinnedBuffer", "PinnedPool"]
