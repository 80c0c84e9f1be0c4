"""Pinned host memory for GPUs.

`PinnedPool` keeps what it pinned, because pinning costs more than copying; `PinnedBuffer` is memory of it, a
buffer as Python has them, which goes back to the pool when nothing refers to it any more. Knows names only.
"""

from forebay._forebay import PinnedBuffer, PinnedPool

__all__ = ["PinnedBuffer", "PinnedPool"]
