"""One vLLM, told by lines of JSON what to do. The tests start it under the Python that has vLLM.

Knows vLLM's engine and how to look into its connector: the scheduler's half is in this process, the workers'
halves are where the executor has them. A line is {"do": name, ...}; the answer is one line. The first line is
the arguments of `LLM`. What vLLM prints goes to standard error.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


class Driver:
    """The engine and what can be done with it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Starts the engine."""
        if arguments.pop("ahead", False):
            schedule_ahead()
        if arguments.pop("exact", False):
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        transfer = arguments.pop("kv_transfer_config", None)
        if transfer is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        events = arguments.pop("kv_events_config", None)
        if events is not None:
            arguments["kv_events_config"] = KVEventsConfig(**events)
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.added = 0
        self.slowest_s = 0.0
        if transfer is not None:
            self.half = ours(self.scheduler.connector)._scheduler
        if transfer is not None and self.scheduler.kv_cache_config.kv_cache_groups:
            self.decided = self.half.layerwise_possible
            # What pays depends on the machine; the tests are about what is right.
            self.half.cost_model.chunks_to_load = lambda found, *_: found.chunks

    def groups(self) -> Any:
        """What each group of layers keeps: the kind, its window, how many layers."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        specs = [(group.kv_cache_spec, len(group.layer_names)) for group in groups]
        return [(type(spec).__name__, getattr(spec, "sliding_window", None), count) for spec, count in specs]

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        params: Any = None,
        salt: str | None = None,
        lora: dict[str, Any] | None = None,
        images: Sequence[int] = (),
        named: str | None = None,
        **more: Any,
    ) -> list[Any]:
        """Runs prompts together to their ends: tokens, how many were cached, and why it ended."""
        names = self.add(prompts, tokens, params, salt, lora, images, named, **more)
        done = self.until(lambda outputs: len(outputs) == len(names))
        return [done[name] for name in names]

    def add(
        self,
        prompts: list[list[int]],
        tokens: int,
        params: Any = None,
        salt: str | None = None,
        lora: dict[str, Any] | None = None,
        images: Sequence[int] = (),
        named: str | None = None,
        priority: int = 0,
        logprobs: int | None = None,
    ) -> list[str]:
        """Adds requests without running them. `lora` are fields of their adapter's request, `images` seeds
        of pixels, `named` what the client calls them, `priority` 0 goes before 1,
        `logprobs` how many of the prompt's tokens are wanted.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = None if lora is None else LoRARequest(**lora)
        names = []
        for prompt in prompts:
            self.added += 1
            names.append(f"r{self.added}")
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                extra_args=extra,
                prompt_logprobs=logprobs,
            )
            said: dict[str, Any] = {"prompt_token_ids": prompt}
            if salt is not None:
                said["cache_salt"] = salt
            if images:
                said["multi_modal_data"] = {"image": [noise(seed) for seed in images]}
            if named is not None:
                said["multi_modal_uuids"] = {"image": [f"{named} {number}" for number in range(len(images))]}
            self.engine.add_request(names[-1], said, sampling, lora_request=adapter, priority=priority)
        return names

    def one_by_one(self, asked: list[dict[str, Any]], limit_s: float) -> list[Any]:
        """Adds requests, each as `add` does, and runs them to their ends. The next one comes when the one
        before it is loaded in the background, if that says `loads`.
        """
        names: list[str] = []
        for one in asked:
            loads = one.pop("loads", False)
            names += self.add(**one)
            while loads and self.status(names[-1]) != "WAITING_FOR_REMOTE_KVS":
                self.engine.step()
        done = self.until(lambda outputs: len(outputs) == len(names), limit_s)
        return [done[name] for name in names]

    def status(self, name: str) -> Any:
        """What vLLM says that a request does."""
        requests = self.scheduler.requests.values()
        return next(one.status.name for one in requests if one.request_id.split("-")[0] == name)

    def slow(self, seconds: float) -> Any:
        """Ends of loads are heard of so much later, until all is healed."""

        def here(half: Any) -> None:
            half.cache = Slow(half.cache, seconds)

        return self.workers(here)

    def until(self, enough: Any, limit_s: float = 120) -> dict[str, Any]:
        """Steps until it is enough. What a request says of itself comes with its last output."""
        done: dict[str, Any] = {}
        end = time.monotonic() + limit_s
        while not enough(done):
            if time.monotonic() > end:
                raise TimeoutError(f"after {limit_s} s only {sorted(done)} have ended")
            before = time.monotonic()
            outputs = self.engine.step()
            self.slowest_s = max(self.slowest_s, time.monotonic() - before)
            for output in outputs:
                if output.finished:
                    (best,) = output.outputs
                    done[output.request_id.split("-")[0]] = {
                        "tokens": list(best.token_ids),
                        "cached": output.num_cached_tokens,
                        "reason": best.finish_reason,
                        "params": ticket(output.kv_transfer_params),
                    }
        return done

    def embed(self, prompts: list[list[int]]) -> Any:
        """What a model that only encodes makes of prompts."""
        from vllm import PoolingParams

        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        more = {"pooling_task": "embed", "use_tqdm": False}
        said = self.llm.encode(asked, pooling_params=PoolingParams(task="embed"), **more)
        return [one.outputs.data.float().tolist() for one in said]

    def left_alone(self) -> Any:
        """How many requests the connector has left alone."""
        return self.half.counts.totals.get("requests_left_alone", 0)

    def cancel(self, prompts: list[list[int]], tokens: int, after_steps: int) -> Any:
        """Adds requests, steps, and aborts them all."""
        names = self.add(prompts, tokens)
        for _ in range(after_steps):
            self.engine.step()
        running = [request for request in self.scheduler.requests if request.split("-")[0] in names]
        self.engine.abort_request(names)
        self.settle()
        return len(running)

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

    def settle(self, limit_s: float = 60) -> Any:
        """Steps until nothing of any request is left: no block is held for a store, for a load, or for a step
        that is in another stage.
        """
        end = time.monotonic() + limit_s
        while self.scheduler.has_requests() or self.scheduler.requests or self.core.batch_queue:
            if time.monotonic() > end:
                raise TimeoutError(f"after {limit_s} s there are {list(self.scheduler.requests)}")
            self.engine.step()
        return len(self.scheduler.requests)

    def forget(self) -> Any:
        """What vLLM itself has cached is gone."""
        self.settle()
        return bool(self.llm.reset_prefix_cache())

    def reset(self) -> Any:
        """The same, and the connector is told, as with sleep and when weights have changed."""
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def whole_graphs(self) -> Any:
        """How many steps that loaded layer by layer were one CUDA graph, since it was last asked here."""
        from forebay.vllm.connector import compat

        if not hasattr(self, "graphs"):
            self.graphs, look = 0, compat.runs_whole_graph

            def counted(forward_context: Any) -> bool:
                whole = look(forward_context)
                self.graphs += whole
                return whole

            compat.runs_whole_graph = counted
        graphs, self.graphs = self.graphs, 0
        return graphs

    def policy(self, recompute: bool) -> Any:
        """What vLLM does with a request whose load fails."""
        self.scheduler.recompute_kv_load_failures = recompute
        return True

    def layerwise(self, possible: bool | None) -> Any:
        """Whether the connector may load layer by layer; None: as it decided itself."""
        self.half.layerwise_possible = self.decided if possible is None else possible
        return True

    def is_ahead(self) -> Any:
        """Whether steps are scheduled before the tokens of the last one are known."""
        return bool(self.core.vllm_config.scheduler_config.async_scheduling)

    def wait_for_handovers(self, seconds: float) -> Any:
        """How long the engine waits for the chunks of a ticket."""
        self.half.matcher.settings = replace(self.half.matcher.settings, handover_wait_s=seconds)
        return True

    def connected(self) -> Any:
        """Whether all parts of the connector have found the node."""
        return self.half.node.is_connected and all(self.workers(lambda half: half.cache.is_connected))

    def aside(self, on: bool) -> Any:
        """Whether the connector leaves the engine to itself: nothing is loaded and nothing stored."""
        self.half.loads_kv = self.half.stores_kv = not on
        return True

    def role(self, loads: bool) -> Any:
        """Whether the engine is a `kv_both`, or a `kv_producer`, which only stores."""
        self.half.loads_kv = loads
        return True

    def slowest(self) -> Any:
        """Seconds of the longest step since it was last asked here."""
        found, self.slowest_s = self.slowest_s, 0.0
        return found

    def asks(self) -> Any:
        """How often the connector has told the scheduler of tokens to load, since it was last asked here."""
        if not hasattr(self, "asked"):
            self.asked, match = 0, self.half.match

            def counted(*arguments: Any) -> Any:
                said = match(*arguments)
                self.asked += said[0] is not None  # None: the node has not answered yet.
                return said

            self.half.match = counted
        asked, self.asked = self.asked, 0
        return asked

    def workers(self, look: Callable[[Any], Any]) -> list[Any]:
        """What `look` says of each worker's half, by rank."""

        def there(_: Any) -> Any:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            return look(ours(get_kv_transfer_group())._worker)

        return list(self.core.collective_rpc(there))

    def record(self) -> Any:
        """Keeps what vLLM publishes of KV blocks from now on, and the requests that come."""
        self.batches: list[Any] = []
        self.requests: list[Any] = []
        self.scheduler.kv_event_publisher.publish = self.batches.append
        add = self.half.request_added

        def added(request: Any) -> None:
            self.requests.append(request)
            add(request)

        self.half.request_added = added
        return True

    def take_events(self) -> Any:
        """Publishes what a step would."""
        events = list(self.scheduler.connector.take_events())
        if events:
            self.scheduler.kv_event_publisher.publish(SimpleNamespace(events=events))
        return len(events)

    def published(self) -> Any:
        """The events since the last time."""
        from msgspec.structs import asdict

        batches, self.batches[:] = list(self.batches), []
        return [
            asdict(event) | {"type": type(event).__name__}
            for batch in batches
            for event in batch.events
            if getattr(event, "medium", None) is not None
        ]

    def tokens_of(self, block: int) -> Any:
        """The tokens up to the end of a block that vLLM calls this."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        size = self.scheduler.hash_block_size
        for request in self.requests:
            names = [maybe_convert_block_hash(one) for one in request.block_hashes]
            if block in names:
                return list(request.all_token_ids[: (names.index(block) + 1) * size])
        return None

    def found(self) -> Any:
        """The blocks, as vLLM calls them, of those chunks of the requests that came that the node has."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        from forebay.vllm.connector.media import media_of
        from forebay.vllm.connector.tracked import ChunkIds

        names = set()
        for request in self.requests:
            facts = self.half.facts
            namespaces = facts.namespaces(request.cache_salt, facts.shape)
            media = media_of(request, facts.media)
            if media is None:
                continue
            ids = ChunkIds(facts.shape, namespaces, facts.chunk_tokens, media)
            ids.grow(request.all_token_ids)
            blocks = facts.chunk_tokens // self.scheduler.hash_block_size
            for number, parts in enumerate(zip(*ids.ranks, strict=True)):
                if all(self.half.node.lookup([one]) for one in parts):
                    of_chunk = request.block_hashes[number * blocks : (number + 1) * blocks]
                    names.update(maybe_convert_block_hash(one) for one in of_chunk)
        return sorted(names)

    def stats(self) -> Any:
        """The counters of both halves, those of all workers together."""
        mine = {f"totals_{name}": count for name, count in self.half.counts.totals.items()}
        theirs = self.workers(lambda half: half.cache.stats())
        return {name: sum(of_one[name] for of_one in theirs) for name in theirs[0]} | mine

    def serialize_stats(self) -> Any:
        """As between processes: vLLM's MultiConnector counts on it that a front end gets what was sent."""
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        make = self.scheduler.make_stats

        def sent(*arguments: Any, **named: Any) -> Any:
            stats = make(*arguments, **named)
            return stats and MsgpackDecoder(type(stats)).decode(MsgpackEncoder().encode(stats))

        self.scheduler.make_stats = sent
        return True

    def metrics(self) -> Any:
        """What vLLM's page of metrics says of Forebay."""
        from prometheus_client import REGISTRY

        families = [one for one in REGISTRY.collect() if one.name.startswith("vllm:forebay_")]
        return {one.name: sum(x.value for x in one.samples if x.name.endswith("_total")) for one in families}

    def counted(self) -> Any:
        """What vLLM has counted since this was asked first: of prompts, what its page of metrics says; of
        caches, what its scheduler gives away. Of that an engine in this process drops what it has of steps
        without an answer, which a server does not.
        """
        if not hasattr(self, "given"):
            self.given: dict[str, float] = {}
            make = self.scheduler.make_stats

            def kept(*arguments: Any, **named: Any) -> Any:
                stats = make(*arguments, **named)
                for cache in ("prefix_cache", "connector_prefix_cache"):
                    of_cache = getattr(stats, f"{cache}_stats")
                    for what in ("queries", "hits"):
                        name = f"{cache}_{what}"
                        self.given[name] = self.given.get(name, 0) + getattr(of_cache, what)
                return stats

            self.scheduler.make_stats = kept
        return self.given | self.prompts()

    def prompts(self) -> dict[str, float]:
        """What vLLM's page of metrics says of prompts."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            name = family.name.removeprefix("vllm:")
            if name in ("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source"):
                for sample in family.samples:
                    if sample.name.endswith("_total"):
                        key = sample.labels.get("source", name)
                        found[key] = found.get(key, 0.0) + sample.value
        return found

    def sources(self) -> Any:
        """What the page of metrics says of where hits came from. Older versions do not say it."""
        from prometheus_client import REGISTRY

        families = [one for one in REGISTRY.collect() if one.name == "vllm:prompt_tokens_cached_by_source"]
        samples = [x for one in families for x in one.samples if x.name.endswith("_total") and x.value]
        return {x.labels["source"]: x.value for x in samples}

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
            if isinstance(half.cache, Spoiled | Slow):
                half.cache = half.cache.cache
            states = getattr(half.cache, "states", None)
            if isinstance(states, Spoiled):
                half.cache.states = states.cache

        return self.workers(here)

    def digests(self, prompt: list[int], end: int) -> Any:
        """Of what vLLM's own cache has of a prompt up to a token: a group's blocks in order, layer by layer;
        of a group with states, the last block alone. None where it has not all of it.
        """
        import torch

        (name,) = self.add([prompt], 1)
        (request,) = (one for one in self.scheduler.requests.values() if one.request_id.split("-")[0] == name)
        hashes = request.block_hashes
        self.until(lambda outputs: len(outputs) == 1)
        pool = self.scheduler.kv_cache_manager.block_pool
        layers = self.core.vllm_config.compilation_config.static_forward_context
        found = []
        for number, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups):
            first = end // group.kv_cache_spec.block_size - 1 if is_state(group.kv_cache_spec) else 0
            names = hashes[first : end // group.kv_cache_spec.block_size]
            blocks = [pool.get_cached_block(one, [number]) for one in names]
            if not all(blocks):
                return None
            digest = hashlib.sha256()
            for layer in group.layer_names:
                for tensor in parts_of(layers[layer].kv_cache):
                    for (block,) in blocks:
                        digest.update(tensor[block.block_id].flatten().view(torch.uint8).cpu().numpy())
            found.append(digest.hexdigest())
        return found

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

    def preemptions(self) -> Any:
        """How often requests lost their blocks. Counted from the first call on."""
        if not hasattr(self, "preempted"):
            self.preempted, preempt = 0, self.scheduler._preempt_request

            def counted(*arguments: Any, **more: Any) -> Any:
                self.preempted += 1
                return preempt(*arguments, **more)

            self.scheduler._preempt_request = counted
        return self.preempted


def schedule_ahead() -> None:
    """Has vLLM on CPUs schedule a step before it knows the tokens of the last one, as it does on GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_leave(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_leave)


