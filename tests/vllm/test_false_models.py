"""Models whose files do not fit together: vLLM refuses them, or says something else with them, and then the
connector shares nothing with the true model and changes nothing of what vLLM says.

What a layer keeps the connector takes from the engine and not from the model's file. The file is in the
name of all chunks.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, CHUNK, EXACT, HERE, PYTHON, Daemon, Engine, arguments, prompt, transfer

pytestmark = pytest.mark.long

PROMPT, SAID = prompt(1, 400), 8
ROOM = {"num_gpu_blocks_override": 8192 // BLOCK}

# What a model's file says instead, and whether vLLM can run that.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("glm-4", {"num_key_value_heads": 4}),
    ("glm-4", {"num_hidden_layers": 2}),
    ("glm-4", {"num_hidden_layers": 4}),
    ("gemma-3", {"num_hidden_layers": 5}),
    ("qwen-3-next", {"layer_types": ["full_attention"] * 4}),
    ("qwen-3-next", {"layer_types": ["linear_attention"] * 3}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("glm-4", {"num_key_value_heads": 1}),  # vLLM takes a part of the weights
    ("glm-4", {"head_dim": 32}),
    ("gemma-3", {"sliding_window": 64}),
    ("gemma-3", {"layer_types": ["full_attention"] * 6}),
    ("gemma-3", {"layer_types": ["sliding_attention"] * 6}),
    ("gpt-oss", {"layer_types": ["full_attention"] * 4}),  # vLLM goes by the numbers of layers
    ("llama-4", {"attention_chunk_size": 64}),
]


class Site:
    """Models, a node, and what it takes to start engines."""

    def __init__(self, folder: Path, node: Daemon) -> None:
        self.folder, self.node, self.numbers = folder, node, count()

    def model(self, name: str, **says: Any) -> Path:
        """The true model, or one with the same weights whose file says something else."""
        if not says:
            return self.folder / name
        other = self.folder / f"{name}-{next(self.numbers)}"
        shutil.copytree(self.folder / name, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | says))
        return other

    def start(self, model: Path, stores: bool, **more: Any) -> Engine:
        """An engine with the connector, or without it."""
        dtype = {"dtype": "bfloat16"} if "qwen" in model.name else {}
        connector = transfer(self.node.socket) if stores else None
        given = arguments(model, connector, enable_prefix_caching=stores, **ROOM, **dtype, **EXACT)
        return Engine(given | more, self.folder / f"log-{next(self.numbers)}")

    def ask(self, engine: Engine) -> dict[str, Any]:
        """The prompt, of which vLLM itself has kept nothing. Returns when it is stored."""
        assert engine.forget()
        (said,) = engine.generate(prompts=[PROMPT], tokens=SAID)
        engine.settle()
        return dict(said)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("false")
    names = sorted({name for name, _ in REFUSED + OTHERS} | {"llama"})
    make = [PYTHON, str(HERE / "tiny_kinds.py")]
    subprocess.run([*make, str(folder), *names], check=True)
    subprocess.run([*make, str(folder / "others"), "llama", "--seed", "9"], check=True)
    with Daemon(folder / "node") as node:
        yield Site(folder, node)


@pytest.mark.parametrize(("name", "says"), REFUSED, ids=str)
def test_a_file_that_contradicts_the_weights_is_refused(site: Site, name: str, says: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=".*Error: "):
        site.start(site.model(name, **says), stores=True)


@pytest.mark.parametrize(("name", "says"), OTHERS, ids=str)
def test_a_file_that_vllm_believes_is_another_model(site: Site, name: str, says: dict[str, Any]) -> None:
    false = site.model(name, **says)
    with ThreadPoolExecutor() as threads:
        starts = [
            threads.submit(site.start, *one)
            for one in ((site.model(name), True), (false, False), (false, True))
        ]
    true, alone, stored = engines = [start.result() for start in starts]
    try:
        assert site.ask(true)["tokens"] == site.ask(true)["tokens"]
        plain = site.ask(alone)["tokens"]
        cold, warm = site.ask(stored), site.ask(stored)
        assert cold["cached"] == 0, "it found what the true model has stored"
        assert warm["cached"] == len(PROMPT) // CHUNK * CHUNK
        assert cold["tokens"] == warm["tokens"] == plain
    finally:
        for engine in engines:
            engine.kill()


def drafts(method: str, drafter: Path) -> dict[str, Any]:
    """How vLLM is told of a drafter."""
    config = {"method": method, "num_speculative_tokens": 3, "model": str(drafter)}
    return {"speculative_config": config}


def test_a_drafter_of_another_vocabulary_is_refused(site: Site) -> None:
    drafter = site.model("llama", vocab_size=512)
    with pytest.raises(AssertionError, match="should have the same vocabulary size"):
        site.start(site.model("llama"), stores=True, **drafts("draft_model", drafter))


def test_drafts_in_a_part_of_the_vocabulary_change_nothing(site: Site) -> None:
    model = site.model("llama")
    drafter = site.model("llama/drafter", vocab_size=512)
    alone, stored = engines = [
        site.start(model, stores=False),
        site.start(model, stores=True, **drafts("eagle", drafter)),
    ]
    try:
        plain = site.ask(alone)["tokens"]
        assert [site.ask(stored)["tokens"] for _ in range(2)] == [plain, plain]
    finally:
        for engine in engines:
            engine.kill()


# The drafter's KV is in the same chunks.
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_engines_whose_drafters_differ_share_nothing(site: Site, method: str) -> None:
    model, drafter = site.model("llama"), "llama" if method == "draft_model" else "llama/drafter"
    for folder in (site.folder / "others", site.folder):
        with site.start(model, stores=True, **drafts(method, folder / drafter)) as engine:
            assert site.ask(engine)["cached"] == 0
