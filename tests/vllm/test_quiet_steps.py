"""Steps with nothing to do: the scheduler's half looks at no request in them, and misses no chunk."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK, facts  # noqa: E402

from forebay.vllm.connector.config import settings_of  # noqa: E402
from forebay.vllm.connector.scheduler import SchedulerHalf  # noqa: E402


class Half(SchedulerHalf):
    """The scheduler's half of an engine that is not there."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                engine_id="one",
                kv_connector="ForebayConnector",
                is_kv_consumer=True,
                is_kv_producer=True,
                kv_load_failure_policy="recompute",
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, world_size=1, data_parallel_size=1),
            scheduler_config=SimpleNamespace(async_scheduling=False, max_num_batched_tokens=512),
            model_config=SimpleNamespace(max_model_len=8192),
            speculative_config=None,
            lora_config=None,
        )
        node: Any = SimpleNamespace(
            used=lambda ids, chunk_bytes: None,
            describe=lambda fields, chunk_tokens, labels: None,
            note_outcome=lambda request, reason, **numbers: None,
            close=lambda: None,
        )
        super().__init__(config, facts(), settings_of({}), node, 1000)


class Request(SimpleNamespace):
    """vLLM's request. It counts how often it is asked how far it is."""

    looks = 0
    computed = 0

    @property
    def num_computed_tokens(self) -> int:
        Request.looks += 1
        return self.computed


def a_request(name: str, prompt_tokens: int, tokens: int, **more: Any) -> Request:
    """One that has so many tokens, of which the first are its prompt."""
    given: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(range(prompt_tokens)),
        "all_token_ids": list(range(tokens)),
        "num_prompt_tokens": prompt_tokens,
        "num_tokens": tokens,
        "num_preemptions": 0,
        "num_in_flight_tokens": 0,
        "prompt_embeds": None,
        "resumable": False,
        "mm_features": [],
        "pooling_params": None,
        "lora_request": None,
        "cache_salt": None,
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
        "prefill_stats": None,
        "status": SimpleNamespace(name="FINISHED_STOPPED"),
    }
    return Request(**given | more)


class Engine:
    """Requests that decode, each step some of them, as vLLM's scheduler tells of them."""

    def __init__(self) -> None:
        self.half, self.requests, self.steps = Half(), {}, 0

    def add(self, name: str, prompt_tokens: int, cached: int = 0) -> None:
        """A request, of which vLLM itself has so many tokens."""
        request = a_request(name, prompt_tokens, 5000)
        self.requests[name], request.computed = request, cached
        self.half.request_added(request)
        blocks = [[SimpleNamespace(is_null=False, block_id=1 + block) for block in range(5000 // BLOCK)]]
        self.half.blocks_allocated(request, SimpleNamespace(blocks=blocks), 0)

    def step(self, tokens: dict[str, int]) -> None:
        """Computes so many tokens of each. A chunk is known in the step that ends it."""
        cached = SimpleNamespace(
            req_ids=list(tokens), new_block_ids=[None] * len(tokens), resumed_req_ids=set()
        )
        self.half.build_step(
            SimpleNamespace(
                scheduled_cached_reqs=cached,
                scheduled_new_reqs=[],
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()),
                preempted_req_ids=None,
            )
        )
        self.steps += 1
        for name, count in tokens.items():
            self.requests[name].computed += count
            assert self.half.tracked[name].goal == self.requests[name].computed // CHUNK, name

    def finish(self, name: str) -> None:
        self.half.request_finished(self.requests.pop(name), ([],))


def test_requests_that_only_decode_are_looked_at_when_they_end_a_chunk() -> None:
    engine = Engine()
    for number in range(8):
        engine.add(str(number), 30 + number)
        engine.step({str(number): 30 + number})
    Request.looks = 0
    for _ in range(4 * CHUNK):
        engine.step(dict.fromkeys(engine.requests, 1))
    assert 0 < Request.looks < 8 * 4 * CHUNK / 4


@pytest.mark.parametrize("seed", range(20))
def test_no_chunk_is_missed_whoever_comes_goes_and_pauses(seed: int) -> None:
    draw, engine = random.Random(seed), Engine()
    for step in range(600):
        if draw.random() < 0.03:
            others = dict.fromkeys(engine.requests, 1)
            engine.add(str(step), draw.randrange(1, 100), draw.randrange(CHUNK))
            engine.step({str(step): draw.choice((1, 90))} | others)
        if len(engine.requests) > 3 and draw.random() < 0.03:
            engine.finish(draw.choice(list(engine.requests)))
        names = [name for name in engine.requests if step % 50 > 10 or draw.random() < 0.7]
        tokens = {name: 1 if step % 50 else draw.randrange(1, 3) for name in names}
        engine.step(tokens)
