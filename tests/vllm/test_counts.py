"""What vLLM counts of its caches is what came of it: for the page of metrics, and in answers.

Loads fail, and requests are not looked for; vLLM has counted by then.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import AHEAD, ASKED, CHUNK, Daemon, Engine, arguments, prompt, transfer

PROMPT, SAID = prompt(3, 1400), 8
WHOLE = len(PROMPT) // CHUNK * CHUNK


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One that counts, where steps are scheduled when the last one's tokens are known, or before."""
    folder = tmp_path_factory.mktemp("counts")
    more = {"disable_log_stats": False} | (AHEAD if request.param else {"async_scheduling": False})
    with Daemon(folder / "node") as node:
        with Engine(arguments(model, transfer(node.socket), **more), folder / "log") as made:
            yield made


def counts(engine: Engine, tokens: list[int], **more: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """What an engine that has forgotten all says to a prompt, and what it has counted of that."""
    engine.settle()
    assert engine.forget()
    before = engine.counted()
    (said,) = engine.generate(prompts=[tokens], tokens=SAID, **more)
    engine.settle()
    after = engine.counted()
    return said, {name: count - before.get(name, 0.0) for name, count in after.items()}


def both(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: count + first.get(name, 0.0) for name, count in second.items()}


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("good", [0, 3 * CHUNK])
def test_what_a_failed_load_did_not_bring_was_not_cached_and_is_no_hit(
    engine: Engine, layerwise: bool, good: int
) -> None:
    (said,) = engine.generate(prompts=[PROMPT], tokens=SAID)
    right = said["tokens"]
    engine.layerwise(possible=layerwise)
    engine.spoil(tokens=good)
    said, failed = counts(engine, PROMPT)
    engine.heal()
    assert said["tokens"] == right and said["cached"] == good
    assert failed["local_compute"] == len(PROMPT) - good
    assert failed["prompt_tokens"] == len(PROMPT)
    # A step that is scheduled ahead has told its hits before anybody knows: they come off the next
    # ones.
    said, whole = counts(engine, PROMPT)
    engine.layerwise(possible=None)
    assert said["cached"] == WHOLE
    total = both(failed, whole)
    assert total["connector_prefix_cache_hits"] == good + WHOLE
    assert total["connector_prefix_cache_queries"] == 2 * len(PROMPT)


def test_what_others_had_of_a_failed_load_was_not_cached_either(engine: Engine) -> None:
    """They have got its blocks from vLLM's own cache, in the step that loads."""
    names = ("left", "right", "middle")
    prompts = [ASKED[name][0] for name in names]
    for tokens in prompts:
        engine.generate(prompts=[tokens], tokens=SAID)
    engine.settle()
    assert engine.forget()
    before = engine.counted()
    with engine.spoiled(layerwise=True, tokens=0):
        said = engine.generate(prompts=prompts, tokens=SAID)
    engine.settle()
    after = engine.counted()
    # One of them computes what all begin with, 320 tokens, and may share that.
    assert min(one["cached"] for one in said) == 0 and max(one["cached"] for one in said) <= 320
    cached = sum(one["cached"] for one in said)
    assert after["prompt_tokens_cached"] - before["prompt_tokens_cached"] == cached
    computed = after["local_compute"] - before["local_compute"]
    assert computed == sum(len(tokens) for tokens in prompts) - cached


@pytest.mark.parametrize("why", ["logprobs of the prompt", "it only stores"])
def test_a_request_that_may_not_load_is_no_miss(engine: Engine, why: str) -> None:
    engine.generate(prompts=[PROMPT], tokens=SAID)
    if why == "it only stores":
        engine.role(loads=False)
        _, counted = counts(engine, PROMPT)
        engine.role(loads=True)
    else:
        _, counted = counts(engine, PROMPT, logprobs=1)
    assert counted["prompt_tokens"] == counted["local_compute"] == len(PROMPT)
    assert counted["connector_prefix_cache_queries"] == 0
    _, counted = counts(engine, prompt(4, 500))
    assert counted["connector_prefix_cache_queries"] == 500, "one that may load is one"
