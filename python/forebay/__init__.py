"""Forebay for Python: an agent that moves memory, and the client of a node.

The compiled part has `forebay.Agent`, `forebay.Node`, `forebay.PagedCache` and their types.
`forebay.aio` waits for an agent with asyncio, `forebay.nixl` is an agent with NIXL's API, and
`forebay.cuda` has pinned memory and copies for GPUs.

An object belongs to the process that made it. In a child of `fork()` each call of it raises
`ForkedError`, and dropping it there changes nothing for the parent.
"""

from forebay._forebay import Agent as Agent
from forebay._forebay import Descriptors as Descriptors
from forebay._forebay import Finding as Finding
from forebay._forebay import Hold as Hold
from forebay._forebay import Lease as Lease
from forebay._forebay import Loading as Loading
from forebay._forebay import Node as Node
from forebay._forebay import NodeMemory as NodeMemory
from forebay._forebay import PagedCache as PagedCache
from forebay._forebay import Prepared as Prepared
from forebay._forebay import Rail as Rail
from forebay._forebay import Registration as Registration
from forebay._forebay import Slack as Slack
from forebay._forebay import Storing as Storing
from forebay._forebay import Transfer as Transfer
from forebay._forebay import chunk_ids as chunk_ids
from forebay._forebay import head_reads as head_reads
from forebay._forebay import namespace_key as namespace_key
from forebay.errors import CancelledError as CancelledError
from forebay.errors import DeadlineError as DeadlineError
from forebay.errors import ForebayError as ForebayError
from forebay.errors import ForkedError as ForkedError
from forebay.errors import InvalidError as InvalidError
from forebay.errors import NoRoomError as NoRoomError
from forebay.errors import NotFoundError as NotFoundError
from forebay.errors import PeerLostError as PeerLostError
from forebay.errors import TransferError as TransferError
