"""The parameters that a proxy carries from a prefiller to a decoder: `kv_transfer_params`.

The fields of NIXL's connector are filled in, so that proxies written for it work. What they say of
blocks is not used: the decoder asks its own node for chunks. Nothing that comes in is trusted.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import InvalidError
from forebay.vllm.connector.config import Shape, number, shape
from forebay.vllm.connector.direct import Engine, Reads
from forebay.vllm.connector.namespace import Facts, refuse_shape

VERSION = 1
OURS = "forebay"


@dataclass(frozen=True)
class Ticket:
    """What the prefiller stores: the first tokens of the prompt, in its shape."""

    tokens: int
    shape: Shape
    direct: Reads | None = None  # how the prefiller's blocks may be read


def is_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will decode."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def ticket_of(
    params: Mapping[str, Any] | None, prompt_tokens: int, facts: Facts, engine: Engine | None = None
) -> Ticket | None:
    """What the parameters promise; `InvalidError` if this engine cannot use it.

    `engine`: this one, if it may read a prefiller's blocks.
    """
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return None  # A client may pass anything here (`vllm_xargs`).
    ticket = params.get(OURS)
    if ticket is None:  # A proxy that passes on only the fields it knows.
        if facts.resets:
            return None  # No other engine has the names of this one since its reset.
        tokens = prompt_tokens - facts.has_states
        return Ticket(tokens, facts.shape) if tokens else None
    if not isinstance(ticket, Mapping) or ticket.get("version") != VERSION:
        raise InvalidError(f"kv_transfer_params: {OURS} is {ticket!r}; allowed is version {VERSION}")
    for name, mine in (("identity", facts.identity()), ("chunk_tokens", facts.chunk_tokens)):
        if ticket.get(name) != mine:
            raise InvalidError(f"kv_transfer_params: {name} is {ticket.get(name)!r}; allowed is {mine!r}")
    cut = shape({"tp": ticket.get("tp"), "block_tokens": ticket.get("block_tokens")}, "kv_transfer_params")
    theirs = facts.cut(cut)
    refuse_shape("kv_transfer_params", theirs, facts)
    tokens = number("tokens", ticket.get("tokens"), 1, 1 << 30, "kv_transfer_params")
    offered = ticket.get("direct")
    if engine is None or offered is None or theirs.block_tokens != facts.shape.block_tokens:
        return Ticket(tokens, theirs)
    return Ticket(tokens, theirs, engine.read(offered, facts))


def answer(
    request: Any,
    blocks: tuple[list[int], ...],
    engine_id: str,
    facts: Facts,
    direct: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the prefiller gives to the proxy. `direct`: how its blocks are read, if they are offered."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_engine_id": engine_id,
        "remote_request_id": request.request_id,
        "remote_host": socket.gethostname(),
        "remote_port": 0,
        "tp_size": facts.ranks,
        "remote_num_tokens": request.num_prompt_tokens,
        OURS: {
            "version": VERSION,
            "identity": facts.identity(),
            "chunk_tokens": facts.chunk_tokens,
            "tp": facts.shape.tp,
            "block_tokens": facts.shape.block_tokens,
            "tokens": request.num_prompt_tokens,
            **({} if direct is None else {"direct": direct}),
        },
    }
