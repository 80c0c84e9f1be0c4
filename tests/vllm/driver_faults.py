"""What `driver.py` lets go wrong: loads that are late or wrong, lost states, requests that leave."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any


class Faults:
    """Part of `Driver`."""

    half: Any
    scheduler: Any
    core: Any
    engine: Any
    add: Callable[..., list[str]]
    until: Callable[..., dict[str, Any]]
    workers: Callable[..., list[Any]]

    def slow(self, seconds: float) -> Any:
        """Ends of loads are heard of so much later, until all is healed."""

        def here(half: Any) -> None:
            half.cache = Slow(half.cache, seconds)

        return self.workers(here)

    def leaves(self, prompt: list[int], tokens: int, how: str) -> Any:
        """A request leaves the step that loads for it before anybody looks at what came of that: it is
        `aborted`, or `preempted` since there is no block for its next token. What it says, if it does.
        """
        (name,) = self.add([prompt], tokens)
        where, what = {
            "aborted": (self.core, "_process_aborts_queue"),
            "preempted": (self.scheduler.kv_cache_manager, "allocate_slots"),
        }[how]
        go_on = getattr(where, what)

        def leave(*arguments: Any, **more: Any) -> Any:
            if self.half.oldest_unverified > self.half.last_job:
                return go_on(*arguments, **more)
            delattr(where, what)
            return None if how == "preempted" else self.engine.abort_request([name])

        setattr(where, what, leave)
        requests, loading = self.scheduler.requests, self.half.loading
        said = self.until(lambda done: (done or not requests) and not loading).get(name)
        assert what not in vars(where), "it was not loaded layer by layer"
        return said

    def spoil(self, tokens: int, rank: int | None = None, states: bool = False) -> Any:
        """Loads bring only their first `tokens`, everywhere or at one rank, or no right `states`: what comes
        behind them is noise, and they say so. Below 0: all but so many of the last ones. What is behind the
        last whole chunk comes as one, as a chunk does, or not at all.
        """

        def here(half: Any) -> None:
            if rank not in (None, half.rank):
                return
            if states:
                half.cache.states = Spoiled(half.cache.states, half, 0, states=True)
            else:
                half.cache = Spoiled(half.cache, half, tokens)

        return self.workers(here)

    def lie(self, group: int) -> Any:
        """Loads say that all is well, and have brought noise to the layers of this group of vLLM's."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        names = list(groups[group].layer_names)

        def here(half: Any) -> None:
            half.cache = Lying(half.cache, half, names)

        return self.workers(here)

    def lose_states(self) -> Any:
        """Loads ask for states that the node does not have, as if they had gone after they were found."""
        state_of = self.half.state_to_load

        def lost(*arguments: Any) -> Any:
            states, pages = state_of(*arguments)
            return [bytes(32) for _ in states], pages

        self.half.state_to_load = lost

    def heal(self) -> Any:
        """Loads are as they were."""
        self.half.__dict__.pop("state_to_load", None)

        def here(half: Any) -> None:
            if isinstance(half.cache, Spoiled | Slow | Lying):
                half.cache = half.cache.cache
            states = getattr(half.cache, "states", None)
            if isinstance(states, Spoiled):
                half.cache.states = states.cache

        return self.workers(here)

    def stop(self, when: str) -> Any:
        """This process stops, all threads of it, when the next load is `planned` or when it has `begun`."""
        (worker,) = self.workers(lambda half: half)
        half, name = (self.half, "plan_load") if when == "planned" else (worker, "begin_step")
        go_on = getattr(half, name)

        def stopping(what: Any, *more: Any) -> None:
            go_on(what, *more)
            if when == "planned" or what.loads:
                delattr(half, name)
                os.kill(os.getpid(), signal.SIGSTOP)

        setattr(half, name, stopping)
        return os.getpid()


class Slow:
    """A cache whose loads take longer. Everything else is the cache's."""

    def __init__(self, cache: Any, seconds: float) -> None:
        """So many seconds longer."""
        self.cache, self.seconds = cache, seconds
        self.kept: list[tuple[float, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def take_ended(self) -> Any:
        """Says what has ended a while ago."""
        loads, stores = self.cache.take_ended()
        now = time.monotonic()
        self.kept += [(now + self.seconds, load) for load in loads]
        ended = [load for end, load in self.kept if end <= now]
        self.kept = [one for one in self.kept if one[0] > now]
        return ended, stores


class Spoiled:
    """A cache whose loads go wrong half way. Everything else is the cache's."""

    def __init__(self, cache: Any, half: Any, tokens: int, states: bool = False) -> None:
        """Spoils what `cache` loads behind the first `tokens`, or the states that it loads."""
        self.cache, self.half, self.tokens, self.states = cache, half, tokens, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def take_ended(self) -> Any:
        """Says what has ended; blocks of spoiled loads are overwritten before that."""
        loads, stores = self.cache.take_ended()
        return [(job, self.spoil(job, tokens), "spoiled by the test") for job, tokens, _ in loads], stores

    def spoil(self, job: int, tokens: int) -> int:
        """Noise behind what may be used, which is returned."""
        load = self.half.loads[job]
        wanted = self.tokens if self.tokens >= 0 else max(0, load.tokens + self.tokens)
        good = tokens if tokens <= wanted else wanted // self.half.chunk_tokens * self.half.chunk_tokens
        if self.states:
            layers = self.half.vllm_config.compilation_config.static_forward_context
            for names, blocks in zip(self.half.with_states, load.state_pages, strict=True):
                spoil([part for name in names for part in parts_of(layers[name].kv_cache)], blocks.tolist())
        else:
            spoil(self.half.tensors, self.half.bad_blocks(load, good))
        return good


class Lying:
    """A cache whose loads bring noise to some layers and do not say so. Everything else is the cache's."""

    def __init__(self, cache: Any, half: Any, names: list[str]) -> None:
        """These layers, which are one group."""
        self.cache, self.half, self.names = cache, half, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def take_ended(self) -> Any:
        """Says what has ended; the blocks of these layers are overwritten before that."""
        loads, stores = self.cache.take_ended()
        layers = self.half.vllm_config.compilation_config.static_forward_context
        tensors = [part for name in self.names for part in parts_of(layers[name].kv_cache)]
        for job, _, _ in loads:
            load = self.half.loads[job]
            states = load.state_pages or [] if load.states is not None else []
            for names, blocks in (
                *zip(self.half.layers_of_groups, load.pages, strict=True),
                *zip(self.half.with_states, states, strict=False),
            ):
                if list(names) == self.names:
                    spoil(tensors, blocks[blocks >= 0].tolist())
        return loads, stores


def spoil(tensors: list[Any], blocks: Iterable[int]) -> None:
    """Writes noise."""
    import torch

    for block in blocks:
        for tensor in tensors:
            tensor[block].copy_(100 * torch.rand(tensor[block].shape))  # Elements may be of a byte.


def parts_of(cache: Any) -> list[Any]:
    """The tensors of a layer: one with KV, or those of its states."""
    return list(cache) if isinstance(cache, list | tuple) else [cache]
