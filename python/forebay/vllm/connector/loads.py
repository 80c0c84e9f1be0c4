"""Plans one load: the message to the workers, and what the scheduler's half remembers of it.

It knows chunks, blocks and shapes. That the load is wanted was decided before (`load_or_compute`).
"""

from forebay.vllm.connector.finder import Finder
from forebay.vllm.connector.metadata import Load, Pages
from forebay.vllm.connector.namespace import Facts
from forebay.vllm.connector.tracked import Loading, TrackedRequest, digest_of


def plan(
    facts: Facts,
    finder: Finder,
    tracked: TrackedRequest,
    external: int,
    job: int,
    states: list[bytes],
    state_pages: Pages,
) -> tuple[Load, Loading]:
    """Plans to load what was found for a request into its blocks, and pins it in the node.

    vLLM counts the load as `external` tokens. `states` are those at its end, one for each rank.
    """
    found, size = tracked.found, facts.chunk_tokens
    assert found is not None
    first = tracked.held // size
    tokens = found.tokens - first * size
    ids = [of_rank[first:] for of_rank in found.ids]
    theirs, mine = found.shape.block_tokens, facts.shape.block_tokens
    direct = tracked.ticket.direct if tracked.ticket is not None else None
    message = Load(
        job=job,
        request=tracked.name,
        sources=finder.sources(found.shape, ids) if direct is None else [],
        pages=[
            group.blocks_to_load(table, first * size, found.tokens, tracked.held)
            for group, table in zip(facts.groups, tracked.blocks, strict=True)
            if group.paged
        ],
        tokens=tokens,
        source_page_tokens=None if theirs == mine else theirs,
        layerwise=tracked.layerwise,
        states=states or None,
        state_pages=state_pages,
        reads=None if direct is None else direct.ranks,
        first_token=first * size,
        digest=digest_of(found.ids) if direct is not None else b"",
        ahead=tracked.ticket is not None and tracked.ticket.at_once,
        trace=tracked.trace,
        tenant=tracked.tenant,
    )
    loading = Loading(
        owner=tracked,
        ids=found.ids,
        first_chunk=first,
        tokens=tokens,
        layerwise=tracked.layerwise,
        tiers=found.tiers(first),
        holds=finder.hold([*ids, *([state] for state in states)], tracked.tenant) if direct is None else [],
        held=tracked.held,
        external=external,
        counted=tracked.counted,
        resets=facts.resets,
        usable=tokens,
        direct=direct is not None,
    )
    return message, loading
