"""One vLLM, told by lines of JSON what to do. The tests start it under the Python that has vLLM.

A line is {"do": METHOD, ...}, and its answer is one line. The first line is the arguments of `LLM`.
What vLLM prints goes to standard error. The connector's scheduler half is in this process, the
workers' halves are where the executor has them.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from driver_counts import Counts
from driver_drafts import draft_over_states, draft_what_is_known, know, spoil_some_drafts
from driver_faults import Faults, parts_of


class Driver(Counts, Faults):
    """The engine and what can be done with it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Starts the engine."""
        if arguments.pop("ahead", False):
            schedule_ahead()
        kept = arguments.pop("drafts_over_states", None)
        if kept is not None:
            draft_over_states(columns=kept == "columns")
        knows_drafts = arguments.pop("drafts", False)
        if arguments.pop("some_drafts_wrong", False):
            spoil_some_drafts()
        if not arguments.pop("states_in_steps", True):
            only_states_at_ends_of_steps()
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
        if knows_drafts:
            draft_what_is_known()
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

    def generate(self, **asked: Any) -> list[Any]:
        """Adds requests as `add` does, and runs them together to their ends: tokens, how many were cached,
        and why it ended.
        """
        names = self.add(**asked)
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

    def cancel(self, prompts: list[list[int]], tokens: int, after_steps: int) -> Any:
        """Adds requests, steps, and aborts them all."""
        names = self.add(prompts, tokens)
        for _ in range(after_steps):
            self.engine.step()
        running = [request for request in self.scheduler.requests if request.split("-")[0] in names]
        self.engine.abort_request(names)
        self.settle()
        return len(running)

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

    def cut(self, at: list[int]) -> Any:
        """Steps end at these tokens of a request, which is alone, as long as they have room for them."""
        if not hasattr(self, "cuts"):
            schedule, most = self.scheduler.schedule, self.scheduler.max_num_scheduled_tokens

            def cut(*arguments: Any, **more: Any) -> Any:
                computed = max(
                    (one.num_computed_tokens for one in self.scheduler.requests.values()), default=0
                )
                room = next((end - computed for end in self.cuts if end > computed), most)
                self.scheduler.max_num_scheduled_tokens = min(room, most)
                return schedule(*arguments, **more)

            self.scheduler.schedule = cut
        self.cuts = at
        return True

    def policy(self, recompute: bool) -> Any:
        """What vLLM does with a request whose load fails."""
        self.scheduler.recompute_kv_load_failures = recompute
        return True

    def layerwise(self, possible: bool | None) -> Any:
        """Whether the connector may load layer by layer; None: as it decided itself."""
        self.half.layerwise_possible = self.decided if possible is None else possible
        return True

    def loads_take(self, seconds: float | None) -> Any:
        """How long the connector thinks that each load takes; None: what it has measured."""
        if seconds is None:
            self.half.cost_model.__dict__.pop("load_s", None)
        else:
            self.half.cost_model.load_s = lambda *_: seconds
        return True

    def know(self, sequences: list[list[int]]) -> Any:
        """Drafts are as in these from now on."""
        know(sequences)
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


def schedule_ahead() -> None:
    """Has vLLM on CPUs schedule a step before it knows the tokens of the last one, as it does on GPUs."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_leave(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_leave)


def only_states_at_ends_of_steps() -> None:
    """Has layers of Mamba2 give no states from within a step. Those of 0.33 do, and its kernel for CPUs,
    which gives the last state alone, fails.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec_of = MambaMixer2.get_kv_cache_spec

    def without(self: Any, vllm_config: Any) -> Any:
        spec = spec_of(self, vllm_config)
        if not hasattr(spec, "num_prefill_checkpoint_blocks"):
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = without


def noise(seed: int) -> Any:
    """A picture that nothing else looks like."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (224, 224, 3), dtype=np.uint8))


def ticket(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a prefiller gives. From 0.32 on vLLM adds what it had cached itself; a decoder that is shown this
    says it of itself, instead of what it has loaded.
    """
    return params and {name: said for name, said in params.items() if name != "remote_prefill_cached_tokens"}


def ours(connector: Any) -> Any:
    """Forebay's connector, which may be one of several."""
    several = getattr(connector, "_connectors", [connector])
    return next(one for one in several if type(one).__name__ == "ForebayConnector")


def is_state(spec: Any) -> bool:
    """Whether a group has states instead of KV."""
    return type(spec).__name__ == "MambaSpec"


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
