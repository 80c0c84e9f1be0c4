"""Other kinds of KV than a Llama's in full precision with heads before tokens: a window in every layer,
elements of one byte, the latents of MLA, and tokens before heads. Cold and warm, the tokens are those of a
run in which nothing is stored and loaded.

With MLA on CPUs that holds for cold prompts alone: vLLM 0.32 says other tokens there when it computes a
prompt in pieces, also without a connector, and turns its own prefix cache off.
"""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    ASKED,
    BLOCK,
    CHUNK,
    HERE,
    ON_GPU,
    PYTHON,
    ROOM_TOKENS,
    VLLM,
    Daemon,
    Engine,
    answers,
    arguments,
    ask,
    transfer,
    whole,
)

WINDOW, LAYERS = 40, 4
CPU = Path("/proc/cpuinfo").read_text()
NAMES = ("short", "even", "long")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Kind:
    """A model, how vLLM is started with it, what its groups are, and the bytes of a token in all layers."""

    model: list[str]
    block_tokens: int
    more: dict[str, Any]
    groups: list[list[Any]]
    token_bytes: int
    kept: int = CHUNK  # tokens of a chunk that it keeps
    in_pieces: bool = True  # vLLM says the same when it computes a prompt in pieces
    settings: dict[str, Any] = field(default_factory=dict)  # of the connector


KINDS = {
    "window": Kind(
        ["--window", str(WINDOW), "--all-windows"],
        BLOCK,
        {},
        [["SlidingWindowSpec", WINDOW, 4]],
        LAYERS * 2 * 128 * 4,
        kept=-(-WINDOW // BLOCK) * BLOCK,
    ),
    # vLLM takes FP8 on CPUs in blocks of 32.
    "fp8": Kind([], 32, {"kv_cache_dtype": "fp8"}, [["FullAttentionSpec", None, 4]], LAYERS * 2 * 128),
    # vLLM's kernels for GPUs have no MLA in full precision.
    "latent": Kind(
        ["--latent"],
        16,
        {"dtype": "bfloat16"} if ON_GPU else {},
        [["MLAAttentionSpec", None, 4]],
        LAYERS * (512 + 64) * (2 if ON_GPU else 4),
        in_pieces=False,
    ),
    # These kernels know no other layout.
    "tokens first": Kind(
        [],
        BLOCK,
        {"attention_backend": "FLEX_ATTENTION"},
        [["FullAttentionSpec", None, 4]],
        LAYERS * 2 * 128 * 4,
        settings={"layout": "NHD"},
    ),
}

# What this vLLM cannot do here, in its own words.
MISSING: dict[str, str] = {}
if VLLM < (0, 32) and not ON_GPU:
    MISSING["latent"] = 'vLLM 0.26 says "MLA is not supported on CPU"'
if not ON_GPU:
    MISSING["tokens first"] = "FLEX_ATTENTION wants a GPU"
if not ON_GPU and "avx512f" not in CPU and "amx_tile" not in CPU:
    MISSING["fp8"] = 'vLLM says "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"'


@dataclass
class Place:
    """An engine, and what it should say."""

    kind: Kind
    engine: Engine
    plain: dict[str, list[int]]

    def ask(self, name: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The prompt, of which vLLM itself has kept nothing. Returns when it is stored."""
        said = ask(self.engine, name, params)
        if said["cached"] == 0 or self.kind.in_pieces:
            assert said["tokens"] == self.plain[name], name
        return said


def start(kind: Kind, folder: Path, node: Daemon) -> Place:
    """The engine. What is right, it says itself as long as the connector is set aside."""
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(model), *kind.model], check=True)
    blocks = {"block_size": kind.block_tokens, "num_gpu_blocks_override": ROOM_TOKENS // kind.block_tokens}
    connector = transfer(node.socket, **kind.settings)
    engine = Engine(arguments(model, connector, **blocks, **kind.more), folder / "log")
    engine.aside(on=True)
    said = answers(engine, {name: ASKED[name] for name in (*NAMES, "handed")})
    engine.aside(on=False)
    return Place(kind, engine, said)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    """Of each kind that this vLLM has. Starting takes most of the time."""
    folder = tmp_path_factory.mktemp("kinds")
    names = [name for name in KINDS if name not in MISSING]
    with Daemon(folder / "node") as node:
        with ThreadPoolExecutor() as threads:
            made = threads.map(lambda name: start(KINDS[name], folder / name, node), names)
            found = dict(zip(names, made, strict=True))
        yield found
        for place in found.values():
            place.engine.end()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    if request.param in MISSING:
        pytest.skip(f"SKIPPED: {MISSING[request.param]}")
    return places[request.param]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_any_kind_is_stored_and_loaded(place: Place, name: str) -> None:
    assert place.engine.groups() == place.kind.groups
    before = place.engine.stats()
    cold = place.ask(name)
    stored = place.engine.stats()
    warm = place.ask(name)
    after = place.engine.stats()
    chunks = (len(ASKED[name][0]) + ASKED[name][1] - 1) // CHUNK
    assert cold["cached"] == 0 and stored["stores_done"] - before["stores_done"] == chunks
    kept_bytes = chunks * place.kind.kept * place.kind.token_bytes
    assert stored["bytes_stored"] - before["bytes_stored"] == kept_bytes
    assert warm["cached"] in (whole(name), len(ASKED[name][0]) - 1)
    assert after["loads"] == stored["loads"] + 1 and after["loads_short"] == before["loads_short"]


def test_what_is_loaded_is_byte_by_byte_what_was_computed(place: Place) -> None:
    if place.kind.groups[0][1] is not None or not (place.kind.in_pieces or ON_GPU):
        pytest.skip("vLLM's own cache has nothing of what has left a window, nor of MLA on CPUs")
    tokens, count = ASKED["never"]
    end, found = len(tokens) // CHUNK * CHUNK, []
    for hit in (0, end):
        assert place.engine.forget()
        (said,) = place.engine.generate(prompts=[tokens], tokens=count)
        place.engine.settle()
        assert said["cached"] == hit
        found.append(place.engine.digests(prompt=tokens, end=end))
    assert found[0] is not None and found[0] == found[1]


def test_a_prefill_of_any_kind_is_loaded_to_its_end(place: Place) -> None:
    tokens = ASKED["handed"][0]
    (first,) = place.engine.generate(prompts=[tokens], tokens=1, params=PREFILL)
    said = place.ask("handed", first["params"])
    assert said["cached"] >= len(tokens) - 1


def test_a_load_of_any_kind_that_fails_is_computed(place: Place) -> None:
    place.ask("short")
    before = place.engine.stats().get("totals_loads_failed", 0)
    with place.engine.spoiled(tokens=3 * CHUNK):
        place.ask("short")
    assert place.engine.stats()["totals_loads_failed"] == before + 1
    assert place.ask("short")["cached"] == whole("short")