def noise(seed: int) -> Any:
    """A picture that nothing else looks like."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (224, 224, 3), dtype=np.uint8))


def ticket(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a prefiller gives. Newer vLLMs add what it had cached itself; a decoder that is shown this says it
    of itself, instead of what it has loaded.
    """
    return params and {name: said for name, said in params.items() if name != "remote_prefill_cached_tokens"}


def ours(connector: Any) -> Any:
    """Forebay's connector, which may be one of several."""
    several = getattr(connector, "_connectors", [connector])
    return next(one for one in several if type(one).__name__ == "ForebayConnector")


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


def spoil(tensors: list[Any], blocks: Iterable[int]) -> None:
    """Writes noise."""
    import torch

    for block in blocks:
        for tensor in tensors:
            tensor[block].copy_(100 * torch.rand(tensor[block].shape))  # Elements may be of a byte.


def is_state(spec: Any) -> bool:
    """Whether a group has states instead of KV."""
    return type(spec).__name__ == "MambaSpec"


def parts_of(cache: Any) -> list[Any]:
    """The tensors of a layer: one with KV, or those of its states."""
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def main() -> None:
    """Reads lines until there are none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if driver is None:
                driver, answer = Driver(order), "ready"
            else:
                answer = getattr(driver, order.pop("do"))(**order)
            said = {"answer": answer}
        except Exception as error:  # The test says what was wrong; the process goes on.
            import traceback

            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
