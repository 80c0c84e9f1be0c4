"""Forebay for Python: an agent that moves memory between processes and machines, and the client of a node.

`forebay.Agent`, `forebay.Node`, `forebay.PagedCache` and what belongs to them is compiled; `forebay.aio`
waits for it with asyncio; `forebay.nixl` is the same agent with NIXL's API; `forebay.cuda` is pinned memory
and copies for GPUs.

An object belongs to the process that made it. After `fork()` every call of it in the child raises
`ForkedError`, and dropping it there changes nothing for the parent.
"""

from forebay._forebay import (
    Agent,
    Descriptors,
    Finding,
    Hold,
    Lease,
    Loading,
    Node,
    NodeMemory,
    PagedCache,
    Prepared,
    Rail,
    Registration,
    Slack,
    Storing,
    Transfer,
    chunk_ids,
    head_reads,
    namespace_key,
)
from forebay.errors import (
    CancelledError,
    DeadlineError,
    ForebayError,
    ForkedError,
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
    "Finding",
    "ForebayError",
    "ForkedError",
    "Hold",
    "InvalidError",
    "Lease",
    "Loading",
    "Node",
    "NoRoomError",
    "NodeMemory",
    "NotFoundError",
    "PagedCache",
    "PeerLostError",
    "Prepared",
    "Rail",
    "Registration",
    "Slack",
    "Storing",
    "Transfer",
    "TransferError",
    "chunk_ids",
    "head_reads",
    "namespace_key",
]
