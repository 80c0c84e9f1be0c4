"""Forebay for Python: an agent that moves memory between processes and machines, and the client of a node.

`forebay.Agent`, `forebay.Node` and what belongs to them is compiled; `forebay.aio` waits for it with
asyncio; `forebay.nixl` is the same agent with NIXL's API; `forebay.cuda` is pinned memory and copies
for GPUs.
"""

from forebay._forebay import (
    Agent,
    Descriptors,
    Lease,
    Loading,
    Node,
    NodeMemory,
    Prepared,
    Rail,
    Registration,
    Storing,
    Transfer,
    chunk_ids,
)
from forebay.errors import (
    CancelledError,
    DeadlineError,
    ForebayError,
    InvalidError,
    NoRoomError,
    NotFoundError,
    PeerLostError,
    TransferError,
)

__all__ = [
    "Agent",
    "CancelledError",
    "DeadlineError",
    "Descriptors",
    "ForebayError",
    "InvalidError",
    "Lease",
    "Loading",
    "Node",
    "NoRoomError",
    "NodeMemory",
    "NotFoundError",
    "PeerLostError",
    "Prepared",
    "Rail",
    "Registration",
    "Storing",
    "Transfer",
    "TransferError",
    "chunk_ids",
]
