"""Speculative decoding: tokens are those of vLLM alone without drafts, whatever was stored behind drafts.

Prompts repeat themselves, so that their n-grams are drafts that are accepted. Some go on with what was said
before, so that what is loaded was stored behind drafts. Blocks are few: requests lose theirs and begin again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, Engine, arguments, prompt, transfer

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPTS = [(prompt(seed, 40) * 12)[: 200 + 37 * (seed % 7)] for seed in range(100, 112)]
SAID = 60


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM says without a connector and without drafts."""
    folder = tmp_path_factory.mktemp("alone")
    with Engine(arguments(model, enable_prefix_caching=False), folder / "log") as engine:
        return [engine.generate(prompts=[tokens], tokens=SAID)[0]["tokens"] for tokens in PROMPTS]


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    more = {"speculative_config": NGRAMS, "scheduling_policy": "priority"}
    with Daemon(tmp_path / "node") as node:
        with Engine(arguments(model, transfer(node.socket), **more), tmp_path / "log") as made:
            yield made


def test_what_is_said_is_what_the_model_says_alone(engine: Engine, alone: list[list[int]]) -> None:
    engine.preemptions()
    loads = engine.stats()["loads"]
    for cut in (0, 0, SAID // 2):
        whole = [tokens + said[:cut] for tokens, said in zip(PROMPTS, alone, strict=True)]
        for said, right in zip(engine.generate(prompts=whole, tokens=SAID - cut), alone, strict=True):
            assert said["tokens"] == right[cut:]
        assert engine.forget()
    assert engine.stats()["loads"] > loads and engine.preemptions() > 0
