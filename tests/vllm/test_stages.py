"""Two pipeline stages: each has half of the layers and chunks of its own, and while one step is in the second
stage the next one is in the first. The tokens are those of one rank, whatever was loaded.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    ASKED,
    CHUNK,
    ENGINE_S,
    ENVIRONMENT,
    ON_GPU,
    PYTHON,
    VLLM,
    Daemon,
    Engine,
    arguments,
    need_gpus,
    prompt,
    transfer,
    whole,
)

why = "SKIPPED: vLLM alone fails with two stages on a CPU, from 0.32 on"
pytestmark = pytest.mark.skipif(VLLM >= (0, 32) and not ON_GPU, reason=why)

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def profiled(model: Path, folder: Path) -> Path:
    """What `forebay.vllm.profile` says of such an engine. The one with the connector begins with it."""
    given = arguments(model, **STAGES, max_model_len=64)
    out = folder / "profile.json"
    command = [PYTHON, "-m", "forebay.vllm.profile", "--model", given.pop("model"), "--out", str(out)]
    command += ["--engine", json.dumps(given)]
    subprocess.run(command, check=True, env=os.environ | ENVIRONMENT, timeout=ENGINE_S, capture_output=True)
    return out


@pytest.fixture(scope="module")
def engine(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    need_gpus(2)
    folder = tmp_path_factory.mktemp("stages")
    with Daemon(folder / "node") as node:
        profile = transfer(node.socket, profile=str(profiled(model, folder)))
        with Engine(arguments(model, profile, **STAGES), folder / "log") as made:
            yield made


def ask(engine: Engine, *names: str) -> list[dict]:
    """All of them together; of none of them vLLM itself has kept anything. Returns when they are stored."""
    assert engine.forget()
    said = engine.generate(prompts=[ASKED[name][0] for name in names], tokens=ASKED[names[0]][1])
    engine.settle()
    return said


@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_each_stage_stores_and_loads_its_own_layers(
    engine: Engine, plain: dict[str, list[int]], name: str
) -> None:
    before = engine.stats()
    (cold,) = ask(engine, name)
    stored = engine.stats()
    (warm,) = ask(engine, name)
    after = engine.stats()
    assert cold["tokens"] == plain[name] == warm["tokens"]
    chunks = (len(ASKED[name][0]) + ASKED[name][1] - 1) // CHUNK
    assert cold["cached"] == 0 and stored["stores_done"] - before["stores_done"] == 2 * chunks
    assert warm["cached"] in (whole(name), len(ASKED[name][0]) - 1)
    assert after["loads"] == stored["loads"] + 2 and after["loads_short"] == before["loads_short"]


def test_requests_in_both_stages_that_lose_their_blocks_say_the_same(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    before = engine.preemptions()
    names = [name for name in ASKED if name.startswith("crowd")]
    for _ in range(2):
        for name, said in zip(names, ask(engine, *names), strict=True):
            assert said["tokens"] == plain[name], name
    assert engine.preemptions() > before, "there was room for all"


def test_cancelled_requests_leave_nothing_behind(engine: Engine, plain: dict[str, list[int]]) -> None:
    ask(engine, "left")
    for steps in range(6):
        assert engine.forget()
        prompts = [ASKED["left"][0], prompt(40 + steps, 700)]
        engine.cancel(prompts=prompts, tokens=50, after_steps=steps)
    (said,) = ask(engine, "left")
    assert said["tokens"] == plain["left"] and said["cached"] == whole("left")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_at_one_stage_has_failed_at_both(
    engine: Engine, plain: dict[str, list[int]], rank: int
) -> None:
    ask(engine, "right")
    before = engine.stats()
    with engine.spoiled(tokens=3 * CHUNK, rank=rank):
        (said,) = ask(engine, "right")
    after = engine.stats()
    assert said["tokens"] == plain["right"]
    assert after["totals_loads_failed"] == before.get("totals_loads_failed", 0) + 1
    assert ask(engine, "right")[0]["cached"] == whole("right")


def test_a_prompt_that_was_prefilled_for_another_engine_is_loaded_to_its_end(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    tokens, count = ASKED["handed"]
    (first,) = engine.generate(prompts=[tokens], tokens=1, params=PREFILL)
    assert engine.forget()
    (said,) = engine.generate(prompts=[tokens], tokens=count, params=first["params"])
    assert said["tokens"] == plain["handed"] and said["cached"] >= len(tokens) - 1
