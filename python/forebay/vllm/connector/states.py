"""States beside KV, in a worker: where they lie, and one cache for both.

It knows how vLLM lays a state out in its block. To `forebay.PagedCache` a state is a chunk of one
token whose page is the block. A load of both ends with the later of the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import forebay
from forebay.errors import ForebayError, InvalidError
from forebay.vllm.connector.metadata import Rate

# Counters of loads, which KV's cache counts for both.
COUNTED_ONCE = ("loads", "loads_short", "loads_under_way", "load_us", "layers_late", "bubble_us")


def place_of(name: str, parts: Sequence[Any], blocks: int, group: int) -> tuple[int, int, int, int, int]:
    """Where a layer's states lie: in each block its parts, maybe with room behind them."""
    first, end = parts[0], parts[0].data_ptr()
    stride_bytes = first.stride(0) * first.element_size()
    for part in parts:
        one_piece = part.shape[0] == blocks and part[0].is_contiguous() and part.data_ptr() == end
        if not one_piece or part.stride(0) * part.element_size() != stride_bytes:
            raise InvalidError(
                f"layer {name} has states of {[tuple(part.shape) for part in parts]} with strides "
                f"{[part.stride() for part in parts]}; allowed are {blocks}, each in one piece"
            )
        end += part[0].numel() * part.element_size()
    return first.data_ptr(), blocks, stride_bytes, end - first.data_ptr(), group


def parts_of(states: Any) -> Sequence[Any]:
    """The tensors of a layer's states. From 0.32 on vLLM gives one tensor of bytes."""
    return states if isinstance(states, list | tuple) else [states]


def open_states(
    names: Sequence[Sequence[str]],
    tensors: dict[str, Any],
    blocks: int,
    open_cache: Callable[..., forebay.PagedCache],
) -> forebay.PagedCache:
    """A cache of the states of each group's layers."""
    layers = [(name, number) for number, of_group in enumerate(names) for name in of_group if name in tensors]
    if len({number for _, number in layers}) < len(names):
        raise InvalidError(
            "this rank has no layer of a group with states; allowed are pipeline stages with layers of each"
        )
    places = [place_of(name, parts_of(tensors[name]), blocks, number) for name, number in layers]
    return open_cache(places, page_tokens=[1] * len(names), chunk_tokens=1, heads=[1] * len(names))


@dataclass
class LoadWithState:
    """What is known of a load of KV and the state at its end."""

    kv: tuple[int, str | None] | None = None  # tokens that may be used, and why it is not all
    why_no_state: str | None = None
    state_ended: bool = False


class WithStates:
    """A cache of KV and one of states, as one. A load of both has one number; stores differ."""

    def __init__(self, kv: forebay.PagedCache, states: forebay.PagedCache) -> None:
        self.kv, self.states = kv, states
        self.loads: dict[int, LoadWithState] = {}

    @property
    def is_connected(self) -> bool:
        return self.kv.is_connected and self.states.is_connected

    def load(
        self,
        job: int,
        sources: Any,
        pages: Any,
        *,
        state: bytes,
        state_pages: Any,
        stream: int,
        tenant: int | None = None,
        **more: Any,
    ) -> None:
        """Starts to load KV and the state at its end."""
        self.kv.load(job, sources, pages, stream=stream, tenant=tenant, **more)
        load = self.loads[job] = LoadWithState()
        try:
            one = [([state], 0, 0, 1)]
            self.states.load(job, one, state_pages, tokens=1, layerwise=False, stream=stream, tenant=tenant)
        except ForebayError as error:
            load.why_no_state, load.state_ended = str(error), True

    def store(
        self, job: int, parts: Any, pages: Any, *, stream: int, state: bool, tenant: int | None = None
    ) -> None:
        cache = self.states if state else self.kv
        cache.store(job, parts, pages, stream=stream, tenant=tenant)

    def take_ended(self) -> tuple[list[tuple[int, int, str | None]], list[tuple[int, list[int]]]]:
        """What has ended. Without its state, no token of a load may be used."""
        loads, stores = self.kv.take_ended()
        states, more = self.states.take_ended()
        for job, tokens, why in loads:
            self.loads[job].kv = tokens, why
        for job, tokens, why in states:
            load = self.loads[job]
            load.why_no_state, load.state_ended = None if tokens else why or "it has no state", True
        ended = []
        for job, load in list(self.loads.items()):
            if load.kv is not None and load.state_ended:
                del self.loads[job]
                if load.why_no_state is not None:
                    load.kv = 0, f"state: {load.why_no_state}"
                ended.append((job, *load.kv))
        return ended, stores + more

    def take_measured(self) -> list[Rate]:
        """What loads of KV took. A state is small, so its time would tell of latency."""
        self.states.take_measured()
        return self.kv.take_measured()

    def take_bubbles(self) -> list[tuple[int, float, int]]:
        """KV's alone: no step waits for a load of both."""
        return self.kv.take_bubbles()

    # No load of both is layer by layer.

    def wait_layer(self, layer: int, stream: int = 0) -> None: ...

    def wait_loads(self, stream: int = 0) -> None: ...

    def wait_loaded(self, jobs: Sequence[int], limit_s: float | None = None) -> bool:
        """Waits until none of these loads is in flight, up to the limit for each of the two."""
        return self.kv.wait_loaded(jobs, limit_s) and self.states.wait_loaded(jobs, limit_s)

    def wait_stored(self, jobs: Sequence[int], limit_s: float | None = None) -> bool:
        return self.kv.wait_stored(jobs, limit_s) and self.states.wait_stored(jobs, limit_s)

    def stats(self) -> dict[str, int]:
        """The counters of both. A load of both counts once."""
        states = self.states.stats()
        return {
            name: count + (0 if name in COUNTED_ONCE else states[name])
            for name, count in self.kv.stats().items()
        }

    def close(self) -> None:
        self.kv.close()
        self.states.close()
