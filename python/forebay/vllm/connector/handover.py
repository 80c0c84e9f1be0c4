"""The parameters that a proxy carries from a prefiller to a decoder: `kv_transfer_params`.

The fields of NIXL's connector are filled in, so that proxies written for it work. What they say of
blocks is not used: the decoder asks its own node for chunks. Nothing that comes in is trusted.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import InvalidError
from forebay.vllm.connector import direct
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
    at_once: bool = False  # the prefiller was asked at the same time, and will offer them


def is_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will decode."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def keys_of(params: Mapping[str, Any] | None, engine: Engine | None) -> list[bytes] | None:
    """The keys under which a prefiller is to offer its blocks, if a proxy has told a decoder some.

    `engine`: this one, if it offers blocks.
    """
    ours = params.get(OURS) if is_prefill(params) and params is not None else None
    if engine is None or not isinstance(ours, Mapping) or ours.get("keys") is None:
        return None
    return direct.keys_of(ours["keys"], len(engine.ranks))


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
    at_once = ticket.get("at_once", False)
    if not isinstance(at_once, bool):
        raise InvalidError(f"kv_transfer_params: at_once is {at_once!r}; allowed is true or false")
    # Who asks both at once may not know how many tokens a prompt has.
    said = prompt_tokens if at_once and "tokens" not in ticket else ticket.get("tokens")
    tokens = number("tokens", said, 1, 1 << 30, "kv_transfer_params")
    offered = ticket.get("direct")
    if engine is None or offered is None or theirs.block_tokens != facts.shape.block_tokens:
        return Ticket(tokens, theirs)
    return Ticket(tokens, theirs, engine.read(offered, facts), at_once)


def answer(
    request: Any,
    blocks: tuple[list[int], ...],
    engine_id: str,
    facts: Facts,
    offered: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the prefiller gives to the proxy. `offered`: how its blocks are read, if they are."""
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
            **({} if offered is None else {"direct": offered}),
        },
    }
