"""Layers with full attention beside layers with a window, each with blocks of their own: the tokens are those
of a plain run, whatever was loaded and whatever had left the window when it was stored.

The window is smaller than a chunk, and steps end inside of chunks.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import (
    ASKED,
    BLOCK,
    CHUNK,
    EXACT,
    HERE,
    ON_GPU,
    PYTHON,
    Daemon,
    Engine,
    answers,
    arguments,
    prompt,
    start_together,
    transfer,
)

WINDOW = 40
STEP = 500
# Enough for one request as long as the model allows, too few for the whole crowd.
ROOM = (
    {"num_gpu_blocks_override": 240, "max_model_len": 1536}
    if ON_GPU
    else {"num_gpu_blocks_override": 3520 // BLOCK}
)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# With the last of these, the window of a prompt's last token begins with the last token of a block.
SHORT = {
    f"{length} tokens": (prompt(100 + length, length), 16) for length in (20, 102, BLOCK * 8 + WINDOW - 1)
}
ALL = {name: asked for name, asked in ASKED.items() if name != "never"} | SHORT
# As often as the scheduler may ask for a request whose load fails: at first, once again, and some
# to spare.
ASKS = 20


@dataclass
class Place:
    """Two engines with one node, and what they should say."""

    engines: tuple[Engine, Engine]
    plain: dict[str, list[int]]

    def ask(self, *names: str, engine: int = 0) -> list[dict[str, Any]]:
        """All of them together; they have the same number of tokens to generate. What they say is right."""
        prompts = [ALL[name][0] for name in names]
        answers = self.engines[engine].generate(prompts=prompts, tokens=ALL[names[0]][1])
        for name, said in zip(names, answers, strict=True):
            assert said["tokens"] == self.plain[name], name
        return answers

    def warm(self, name: str, engine: int = 0) -> bool:
        """Whether the prompt came from the node."""
        assert self.engines[engine].forget()
        (said,) = self.ask(name, engine=engine)
        return said["cached"] in (whole(name), len(ALL[name][0]) - 1)


def whole(name: str) -> int:
    """Tokens of the whole chunks of a prompt."""
    return len(ALL[name][0]) // CHUNK * CHUNK


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hybrid")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(model), "--window", str(WINDOW)], check=True)
    more = ROOM | EXACT | {"max_num_batched_tokens": STEP}
    with Daemon(folder / "node", memory="128MiB") as node:
        stored = arguments(model, transfer(node.socket), **more)
        alone = arguments(model, enable_prefix_caching=False, **more)
        plain, one, two = start_together(folder, plain=alone, one=stored, two=stored)
        with one, two:
            with plain:
                said = answers(plain, ALL)
            yield Place((one, two), said)


def test_vllm_keeps_the_layers_in_several_groups(place: Place) -> None:
    windows = [window for _, window, _ in place.engines[0].groups()]
    assert sorted(windows, key=str) == [WINDOW, WINDOW, None]


@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_a_prompt_is_stored_without_a_gap_and_loaded_here_and_elsewhere(place: Place, name: str) -> None:
    one, two = place.engines
    before = one.stats()["stores_done"]
    (said,) = place.ask(name)
    assert said["cached"] == 0
    one.settle()
    assert one.stats()["stores_done"] - before == (len(ALL[name][0]) + ALL[name][1] - 1) // CHUNK
    for number, engine in enumerate((one, two)):
        before = engine.stats()
        assert place.warm(name, engine=number)
        after = engine.stats()
        assert after["loads"] == before["loads"] + 1 and after["loads_short"] == before["loads_short"]


def test_what_vllm_holds_of_a_chunk_is_not_loaded_over(place: Place) -> None:
    place.ask("short")
    assert place.engines[0].forget()
    beginning = ALL["short"][0][: 4 * CHUNK + 2 * BLOCK + 3]
    place.engines[0].generate(prompts=[beginning], tokens=1)
    place.engines[0].settle()
    (said,) = place.ask("short")
    assert said["cached"] == whole("short")


def test_prompts_with_one_beginning_and_different_ends(place: Place) -> None:
    names = ["left", "right", "middle"]
    place.ask(*names)
    for engine in (0, 1):
        assert place.engines[engine].forget()
        for said in place.ask(*names, engine=engine):
            assert said["cached"] >= 320


def test_what_was_generated_is_stored_although_the_window_is_smaller_than_a_chunk(place: Place) -> None:
    (said,) = place.ask("talk")
    assert place.engines[0].forget()
    more = ALL["talk"][0] + said["tokens"] + prompt(9, 30)
    (again,) = place.engines[0].generate(prompts=[more], tokens=16)
    (cold,) = place.engines[0].generate(prompts=[more], tokens=16, salt="another")
    assert again["cached"] == (len(ALL["talk"][0]) + 99) // CHUNK * CHUNK and cold["cached"] == 0
    assert again["tokens"] == cold["tokens"]


def test_requests_that_lose_their_blocks_say_the_same(place: Place) -> None:
    before = place.engines[0].preemptions()
    names = [name for name in ALL if name.startswith("crowd")]
    for _ in range(2):
        place.ask(*names)
        assert place.engines[0].forget()
    # Steps that are scheduled ahead need more room for one request alone.
    assert place.engines[0].preemptions() > before or ON_GPU, "there was room for all"


def test_cancelled_requests_leave_nothing_behind(place: Place) -> None:
    place.ask("long")
    for steps in range(6):
        assert place.engines[0].forget()
        prompts = [ALL["long"][0], prompt(40 + steps, 700)]
        place.engines[0].cancel(prompts=prompts, tokens=50, after_steps=steps)
    assert place.warm("long")


@pytest.mark.parametrize("name", ["handed", "even", *SHORT])
def test_the_decoder_goes_on_where_the_prefiller_stopped(place: Place, name: str) -> None:
    tokens, count = ALL[name]
    one, two = place.engines
    (first,) = one.generate(prompts=[tokens], tokens=1, params=PREFILL)
    assert one.forget() and two.forget()
    for engine in (two, one):
        (said,) = engine.generate(prompts=[tokens], tokens=count, params=first["params"])
        assert said["tokens"] == place.plain[name]
        assert said["cached"] >= len(tokens) - 1


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_a_load_that_fails_is_computed_or_is_an_error_of_its_request_alone(
    place: Place, recompute: bool, good: int
) -> None:
    engine = place.engines[0]
    place.ask("long")
    assert place.warm("long")
    engine.policy(recompute=recompute)
    assert engine.forget()
    engine.spoil(tokens=good)
    engine.asks()
    # The other one, which is too short to be loaded, is computed beside it.
    fails, other = engine.generate(prompts=[ALL["long"][0], prompt(60, CHUNK - 9)], tokens=ALL["long"][1])
    asked = engine.asks()
    engine.heal()
    engine.policy(recompute=True)
    assert len(other["tokens"]) == ALL["long"][1]
    if recompute:
        assert fails["tokens"] == place.plain["long"]
    else:
        assert fails["reason"] == "error"
    assert asked <= ASKS, "it asks for the same again and again"
    assert place.warm("long")
