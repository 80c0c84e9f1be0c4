"""Layers with states (convolutions here, as Mamba elsewhere) beside layers with full attention: tokens are
those of a plain run, wherever a load ended, and a load ends only where there is a state.

States are where steps end: where vLLM's budget for a step does, and at a prompt's last chunk, since the
connector sees to it. The plain run keeps no states at ends of blocks and cuts prompts elsewhere: this model
says the same.
"""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ASKED, BLOCK, CHUNK, HERE, ON_GPU, PYTHON, Daemon, Engine, arguments, prompt, transfer

pytestmark = pytest.mark.skipif(
    not ON_GPU and "amx_tile" in Path("/proc/cpuinfo").read_text(),
    reason="SKIPPED: vLLM's kernel for CPUs with AMX has no convolution in float32",
)

STEP = 512
# vLLM's kernel for GPUs has no wider convolutions.
SEEN = ["--seen", "4"] if ON_GPU else []
# Enough for one request as long as the model allows, too few for the whole crowd.
BLOCKS = 2176 // BLOCK
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = ASKED["long"][0]
# They begin as "long" does and leave it where it has chunks without a state, or just behind a
# state. They end soon after that: what they say depends on the state.
PARTS = {
    "behind a state": (LONG[: STEP + 2 * CHUNK + 1] + prompt(50, 2), 16),
    "before any state": (LONG[: STEP - CHUNK] + prompt(51, 2), 16),
    "right at a state": (LONG[:STEP] + prompt(52, 1), 16),
}
# The state before its last token is at the end of a chunk.
EVEN = {"one more": (prompt(53, 2 * CHUNK + 1), 16)}
ALL = {name: asked for name, asked in ASKED.items() if name != "never"} | PARTS | EVEN
# As often as the scheduler may ask for a request whose load fails: at first, once again, and some
# to spare.
ASKS = 20


@dataclass
class Place:
    """An engine with a node, and what it should say."""

    folder: Path
    start: dict[str, Any]
    engine: Engine
    plain: dict[str, list[int]]

    def ask(self, *names: str, **more: Any) -> list[dict[str, Any]]:
        """All of them together; they have the same number of tokens to generate. What they say is right."""
        prompts = [ALL[name][0] for name in names]
        answers = self.engine.generate(prompts=prompts, tokens=ALL[names[0]][1], **more)
        for name, said in zip(names, answers, strict=True):
            assert said["tokens"] == self.plain[name], name
        self.engine.settle()
        return answers

    def cached(self, name: str, **more: Any) -> int:
        """Tokens of a prompt that came from the node."""
        assert self.engine.forget()
        (said,) = self.ask(name, **more)
        return int(said["cached"])


def last(name: str) -> int:
    """Where the last state is that is of use to a prompt: one token at least is computed."""
    return (len(ALL[name][0]) - 1) // CHUNK * CHUNK


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("states")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(model), "--states", *SEEN], check=True)
    more = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": STEP}
    node = Daemon(folder / "node", memory="128MiB").start()
    stored = arguments(
        model, transfer(node.socket), enable_prefix_caching=True, kv_events_config=EVENTS, **more
    )
    alone = arguments(model, enable_prefix_caching=False, **more)
    with ThreadPoolExecutor() as threads:  # Starting one takes most of the time.
        starts = [
            threads.submit(Engine, start, folder / name)
            for start, name in ((alone, "plain"), (stored, "one"))
        ]
    engines = [start.result() for start in starts if start.exception() is None]
    try:
        plain, one = (start.result() for start in starts)
        said = {
            name: plain.generate(prompts=[tokens], tokens=count)[0]["tokens"]
            for name, (tokens, count) in ALL.items()
        }
        plain.end()
        place = Place(folder, stored, one, said)
        yield place
        engines.append(place.engine)
    finally:
        for engine in engines:
            engine.end()
        node.kill()


def test_some_layers_keep_states(place: Place) -> None:
    assert sorted(kind for kind, _, _ in place.engine.groups()) == ["FullAttentionSpec", "MambaSpec"]


@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_a_prompt_is_stored_and_loaded_up_to_its_last_state(place: Place, name: str) -> None:
    assert place.cached(name) == 0
    before = place.engine.stats()
    assert place.cached(name) == last(name)
    after = place.engine.stats()
    assert after["loads"] == before["loads"] + 1 and after["loads_short"] == before["loads_short"]
    assert after["totals_tokens_memory"] - before.get("totals_tokens_memory", 0) == last(name)


def test_what_is_loaded_is_byte_by_byte_what_was_computed(place: Place) -> None:
    tokens, count = ASKED["never"]
    end = (len(tokens) - 1) // CHUNK * CHUNK
    found = []
    for hit in (0, end):
        assert place.engine.forget()
        (said,) = place.engine.generate(prompts=[tokens], tokens=count)
        assert said["cached"] == hit
        found.append(place.engine.digests(prompt=tokens, end=end))
    assert found[0] is not None and found[0] == found[1]


def test_events_tell_of_the_layers_that_keep_tokens(place: Place) -> None:
    place.engine.record()
    place.engine.generate(prompts=[prompt(70, 200)], tokens=1)
    place.engine.settle()
    place.engine.take_events()
    events = [event for event in place.engine.published() if event["medium"] == "CPU"]
    assert len(events) == 200 // CHUNK
    assert {event["kv_cache_spec_kind"] for event in events} == {"full_attention"}


