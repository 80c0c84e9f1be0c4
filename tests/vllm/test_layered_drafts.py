"""Speculative decoding where loads run layer by layer, under the step of their request: tokens are those of
vLLM alone without drafts, also when such a load fails and its step is undone.

Some drafts are right and others are wrong. N-grams are looked up between steps; with a drafter, the next step
is scheduled before it is known how many drafts the last one accepted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import AHEAD, ASKED, CHUNK, Daemon, Engine, arguments, ask, transfer, whole

DRAFTS = 3
NGRAMS = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SHARING = ["left", "right", "middle"]
CROWD = [name for name in ASKED if name.startswith("crowd")]


class Place:
    """An engine that speculates, with a node, and what vLLM alone says."""

    def __init__(self, engine: Engine, plain: dict[str, list[int]]) -> None:
        self.engine, self.plain = engine, plain
        self.before: list[int] = []

    def together(self, names: list[str], salt: str | None = None) -> None:
        """All of these at once. What they say is right."""
        (count,) = {ASKED[name][1] for name in names}
        prompts = [ASKED[name][0] for name in names]
        said = self.engine.generate(prompts=prompts, tokens=count, salt=salt)
        self.engine.settle()
        assert {name: one["tokens"] for name, one in zip(names, said, strict=True)} == {
            name: self.plain[name] for name in names
        }

    def ask(self, name: str) -> int:
        """One of the prompts, when vLLM itself has kept nothing. What it says is right."""
        said = ask(self.engine, name)
        assert said["tokens"] == self.plain[name]
        return int(said["cached"])

    def since(self) -> tuple[int, int]:
        """Loads that ran layer by layer since the last time, and loads that failed."""
        now = [self.engine.layered(), self.engine.stats().get("totals_loads_failed", 0)]
        layered, failed = (after - before for after, before in zip(now, self.before or now, strict=True))
        self.before = now
        return layered, failed


@pytest.fixture(scope="module", params=["ngrams", "ahead"])
def place(
    request: pytest.FixtureRequest,
    model: Path,
    plain: dict[str, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp(request.param)
    how: dict[str, Any] = {
        # The model itself is its drafter.
        "ahead": {"speculative_config": {"method": "draft_model", "model": str(model)}, **AHEAD}
        | {"some_drafts_wrong": True},
        "ngrams": {"speculative_config": dict(NGRAMS), "drafts": True},
    }[request.param]
    how["speculative_config"]["num_speculative_tokens"] = DRAFTS
    with Daemon(folder / "node") as node:
        with Engine(arguments(model, transfer(node.socket), **how), folder / "log") as engine:
            assert engine.is_ahead() == (request.param == "ahead")
            engine.know(sequences=[tokens + plain[name] for name, (tokens, _) in ASKED.items()])
            made = Place(engine, plain)
            made.since()
            yield made


def test_what_is_loaded_layer_by_layer_says_what_the_model_says_alone(place: Place) -> None:
    drafts = place.engine.drafts()
    for name in ("short", "long", "talk"):
        assert place.ask(name) == 0
        assert place.since() == (0, 0)
        assert place.ask(name) == whole(name)
        assert place.since() == (1, 0)
    drafted, accepted = (after - before for after, before in zip(place.engine.drafts(), drafts, strict=True))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("good", [0, CHUNK * 3])
@pytest.mark.parametrize("name", ["short", "long", pytest.param("talk", marks=pytest.mark.smoke)])
def test_a_load_that_fails_under_a_step_is_computed(place: Place, good: int, name: str) -> None:
    place.ask(name)
    place.since()
    with place.engine.spoiled(tokens=good):
        assert place.ask(name) <= good
    assert place.since() == (1, 1)
    assert place.ask(name) == whole(name), "what was computed is not stored"


@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_those_that_share_what_failed_to_load_start_over_too(place: Place, good: int) -> None:
    place.together(SHARING)
    assert place.engine.forget()
    place.since()
    with place.engine.spoiled(tokens=good):
        place.together(SHARING)
    layered, failed = place.since()
    assert layered >= 1 and failed >= 1


@pytest.mark.parametrize("how", ["aborted", "preempted"])
@pytest.mark.parametrize("good", [0, CHUNK * 3])
def test_who_leaves_the_step_of_a_load_that_fails_leaves_nothing_wrong(
    place: Place, how: str, good: int
) -> None:
    engine, (tokens, count) = place.engine, ASKED["long"]
    if how == "preempted" and not engine.is_ahead():
        pytest.skip("SKIPPED: the next step is scheduled when the last one's output is known")
    place.ask("long")
    assert engine.forget()
    with engine.spoiled(tokens=good):
        said = engine.leaves(prompt=tokens, tokens=count, how=how)
    assert said is None if how == "aborted" else said["tokens"] == place.plain["long"]
    place.together(["long"])  # vLLM's own cache has nothing of it that is wrong,
    place.ask("long")  # nor has the node.


@pytest.mark.parametrize("good", [None, 0, CHUNK * 3])
@pytest.mark.parametrize("stored", [False, True])
def test_requests_that_lose_their_blocks_while_others_load_layer_by_layer_say_the_same(
    place: Place, good: int | None, stored: bool
) -> None:
    """If nothing is `stored` before, requests have said something when they load what they have lost."""
    salt = f"crowd {good} {stored}"
    if stored:
        place.together(CROWD, salt)
        assert place.engine.forget()
    place.since()
    place.engine.loads_take(seconds=0.0)
    lost = place.engine.preemptions()
    if good is None:
        place.together(CROWD, salt)
    else:
        with place.engine.spoiled(tokens=good):
            place.together(CROWD, salt)
    place.engine.loads_take(seconds=None)
    layered, failed = place.since()
    assert place.engine.preemptions() > lost
    assert layered >= (len(CROWD) if stored else 1)
    assert (failed > 0) == (good is not None)
