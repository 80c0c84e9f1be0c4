"""The kinds of models that people serve today: what was loaded says the tokens of vLLM alone, from memory,
from SSD, handed over by another engine, and when a load fails.

The models are tiny and their weights noise (`tiny_kinds.py`). Which prompts are asked is measured: those to
which vLLM alone says the same however it cuts them, and from its own cache. Noise in what is loaded of any
group of layers changes what is said, so these tokens would tell of wrong bytes.
"""

import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    BLOCK,
    CHUNK,
    HERE,
    ON_GPU,
    PYTHON,
    VLLM,
    Daemon,
    Engine,
    arguments,
    prompt,
    transfer,
)
from models_json import Results
from processes import until
from tiny_kinds import BLOCK_WINDOW, SMALL_WINDOW, WINDOW

pytestmark = pytest.mark.long

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# Tokens of prompts: several steps, whole chunks, a few more than that. The first steady ones are
# asked.
LENGTHS = (1400, 600, 512, 450, 333, 641, 901, 577, 700, 1025)
# Rounding decides more often in bf16 where drafts are checked, so there are more to choose from.
# None has a step of one token without drafts: vLLM's gated delta nets for CPUs fail there if other
# steps have drafts. It is a prompt's first token behind a block, or its last one if its drafts
# would not fit into the block.
MANY_LENGTHS = (1400, 600, *(length for length in range(1395, 300, -21) if 2 < length % BLOCK < BLOCK - 3))
SAID, ASKED = 16, 4
STEP = 512
ROOM_TOKENS = 13_312  # of all groups together
FULL, SLIDING, CHUNKED, STATE = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
)


@dataclass(frozen=True)
class Kind:
    """What vLLM makes of a model's layers: class, window and number, by group; and how it is started."""

    groups: list[tuple[str, int | None, int]]
    more: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)  # what versions of vLLM lack on CPUs
    model: str = ""  # of `tiny_kinds.py`, if it is called otherwise
    all_right: bool = False  # each draft is right, as long as the drafter's own KV is
    some_right: bool = False  # some drafts are right and others are wrong
    lengths: Iterable[int] = LENGTHS

    @property
    def drafts(self) -> int:
        """How many tokens a drafter gives at once."""
        return int(self.more.get("speculative_config", {}).get("num_speculative_tokens", 0))

    @property
    def has_states(self) -> bool:
        return any(name == STATE for name, _, _ in self.groups)


def drafts(method: str, tokens: int, drafter: str | None = None) -> dict[str, Any]:
    """How vLLM is told of a drafter. `drafter` is in the folder of models."""
    config = {"method": method, "num_speculative_tokens": tokens}
    return {"speculative_config": config | ({} if drafter is None else {"model": drafter})}


STATES: dict[str, Any] = {"mamba_cache_mode": "align"}
# vLLM has gated delta nets on CPUs in this format only, and no kernel there that copies states of
# drafts.
TRITON = {"additional_config": {"gdn_prefill_backend": "triton"}}  # needs no other package on a GPU
DELTA: dict[str, Any] = STATES | {"dtype": "bfloat16"} | (TRITON if ON_GPU else {})
OVER_STATES: dict[str, Any] = {} if ON_GPU else {"drafts_over_states": "window"}
KINDS = {
    "glm-4": Kind([(FULL, None, 3)]),
    "minimax-m2": Kind([(FULL, None, 3)]),
    "gpt-oss": Kind([(SLIDING, BLOCK_WINDOW, 2), (FULL, None, 2)]),
    "gemma-3": Kind([*[(SLIDING, WINDOW, 1)] * 5, (FULL, None, 1)]),
    "gemma-4": Kind([*[(SLIDING, SMALL_WINDOW, 2)] * 2, (FULL, None, 2)]),
    "llama-4": Kind([*[(CHUNKED, None, 1)] * 3, (FULL, None, 1)]),
    "falcon-h1": Kind([(FULL, None, 3), (STATE, None, 3)], STATES | {"states_in_steps": False}),
    "qwen-3-next": Kind([*[(STATE, None, 1)] * 3, (FULL, None, 1)], DELTA),
    "qwen-3.5": Kind([*[(STATE, None, 1)] * 3, (FULL, None, 1)], DELTA),
    # The drafter is the model itself once more, with layers of its own.
    "llama-draft": Kind([(FULL, None, 6)], drafts("draft_model", 3, "llama"), model="llama", all_right=True),
    "llama-eagle": Kind([(FULL, None, 4)], drafts("eagle", 3, "llama/drafter"), model="llama"),
    "mimo-mtp": Kind([(FULL, None, 4)], drafts("mtp", 1), model="mimo"),
    "qwen-3-next-mtp": Kind(
        [(STATE, None, 2), (STATE, None, 1), (FULL, None, 2)],
        DELTA | drafts("mtp", 2) | OVER_STATES,
        model="qwen-3-next",
        lengths=MANY_LENGTHS,
    ),
    "qwen-3-next-drafts": Kind(
        [*[(STATE, None, 1)] * 3, (FULL, None, 1)],
        DELTA | drafts("ngram", 3) | OVER_STATES | {"drafts": True},
        model="qwen-3-next",
        some_right=True,
        lengths=MANY_LENGTHS,
    ),
}


