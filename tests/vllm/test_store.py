"""A real vLLM and a real node: whatever is loaded, and however, the tokens are those of a plain run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ASKED, BLOCK, CHUNK, Daemon, Engine, arguments, prompt, transfer, whole

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def engine(
    model: Path, plain: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("store")
    with Daemon(folder / "node") as node:
        with Engine(arguments(model, transfer(node.socket)), folder / "log") as made:
            yield made


def ask(engine: Engine, *names: str) -> list[dict]:
    """All of them together; they have the same number of tokens to generate."""
    return engine.generate(prompts=[ASKED[name][0] for name in names], tokens=ASKED[names[0]][1])


def test_a_cold_prompt_is_computed_and_stored(engine: Engine, plain: dict[str, list[int]]) -> None:
    before = engine.stats()
    (said,) = ask(engine, "short")
    assert said["tokens"] == plain["short"] and said["cached"] == 0
    engine.settle()
    assert engine.stats()["bytes_stored"] > before["bytes_stored"]


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_a_warm_prompt_is_loaded(
    engine: Engine, plain: dict[str, list[int]], name: str, layerwise: bool
) -> None:
    engine.layerwise(possible=layerwise)
    ask(engine, name)
    assert engine.forget()
    before = engine.stats()
    (said,) = ask(engine, name)
    assert said["tokens"] == plain[name]
    all_but_one = min(whole(name), len(ASKED[name][0]) - 1)
    assert said["cached"] in (all_but_one, whole(name))
    after = engine.stats()
    assert after["loads"] == before["loads"] + 1 and after["loads_short"] == before["loads_short"]
    engine.layerwise(possible=None)


def test_what_vllm_holds_of_a_chunk_is_not_loaded_over(engine: Engine, plain: dict[str, list[int]]) -> None:
    ask(engine, "short")
    assert engine.forget()
    beginning = ASKED["short"][0][: 4 * CHUNK + 2 * BLOCK + 3]
    engine.generate(prompts=[beginning], tokens=1)
    engine.settle()
    (said,) = ask(engine, "short")
    assert said["tokens"] == plain["short"] and said["cached"] == whole("short")


def test_prompts_with_one_beginning_and_different_ends(engine: Engine, plain: dict[str, list[int]]) -> None:
    names = ["left", "right", "middle"]
    for one, said in zip(names, ask(engine, *names), strict=True):
        assert said["tokens"] == plain[one], f"{one}, cold"
    assert engine.forget()
    for one, said in zip(names, ask(engine, *names), strict=True):
        assert said["tokens"] == plain[one] and said["cached"] >= 320, f"{one}, warm"


def test_what_was_generated_is_stored_too(engine: Engine, plain: dict[str, list[int]]) -> None:
    (said,) = ask(engine, "talk")
    assert said["tokens"] == plain["talk"]
    assert engine.forget()
    more = ASKED["talk"][0] + said["tokens"] + prompt(9, 30)
    (again,) = engine.generate(prompts=[more], tokens=4)
    assert again["cached"] == (len(ASKED["talk"][0]) + 99) // CHUNK * CHUNK


def test_requests_that_lose_their_blocks_say_the_same(engine: Engine, plain: dict[str, list[int]]) -> None:
    before = engine.preemptions()
    names = [name for name in ASKED if name.startswith("crowd")]
    for _ in range(2):
        for one, said in zip(names, ask(engine, *names), strict=True):
            assert said["tokens"] == plain[one], one
        assert engine.forget()
    assert engine.preemptions() > before, "there was room for all"


@pytest.mark.parametrize("layerwise", [True, False])
def test_cancelled_requests_leave_nothing_behind(
    engine: Engine, plain: dict[str, list[int]], layerwise: bool
) -> None:
    engine.layerwise(possible=layerwise)
    ask(engine, "long")
    for steps in range(6):
        assert engine.forget()
        engine.cancel(prompts=[ASKED["long"][0], prompt(40 + steps, 700)], tokens=50, after_steps=steps)
    assert engine.forget()
    (said,) = ask(engine, "long")
    assert said["tokens"] == plain["long"] and said["cached"] == whole("long")
    engine.layerwise(possible=None)


def test_a_salt_keeps_prompts_apart(engine: Engine) -> None:
    tokens = prompt(50, 400)
    engine.generate(prompts=[tokens], tokens=1, salt="mine")
    assert engine.forget()
    (theirs,) = engine.generate(prompts=[tokens], tokens=1, salt="theirs")
    assert theirs["cached"] == 0
    assert engine.forget()
    (mine,) = engine.generate(prompts=[tokens], tokens=1, salt="mine")
    assert mine["cached"] == 400 // CHUNK * CHUNK


def test_a_prompt_that_was_prefilled_for_another_engine_is_loaded_to_its_end(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    prompt_tokens, count = ASKED["handed"]
    prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    before = engine.stats().get("totals_handovers", 0)
    (first,) = engine.generate(prompts=[prompt_tokens], tokens=1, params=prefill)
    assert first["tokens"] == plain["handed"][:1] and first["params"]["do_remote_prefill"] is True
    assert engine.forget()
    (decoded,) = engine.generate(prompts=[prompt_tokens], tokens=count, params=first["params"])
    assert decoded["tokens"] == plain["handed"] and decoded["cached"] >= len(prompt_tokens) - 1
    assert engine.stats()["totals_handovers"] == before + 1


def test_an_engine_that_only_stores_hands_over_what_vllm_itself_has_cached(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    tokens, count = ASKED["right"]
    prefill = {"do_remote_decode": True, "do_remote_prefill": False}
    assert engine.forget()
    engine.role(loads=False)
    engine.generate(prompts=[tokens[:320]], tokens=1, salt="producer")
    (first,) = engine.generate(prompts=[tokens], tokens=1, params=prefill, salt="producer")
    engine.role(loads=True)
    assert first["cached"] >= 320 - BLOCK, "vLLM had the beginning"
    assert first["params"] is not None and engine.forget()
    (said,) = engine.generate(prompts=[tokens], tokens=count, params=first["params"], salt="producer")
    assert said["tokens"] == plain["right"] and said["cached"] >= len(tokens) - 1


def test_a_prefill_that_never_comes_is_waited_for_and_then_computed(
    engine: Engine, plain: dict[str, list[int]]
) -> None:
    prompt_tokens, count = ASKED["never"]
    before = engine.stats()
    ticket = {"do_remote_prefill": True, "remote_engine_id": "gone", "remote_block_ids": [[1]]}
    (said,) = engine.generate(prompts=[prompt_tokens], tokens=count, params=ticket)
    assert said["tokens"] == plain["never"] and said["cached"] == 0
    assert engine.stats()["totals_handovers_late"] == before.get("totals_handovers_late", 0) + 1
    hostile = ticket | {"forebay": {"version": 1, "identity": "x", "tokens": -1}}
    (said,) = engine.generate(prompts=[prompt(51, 90)], tokens=2, params=hostile)
    refused = before.get("totals_handovers_refused", 0)
    assert len(said["tokens"]) == 2 and engine.stats()["totals_handovers_refused"] == refused + 1