@pytest.mark.parametrize(
    ("name", "hit"), [("behind a state", STEP), ("before any state", 0), ("right at a state", STEP)]
)
def test_what_prompts_have_in_common_is_loaded_up_to_the_last_state(
    place: Place, name: str, hit: int
) -> None:
    place.ask("long")
    assert place.cached(name) == hit


def test_vllms_own_cache_hits_only_where_there_is_a_state(place: Place) -> None:
    place.engine.aside(on=True)  # The connector would find what vLLM lacks.
    try:
        assert place.engine.forget()
        place.ask("long")
        for name in PARTS:
            place.ask(name)
    finally:
        place.engine.aside(on=False)


def test_what_vllm_holds_is_not_loaded_over(place: Place) -> None:
    place.ask("short")
    assert place.engine.forget()
    beginning = ALL["short"][0][: 4 * CHUNK + 2 * BLOCK + 3]
    place.engine.generate(prompts=[beginning], tokens=1)
    place.engine.settle()
    (said,) = place.ask("short")
    assert said["cached"] == last("short")


def test_prompts_with_one_beginning_and_different_ends(place: Place) -> None:
    names = ["left", "right", "middle"]
    place.ask(*names)
    assert place.engine.forget()
    for said, name in zip(place.ask(*names), names, strict=True):
        assert said["cached"] == last(name)


def test_what_was_generated_is_stored_with_its_states(place: Place) -> None:
    (said,) = place.ask("talk")
    assert place.engine.forget()
    more = ALL["talk"][0] + said["tokens"] + prompt(9, 30)
    (again,) = place.engine.generate(prompts=[more], tokens=16)
    (cold,) = place.engine.generate(prompts=[more], tokens=16, salt="another")
    named = len(ALL["talk"][0]) + 99
    assert again["cached"] == named // CHUNK * CHUNK and cold["cached"] == 0
    assert again["tokens"] == cold["tokens"]


def test_requests_that_lose_their_blocks_say_the_same(place: Place) -> None:
    before = place.engine.preemptions()
    names = [name for name in ALL if name.startswith("crowd")]
    for _ in range(2):
        place.ask(*names)
        assert place.engine.forget()
    assert place.engine.preemptions() > before, "there was room for all"


def test_cancelled_requests_leave_nothing_behind(place: Place) -> None:
    place.ask("long")
    for steps in range(6):
        assert place.engine.forget()
        prompts = [LONG, prompt(40 + steps, 700)]
        place.engine.cancel(prompts=prompts, tokens=50, after_steps=steps)
    assert place.cached("long") == last("long")


@pytest.mark.parametrize("name", [*PARTS, "short", "even", "handed", "one more"])
def test_a_decoder_goes_on_from_the_state_before_the_prompts_last_token(place: Place, name: str) -> None:
    tokens = len(ALL[name][0])
    for params in (None, {"do_remote_prefill": True}):
        # The salt keeps what the other ones have stored out of it.
        more = {"salt": f"{name} {params}"}
        assert place.engine.forget()
        (first,) = place.engine.generate(prompts=[ALL[name][0]], tokens=9, params=PREFILL, **more)
        assert first["params"]["remote_num_tokens"] == tokens - 1 and len(first["tokens"]) == 1
        assert place.cached(name, params=params or first["params"], **more) == tokens - 1


def test_a_decoder_whose_prefiller_stored_no_state_waits_a_while_and_computes(place: Place) -> None:
    before = place.engine.stats().get("totals_handovers_late", 0)
    assert place.engine.forget()
    (said,) = place.engine.generate(
        prompts=[ALL["handed"][0]], tokens=ALL["handed"][1], params={"do_remote_prefill": True}, salt="nobody"
    )
    assert said["cached"] == 0 and said["tokens"] == place.plain["handed"]
    assert place.engine.stats()["totals_handovers_late"] == before + 1


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("fault", ["all chunks", "some chunks", "a lost state", "a spoiled state"])
def test_a_load_that_fails_is_computed_or_is_an_error_of_its_request_alone(
    place: Place, recompute: bool, fault: str
) -> None:
    engine = place.engine
    place.ask("long")
    assert place.cached("long") == last("long")
    assert engine.forget()
    before = engine.stats().get("totals_loads_failed", 0)
    engine.asks()
    engine.policy(recompute=recompute)
    try:
        if fault == "a lost state":
            engine.lose_states()
        else:
            good = STEP + CHUNK if fault == "some chunks" else 0
            engine.spoil(tokens=good, states=fault == "a spoiled state")
        # The other one, which is too short to be loaded, is computed beside it.
        fails, other = engine.generate(prompts=[LONG, prompt(60, CHUNK - 9)], tokens=ALL["long"][1])
    finally:
        engine.heal()
        engine.policy(recompute=True)
    assert engine.asks() <= ASKS, "it asks for the same again and again"
    assert engine.stats()["totals_loads_failed"] > before
    assert len(other["tokens"]) == ALL["long"][1]
    if recompute:
        assert fails["tokens"] == place.plain["long"]
    else:
        assert fails["reason"] == "error"
    assert place.cached("long") == last("long")


def test_an_engine_that_was_started_again_finds_what_the_other_one_stored(place: Place) -> None:
    names = ["short", "left", "behind a state"]
    place.ask(*names)
    place.engine.end()
    place.engine = Engine(place.start, place.folder / "again")
    for said, name in zip(place.ask(*names), names, strict=True):
        assert said["cached"] == last(name)
