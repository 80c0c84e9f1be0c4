"""An engine without kernels: vLLM's scheduler and the connector over a model's pages.

It does in a step what vLLM's model runners do, in their order. In place of the model it writes what
the model would leave in its pages (`pages.Pages.compute`), and before that looks at all that the
model would read (`read`). Tokens follow from the prompt.
"""

import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from forebay.vllm.connector import ForebayConnector, compat
from layouts import configs
from layouts.pages import Count, Pages, Seen

LIMIT_S = 60.0


class Worker:
    """One rank."""

    def __init__(self, engine: "Engine", rank: int) -> None:
        self.engine, self.rank = engine, rank
        config = engine.kv_configs[rank]
        self.tensors = configs.allocate(engine.config, config)
        self.pages = Pages(config, self.tensors, rank, engine.model.pools)
        compat.world = lambda _: (rank, engine.ranks)
        self.connector = ForebayConnector(engine.config, KVConnectorRole.WORKER, config)
        try:
            self.connector.register_kv_caches(self.tensors)
        except BaseException:
            self.connector.shutdown()
            raise
        self.count = Count()
        self.looked: dict[str, Count] = {}  # in this step, by request

    def run(self, output: Any) -> ModelRunnerOutput:
        """A step."""
        step, connector = pickle.loads(pickle.dumps(output.kv_connector_metadata)), self.connector
        connector.handle_preemptions(step)
        for copy in output.kv_cache_block_copies or ():
            for group in self.pages.layers:
                for _, _, pages in group:
                    pages[copy.dst_block_id] = pages[copy.src_block_id]
        connector.bind_connector_metadata(step)
        busy = {} if output.total_num_scheduled_tokens else None
        context = SimpleNamespace(attn_metadata=busy, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        if output.has_sync_kv_loads:
            connector.start_load_kv(context)
        self.looked = {}
        for name, request, start, count in self.engine.scheduled(output):
            wait = connector.wait_for_layer_load if connector.has_connector_metadata() else lambda _: None
            self.looked[name] = self.pages.read(request, start, wait)
            self.pages.compute(request, start, start + count)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=[self.engine.sampled(output, name) for name in names],
            kv_connector_output=said,
        )


class Engine:
    """A model on `tp` ranks, with a node."""

    def __init__(self, model: configs.Model, node: Any, tp: int = 1, **extra: Any) -> None:
        self.model, self.ranks = model, tp
        transfer = {
            "kv_connector": "ForebayConnector",
            "kv_connector_module_path": "forebay.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "node": str(node),
                "weights_digest": "34" * 32,
                "gate": False,
                "handover_wait_s": 1,
                "layout": model.layout,
                **extra,
            },
        }
        self.config = configs.vllm_config(model, tp, transfer)
        self.kv_configs = configs.kv_cache_configs(self.config)
        # All that vLLM's scheduler knows: of layers that differ, the first of a group.
        kv_config = generate_scheduler_kv_cache_config(self.kv_configs)
        sizes = [
            group.kv_cache_spec.block_size
            for group in kv_config.kv_cache_groups
            if group.kv_cache_spec.prefix_cacheable
        ]
        self.config.cache_config.block_size = min(sizes)
        block, hashed = resolve_kv_cache_block_sizes(kv_config, self.config)
        for one in self.kv_configs:
            one.hash_block_size = hashed
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hashed, sha256)
        self.aggregator = KVOutputAggregator(tp)
        self.asked: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}  # the prompts' names
        self.answers: dict[str, Any] = {}  # what a prefiller hands over
        self.loaded: dict[str, int] = {}  # tokens that a request did not compute
        self.ends: dict[str, set[int]] = {}  # where its steps have ended
        self.stood: dict[str, int] = {}  # where the requests of a step stood before it
        # Called once, before the next load begins.
        self.when_loading: Callable[[], None] | None = None
        self.undone = 0  # wrong bytes that were read in vain
        self.workers: list[Worker] = []
        self.scheduler: Any = None
        try:
            with set_current_vllm_config(self.config):
                for rank in range(tp):
                    self.workers.append(Worker(self, rank))
                self.scheduler = self.start_scheduler(kv_config, block, hashed)
        except BaseException:
            self.close()
            raise

    def start_scheduler(self, kv_config: Any, block: int, hashed: int) -> Scheduler:
        grammar = SimpleNamespace(should_advance=lambda _: False, accept_tokens=lambda *_: True)
        return Scheduler(self.config, kv_config, grammar, block_size=block, hash_block_size=hashed)

    @property
    def half(self) -> Any:
        return self.scheduler.connector._scheduler

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.half.facts.chunk_tokens

    def add(
        self, name: str, prompt: int, tokens: int, answer: int = 1, params: dict[str, Any] | None = None
    ) -> None:
        """A request of so many tokens. The number says which."""
        more = None if params is None else {"kv_transfer_params": params}
        request = Request(
            name,
            [3 + (prompt * 7919 + place * place) % 30000 for place in range(tokens)],
            SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=more),
            None,
            block_hasher=self.hasher,
        )
        self.asked[name], self.tokens[name] = request, prompt
        self.scheduler.add_request(request)

    def scheduled(self, output: Any) -> list[tuple[str, Seen, int, int]]:
        """The requests of a step: where they stood before it, and how many tokens it computes."""
        stood = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        stood |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.asked[name]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            seen = Seen(self.tokens[name], request.num_prompt_tokens, tables, request.replay_start)
            found.append((name, seen, stood[name], count))
            self.ends.setdefault(name, set()).add(stood[name] + count)
        self.stood = stood
        return found

    def sampled(self, output: Any, name: str) -> list[int]:
        """A token, once all that are known are computed."""
        request = self.asked[name]
        return [3 + request.num_tokens % 1000] if request.num_computed_tokens >= request.num_tokens else []

    def step(self) -> None:
        with set_current_vllm_config(self.config):
            output = self.scheduler.schedule()
            if self.when_loading is not None and output.kv_connector_metadata.loads:
                self.when_loading()
                self.when_loading = None
            said = self.aggregator.aggregate([worker.run(output) for worker in self.workers])
            told = self.scheduler.update_from_output(output, said)
        self.note_looks(output)
        for of_client in told.values():
            for one in of_client.outputs:
                if one.kv_transfer_params:
                    self.answers[one.request_id] = one.kv_transfer_params

    def note_looks(self, output: Any) -> None:
        """Counts what the step's requests have read, but for those that have to start over.

        A load that the step waited for may have failed: what was computed from it counts for nothing.
        """
        for name in output.num_scheduled_tokens:
            request = self.asked[name]
            undone = not request.is_finished() and request.num_computed_tokens <= self.stood[name]
            if not undone:
                self.loaded.setdefault(name, self.stood[name])
            for worker in self.workers:
                if undone:
                    self.undone += worker.looked[name].wrong
                else:
                    worker.count.add(worker.looked[name])

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, "it did not come about in time"
            self.step()

    def run(self) -> None:
        """Until all requests have ended and all stores."""
        self.until(lambda: not self.scheduler.has_unfinished_requests())
        self.until(lambda: not (self.half.stores.jobs or self.half.freeing))

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        if self.scheduler is not None:
            self.scheduler.connector.shutdown()
        self.workers.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def wrong(self) -> int:
        return sum(worker.count.wrong for worker in self.workers)

    @property
    def compared(self) -> int:
        return sum(worker.count.compared for worker in self.workers)