@dataclass
class Place:
    """Two engines with one node, and what vLLM alone says to prompts of these lengths."""

    name: str
    kind: Kind
    node: Daemon
    engines: list[Engine]
    plain: dict[int, list[int]]
    results: Results

    def ask(self, length: int, engine: int = 0, **more: Any) -> dict[str, Any]:
        """The prompt, of which vLLM itself has kept nothing. What it says is right, and then stored."""
        one = self.engines[engine]
        assert one.forget()
        drafts = one.drafts()
        (said,) = one.generate(prompts=[prompt(length, length)], tokens=SAID, **more)
        one.settle()
        self.results.said(self.name, said["tokens"], self.plain[length])
        drafts = [after - before for after, before in zip(one.drafts(), drafts, strict=True)]
        # Behind a load of all of a prompt, vLLM begins with drafts that nobody has made.
        padded = self.kind.drafts if said["cached"] >= length - 1 else 0
        # On a GPU two tokens may be nearly as good to the drafter, and rounding decides.
        assert ON_GPU or not self.kind.all_right or drafts == [SAID - 4 + padded, SAID - 4], (
            "other KV of the drafter"
        )
        assert not self.kind.some_right or 0 < drafts[1] < drafts[0], "all are right, or none"
        assert said["tokens"] == self.plain[length], f"{length} tokens"
        return dict(said)

    def loaded(self, length: int) -> tuple[int, ...]:
        """How many tokens of a prompt may come from the node: those of whole chunks, but not all of it."""
        last = (length - 1) // CHUNK * CHUNK
        return (last,) if self.kind.has_states else (last, length // CHUNK * CHUNK, length - 1)


def steady(alone: Engine, caching: Engine, kind: Kind) -> dict[int, list[int]]:
    """What vLLM alone says, where it says the same to a prompt in one step, in pieces, in those that a
    hand-over makes, and from its own cache, also with drafts.

    Where two tokens are nearly as good, rounding decides, and that differs with what is computed together.
    """
    found: dict[int, list[int]] = {}
    caching.aside(on=True)
    for length in kind.lengths:
        if len(found) == ASKED:
            break
        answers = []
        steps, last = [*range(STEP, length, STEP)], (length - 1) // CHUNK * CHUNK
        # vLLM keeps the state at the end of a prefiller's last whole block, so a step ends there
        # too.
        handed = {*steps, (length - 2) // BLOCK * BLOCK, last, length - 1}
        for cuts in ([], steps, [*range(CHUNK, length, CHUNK)], sorted(handed)):
            alone.cut(at=cuts)
            answers += alone.generate(prompts=[prompt(length, length)], tokens=SAID)
        caching.know(sequences=[prompt(length, length) + answers[0]["tokens"]])
        before = caching.drafts()
        for _ in range(2):
            answers += caching.generate(prompts=[prompt(length, length)], tokens=SAID)
        made, right = (now - then for now, then in zip(caching.drafts(), before, strict=True))
        if kind.some_right and not 0 < right < made:
            continue
        hits = [one["cached"] > 0 for one in answers]
        # On GPUs vLLM keeps fewer states, so its own cache may have none.
        assert hits in ([False] * 5 + [True], [False] * 6 if ON_GPU else [])
        if all(one["tokens"] == answers[0]["tokens"] for one in answers):
            found[length] = answers[0]["tokens"]
    caching.aside(on=False)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("models")
    names = {kind.model or name for name, kind in KINDS.items()}
    subprocess.run([PYTHON, str(HERE / "tiny_kinds.py"), str(folder), *sorted(names)], check=True)
    return folder


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    made = Results()
    yield made
    made.write()


def given(kind: Kind, models: Path, model: Path, node: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of vLLM alone, without drafts, and of an engine with the connector."""
    room, more = {"num_gpu_blocks_override": ROOM_TOKENS // BLOCK}, dict(kind.more)
    alone = {"enable_prefix_caching": False, "max_num_batched_tokens": max(LENGTHS)}
    stored = {"enable_prefix_caching": True, "max_num_batched_tokens": STEP}
    kernels = {name: more[name] for name in ("dtype", "additional_config") if name in more}
    config = more.get("speculative_config", {})
    if "model" in config:
        more["speculative_config"] = config | {"model": str(models / config["model"])}
    return (
        arguments(model, **room, **alone) | kernels,
        arguments(model, transfer(node), **room, **stored) | more,
    )


@pytest.fixture(scope="module", params=KINDS)
def place(
    request: pytest.FixtureRequest,
    models: Path,
    results: Results,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    name, kind, folder = request.param, KINDS[request.param], tmp_path_factory.mktemp("kind")
    why = "" if ON_GPU else kind.lacks.get(".".join(map(str, VLLM)), "")
    if why:
        pytest.skip(f"SKIPPED: {why}")
    engines: list[Engine] = []
    with Daemon(folder / "node") as node:
        alone, stored = given(kind, models, models / (kind.model or name), node.socket)
        with ThreadPoolExecutor() as threads:
            starts = [
                threads.submit(Engine, arguments, folder / log)
                for log, arguments in (("alone", alone), ("one", stored), ("two", stored))
            ]
        try:
            engines += [start.result() for start in starts if start.exception() is None]
            assert len(engines) == len(starts), [start.exception() for start in starts]
            plain = steady(*engines[:2], kind)
            assert len(plain) == ASKED, f"vLLM alone says the same to {list(plain)} only"
            for engine in engines[1:]:
                engine.know(sequences=[prompt(length, length) + said for length, said in plain.items()])
            yield Place(name, kind, node, engines[1:], plain, results)
        finally:
            for engine in engines:
                engine.kill()  # At once: there is nothing to end, and that takes seconds.


def test_vllm_keeps_the_layers_in_these_groups(place: Place) -> None:
    assert sorted(map(tuple, place.engines[0].groups()), key=str) == sorted(place.kind.groups, key=str)


def test_what_was_stored_is_loaded_from_memory(place: Place) -> None:
    for length in place.plain:
        before = place.engines[0].stats()
        cold = place.ask(length)
        stored = place.engines[0].stats()
        warm = place.ask(length)
        after = place.engines[0].stats()
        assert cold["cached"] == 0 and stored["stores_done"] > before["stores_done"]
        assert warm["cached"] in place.loaded(length)
        assert after["loads"] == stored["loads"] + 1 and after["loads_short"] == before["loads_short"]


def test_another_engine_loads_what_was_stored(place: Place) -> None:
    for length in place.plain:
        place.ask(length)
        assert place.ask(length, engine=1)["cached"] in place.loaded(length)


@pytest.mark.parametrize("engine", [0, 1])
def test_a_prefill_is_loaded_to_its_end(place: Place, engine: int) -> None:
    for length in place.plain:
        tokens, salt = prompt(length, length), f"handed to {engine}"
        assert all(one.forget() for one in place.engines)
        (first,) = place.engines[0].generate(prompts=[tokens], tokens=1, params=PREFILL, salt=salt)
        said = place.ask(length, engine, params=first["params"], salt=salt)
        assert said["cached"] >= length - 1


def test_noise_in_what_is_loaded_of_any_group_would_be_heard(place: Place) -> None:
    for length in place.plain:
        place.ask(length)
    one = place.engines[0]
    one.layerwise(possible=False)  # else a layer is computed before there is noise in it
    for group, (name, _, _) in enumerate(one.groups()):
        said = []
        for length in place.plain:
            assert one.forget()
            one.lie(group=group)
            said += one.generate(prompts=[prompt(length, length)], tokens=SAID)
            one.heal()
        assert all(one["cached"] for one in said)
        assert [one["tokens"] for one in said] != list(place.plain.values()), (
            f"noise in group {group}, {name}"
        )
    one.layerwise(possible=None)


def test_a_load_that_fails_is_computed(place: Place) -> None:
    ways: list[dict[str, Any]] = [{"tokens": 0}, {"tokens": 2 * CHUNK}]
    if place.kind.has_states:
        ways.append({"tokens": 0, "states": True})
    for length in place.plain:
        place.ask(length)
        for how in ways:
            before = place.engines[0].stats().get("totals_loads_failed", 0)
            with place.engines[0].spoiled(**how):
                place.ask(length)
            assert place.engines[0].stats()["totals_loads_failed"] > before
        assert place.ask(length)["cached"] in place.loaded(length)


def test_a_node_that_was_started_again_has_it_on_ssd(place: Place) -> None:
    for length in place.plain:
        place.ask(length)
    place.node.written(place.node.metric('forebay_chunks{tier="memory"'))
    place.node.kill()
    place.node.start()
    for number, engine in enumerate(place.engines):
        until(engine.connected)
        before = engine.stats().get("totals_tokens_disk", 0)
        length = list(place.plain)[number]
        assert place.ask(length, engine=number)["cached"] in place.loaded(length)
        assert engine.stats().get("totals_tokens_disk", 0) > before
