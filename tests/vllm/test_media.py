"""Images in prompts: KV is found again by what they show, and the tokens are those of a plain run.

The first image begins three tokens before the end of a chunk: that chunk shows a little of it.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHUNK, HERE, PYTHON, Daemon, Engine, arguments, prompt, start_together, transfer

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from forebay.vllm.connector import media  # noqa: E402
from forebay.vllm.connector.config import Shape  # noqa: E402
from forebay.vllm.connector.media import TEXT, Item, Media  # noqa: E402
from forebay.vllm.connector.tracked import ChunkIds  # noqa: E402

WORDS = 1020
SHOWN = [WORDS, WORDS + 2, WORDS + 1]  # Where an image is, one token until vLLM makes it 64.
IMAGE_TOKENS = 64
COUNT = 12
FIRST, SECOND = 1, 2  # Seeds of pixels.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def text(seed: int, tokens: int) -> list[int]:
    return [token % WORDS for token in prompt(seed, tokens)]


SOON = text(1, CHUNK - 4) + SHOWN + text(2, 200)
LATE = text(3, 2 * CHUNK + 10) + SHOWN + text(4, 50) + SHOWN + text(5, 100)
SOON_WHOLE = (len(SOON) - 1 + IMAGE_TOKENS) // CHUNK * CHUNK
LATE_WHOLE = (len(LATE) - 2 + 2 * IMAGE_TOKENS) // CHUNK * CHUNK


@dataclass
class Place:
    """A plain engine, and one with a node."""

    plain: Engine
    engine: Engine

    def right(self, tokens: list[int], *images: int) -> list[int]:
        (said,) = self.plain.generate(prompts=[tokens], tokens=COUNT, images=images)
        return list(said["tokens"])

    def ask(self, tokens: list[int], *images: int, **more: Any) -> dict[str, Any]:
        """A prompt of which vLLM itself has kept nothing. Returns when it is stored."""
        assert self.engine.forget()
        (said,) = self.engine.generate(prompts=[tokens], tokens=COUNT, images=images, **more)
        self.engine.settle()
        return dict(said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("media")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "tiny_vision.py"), str(model)], check=True)
    # At the start vLLM would try a prompt that this version of `transformers` refuses.
    own = {"skip_tokenizer_init": False, "skip_mm_profiling": True}
    own |= {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    alone = arguments(model, enable_prefix_caching=False, **own)
    with Daemon(folder / "node") as node:
        stored = arguments(model, transfer(node.socket), **own)
        plain, engine = start_together(folder, plain=alone, log=stored)
        with plain, engine:
            yield Place(plain, engine)


def test_the_same_image_is_a_hit_and_another_one_is_none(place: Place) -> None:
    right = {image: place.right(SOON, image) for image in (FIRST, SECOND)}
    assert right[FIRST] != right[SECOND], "the model does not see them"
    for image, cached in ((FIRST, 0), (FIRST, SOON_WHOLE), (SECOND, 0), (SECOND, SOON_WHOLE)):
        said = place.ask(SOON, image)
        assert (said["tokens"], said["cached"]) == (right[image], cached)


def test_what_comes_before_an_image_is_a_hit_whatever_it_shows(place: Place) -> None:
    expected = [
        ((FIRST, SECOND), 0),
        ((FIRST, SECOND), LATE_WHOLE),
        ((SECOND, FIRST), 2 * CHUNK),
        # The second image begins behind 10 + 66 + 50 tokens of these.
        ((FIRST, FIRST), 3 * CHUNK),
    ]
    for images, cached in expected:
        said = place.ask(LATE, *images)
        assert (said["tokens"], said["cached"]) == (place.right(LATE, *images), cached)


def test_a_prompt_with_an_image_that_was_prefilled_is_loaded_to_its_end(place: Place) -> None:
    tokens = text(6, 70) + SHOWN + text(7, 80)
    assert place.engine.forget()
    (first,) = place.engine.generate(prompts=[tokens], tokens=1, params=PREFILL, images=[FIRST])
    said = place.ask(tokens, FIRST, params=first["params"])
    assert said["tokens"] == place.right(tokens, FIRST)
    assert said["cached"] >= len(tokens) - 1 + IMAGE_TOKENS - 1


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("good_chunks", [0, 1, 3])
def test_an_image_whose_load_fails_before_in_or_behind_it_is_seen_again(
    place: Place, good_chunks: int, layerwise: bool
) -> None:
    place.ask(LATE, FIRST, SECOND)  # Stored, if it was not.
    before = place.engine.stats().get("totals_loads_failed", 0)
    with place.engine.spoiled(layerwise=layerwise, tokens=good_chunks * CHUNK):
        said = place.ask(LATE, FIRST, SECOND)
    assert said["tokens"] == place.right(LATE, FIRST, SECOND)
    assert place.engine.stats()["totals_loads_failed"] == before + 1


def test_an_image_that_its_client_has_named_is_left_alone(place: Place) -> None:
    before = place.engine.stats().get("totals_requests_left_alone", 0)
    for _ in range(2):
        said = place.ask(SOON, SECOND, named="mine")
        assert said["tokens"] == place.right(SOON, SECOND) and said["cached"] == 0
    assert place.engine.stats()["totals_requests_left_alone"] == before + 2


def ids(tokens: list[int], seen: bytes, *items: Item) -> list[bytes]:
    made = ChunkIds(Shape(1, 16), [bytes(32)], CHUNK, Media(seen, items))
    for end in (10, CHUNK + 1, len(tokens)):
        made.grow(tokens[:end])
    return made.ranks[0]


def test_names_of_chunks_follow_from_what_they_show_and_where_and_by_which_eyes() -> None:
    tokens = [5] * (6 * CHUNK)
    a, b = "a" * 64, "b" * 64
    plain, base = ids(tokens, b"eyes"), ids(tokens, b"eyes", Item(a, 100, 100))
    assert len(plain) == 6
    assert base[0] == plain[0] and not set(base[1:]) & set(plain)
    others = [
        ids(tokens, b"eyes", Item(b, 100, 100)),
        ids(tokens, b"eyes", Item(a, 101, 100)),
        ids(tokens, b"eyes", Item(a, 100, 99)),
        ids(tokens, b"other eyes", Item(a, 100, 100)),
        ids(tokens, b"eyes", Item(a, 100, 50), Item(a, 150, 50)),
    ]
    assert all(other[0] == base[0] and not set(other[1:]) & set(base) for other in others)
    later = ids(tokens, b"eyes", Item(a, 100, 100), Item(b, 300, 10))
    assert later[:4] == base[:4] and later[4] != base[4]
    whole = ChunkIds(Shape(1, 16), [bytes(32)], CHUNK, Media(b"eyes", (Item(a, 100, 100),)))
    whole.grow(tokens)
    assert whole.ranks[0] == base
    tails = [
        ChunkIds(Shape(1, 16), [bytes(32)], CHUNK, Media(b"eyes", (Item(name, 70, 2),))).with_tail(
            tokens[:80], 0
        )
        for name in (a, b)
    ]
    assert tails[0] != tails[1]


@pytest.mark.parametrize("name", ["mine", "r7-image-0", "lora:" + "a" * 64, "A" * 64, "a" * 63, None])
def test_a_content_is_believed_by_its_hash_alone(name: str | None) -> None:
    place = SimpleNamespace(offset=3, length=5)

    def asked(*names: str | None) -> Any:
        features = [SimpleNamespace(identifier=one, mm_position=place) for one in names]
        return SimpleNamespace(mm_features=features)

    assert media.media_of(asked("a" * 64), b"eyes") == Media(b"eyes", (Item("a" * 64, 3, 5),))
    assert media.media_of(asked("a" * 64, name), b"eyes") is None
    assert media.media_of(asked("a" * 64), None) is None and media.media_of(asked(), None) == TEXT


def test_eyes_differ_by_processor_settings_and_configuration(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text("{}")

    def eyes(prefix_lm: bool = False, sees: str = "patches", **settings: Any) -> bytes | None:
        return media.processing_of(
            SimpleNamespace(
                model=tmp_path,
                revision=None,
                multimodal_config=SimpleNamespace(**dict.fromkeys(media.SETTINGS) | settings),
                hf_config=SimpleNamespace(to_dict=lambda: {"sees": sees}),
                is_mm_prefix_lm=prefix_lm,
            )
        )

    base = eyes()
    assert base is not None and base == eyes() and eyes(prefix_lm=True) is None
    found = [base, eyes(sees="pixels"), eyes(mm_processor_kwargs={"size": 1}), eyes(video_pruning_rate=0.5)]
    file.write_text('{"size": 1}')
    found.append(eyes())
    assert None not in found and len(set(found)) == len(found)
    assert media.processing_of(SimpleNamespace(multimodal_config=None)) is None


def test_a_chunk_is_named_by_what_it_shows_and_looks_at_little_else() -> None:
    looks, count, every = 0, 2000, 40

    class Looked(Item):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += name == "first"
            return super().__getattribute__(name)

    # Between the images of a video lies its sound.
    items = [Looked(f"{number:064x}", number * every, 30) for number in range(count)]
    items.insert(0, Looked("sound", 0, 3 * every))
    seen = Media(bytes(32), tuple(items))
    ids = ChunkIds(Shape(1, 16), [bytes(32)], CHUNK, seen)
    ids.grow(list(range(count * every)))
    assert looks < 20 * count, "a step of the engine waits for it"
    there = [item for item in items if item.first < 2 * CHUNK and item.first + item.tokens > CHUNK]
    assert [item.content[-2:] for item in there] == ["nd", "01", "02", "03"]
    alone = Media(bytes(32), tuple(there))
    assert b"" != seen.within(CHUNK, 2 * CHUNK) == alone.within(CHUNK, 2 * CHUNK)
    assert seen.within(0, CHUNK) != Media(bytes(32), tuple(items[1:])).within(0, CHUNK)
    assert seen.within(count * every, count * every + CHUNK) == b""
