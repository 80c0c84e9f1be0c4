"""LoRA adapters under one base model: each has KV of its own, by what its files hold and not by its name, and
the tokens are those of a plain run with it.
"""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ASKED, CHUNK, HERE, ON_GPU, PYTHON, Daemon, Engine, arguments, start_together, transfer

PROMPT, COUNT = ASKED["short"]
# Of the one vLLM's own cache has the whole chunks, of the other all but the last token.
TOKENS, HANDED = PROMPT[:590], PROMPT[:593]
WHOLE = len(TOKENS) // CHUNK * CHUNK
ADAPTERS = 3
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 8}
# vLLM's kernels for GPUs want it.
ON_GPUS = {"dtype": "bfloat16"}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Place:
    """An engine, its adapters' folders, and what is right: by adapter, and of the base model at the end.

    On a GPU vLLM may say something else when its own cache has a part of the prompt: fewer tokens are
    computed at once, and rounded otherwise.
    """

    engine: Engine
    folders: list[Path]
    right: list[list[int]]
    right_warm: list[list[int]]
    right_handed: list[int]  # Of the second adapter, when all but the last token is there.

    def ask(
        self, lora: dict[str, Any] | None, tokens: list[int] = TOKENS, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The prompt, of which vLLM itself has kept nothing. Returns when it is stored."""
        assert self.engine.forget()
        (said,) = self.engine.generate(prompts=[tokens], tokens=COUNT, lora=lora, params=params)
        self.engine.settle()
        return dict(said)


def named(name: str, number: int, folder: Path) -> dict[str, Any]:
    """What a request says of its adapter."""
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(folder)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("lora")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(model), "--adapters", str(ADAPTERS)], check=True)
    own = LORA | (ON_GPUS if ON_GPU else {})
    with Daemon(folder / "node") as node:
        stored = arguments(model, transfer(node.socket), **own)
        plain, engine = start_together(folder, plain=arguments(model, **own), log=stored)
        folders = [model / f"adapter{number}" for number in range(ADAPTERS)]
        adapters = [named(f"a{number}", 1 + number, path) for number, path in enumerate(folders)]

        def said(warm: bool) -> list[list[int]]:
            answers = [
                plain.generate(prompts=[TOKENS], tokens=COUNT, lora=lora)[0] for lora in (*adapters, None)
            ]
            assert all((answer["cached"] >= WHOLE) == warm for answer in answers)
            return [answer["tokens"] for answer in answers]

        right, right_warm = said(warm=False), said(warm=True)
        (handed, right_handed) = (
            plain.generate(prompts=[HANDED], tokens=COUNT, lora=adapters[1])[0]["tokens"] for _ in range(2)
        )
        assert handed == right_handed or ON_GPU
        plain.end()
        yield Place(engine, folders, right, right_warm, right_handed)
        engine.end()


def test_each_adapter_and_the_base_model_have_kv_of_their_own(place: Place) -> None:
    assert len({str(tokens) for tokens in place.right}) == ADAPTERS + 1, "they say the same"
    assert place.right_warm == place.right or ON_GPU
    asked: list[tuple[int, dict[str, Any] | None]] = [
        (number, named(f"a{number}", 1 + number, place.folders[number])) for number in range(2)
    ]
    asked.append((-1, None))
    for number, lora in asked:
        cold = place.ask(lora)
        assert cold["tokens"] == place.right[number] and cold["cached"] == 0
    for number, lora in asked:
        warm = place.ask(lora)
        assert warm["tokens"] == place.right_warm[number] and warm["cached"] == WHOLE


def test_an_adapter_of_another_name_from_another_folder_is_the_same_if_its_files_are(
    place: Place, tmp_path: Path
) -> None:
    place.ask(named("a0", 1, place.folders[0]))
    copy = shutil.copytree(place.folders[0], tmp_path / "copy")
    said = place.ask(named("copy", 11, copy))
    assert said["tokens"] == place.right_warm[0] and said["cached"] == WHOLE


def test_the_same_name_with_other_content_hits_nothing_but_its_own(place: Place) -> None:
    place.ask(named("a0", 1, place.folders[0]))
    for hits, right in ((0, place.right), (WHOLE, place.right_warm)):
        said = place.ask(named("a0", 12, place.folders[2]))
        assert said["tokens"] == right[2] and said["cached"] == hits
    said = place.ask(named("a0", 1, place.folders[0]))
    assert said["tokens"] == place.right_warm[0] and said["cached"] == WHOLE


def test_an_adapter_whose_files_change_after_it_was_loaded_is_left_alone(
    place: Place, tmp_path: Path
) -> None:
    place.ask(named("a1", 2, place.folders[1]))
    folder = tmp_path / "changed"
    shutil.copytree(place.folders[0], folder)
    assert place.ask(named("changed", 13, folder))["tokens"] == place.right_warm[0]
    shutil.rmtree(folder)
    shutil.copytree(place.folders[1], folder)
    before = place.engine.stats().get("totals_requests_left_alone", 0)
    said = place.ask(named("changed", 13, folder))
    assert said["tokens"] == place.right[0], "vLLM has not loaded it again"
    assert said["cached"] == 0 and place.engine.stats()["totals_requests_left_alone"] == before + 1


def test_a_prompt_that_was_prefilled_with_an_adapter_is_loaded_to_its_end(place: Place) -> None:
    lora = named("a1", 2, place.folders[1])
    assert place.engine.forget()
    (first,) = place.engine.generate(prompts=[HANDED], tokens=1, params=PREFILL, lora=lora)
    said = place.ask(lora, HANDED, params=first["params"])
    assert said["tokens"] == place.right_handed and said["cached"] >= len(HANDED) - 1
