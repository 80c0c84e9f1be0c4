"""All bytes that a model would read after a load are those that were stored, in vLLM's own layouts.

For models that no CPU runs: vLLM makes the layout of their KV for a GPU, its scheduler plans, the
connector's halves store and load, and in place of the model its pages are written and read.
`layouts/` has how. With a vLLM that has other layouts these tests are skipped.
"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")
pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="SKIPPED: layouts of models: this vLLM is older than 0.33"
)

from layouts import configs, models  # noqa: E402
from layouts.runs import House, house  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector.groups import groups_of  # noqa: E402

pytestmark = pytest.mark.long

MODELS = (
    *("deepseek_v4", "deepseek_v41", "glm_5_2", "glm_5_next", "kimi_k3", "kimi_linear", "minimax_m3"),
    *("qwen3_5", "qwen4_exp", "step5", "gpt_oss", "gemma3", "gemma4", "llama4", "rswa", "sinks"),
)


def cases() -> Iterator[Any]:
    """Each model on one rank and on two."""
    for name in MODELS:
        for tp in (1, 2):
            yield pytest.param((name, tp), id=f"{name}-{tp}")


@pytest.fixture(scope="module", params=cases())
def at(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A node and two engines of a model."""
    name, tp = request.param
    with house(name, tp, tmp_path_factory.mktemp(name)) as made:
        yield made


def test_other_pages_hold_what_was_stored(at: House) -> None:
    before = at.bytes_stored()
    came = at.stored()
    kv, states = (now - then for now, then in zip(at.bytes_stored(), before, strict=True))
    assert came.wrong == 0, came.where
    assert came.loaded > 0 and came.compared > 0
    assert at.free_blocks()[1] == 0, "nobody else's pages are written"
    of_kv, of_states = at.kept_bytes()
    assert kv == at.chunks * of_kv, "exact sizes are kept"
    assert states == at.states_at_chunks(at.prompts) * of_states


def test_a_hand_over_holds_all_that_the_next_token_reads(at: House) -> None:
    came = at.handed_over()
    assert came.wrong == 0, came.where
    assert came.loaded >= at.chunks * at.here.chunk - at.there.scheduler.prefix_replay_tokens


def test_a_disk_gives_back_what_was_stored(at: House) -> None:
    came = at.from_disk()
    assert came.wrong == 0, came.where
    assert came.loaded > 0 and came.on_disk > 0


def test_a_chunk_that_has_changed_is_computed(at: House) -> None:
    came = at.spoiled()
    assert came.wrong == 0, came.where
    assert came.loaded < 2 * at.here.chunk


def test_a_load_whose_node_dies_is_computed(at: House) -> None:
    came = at.node_dies()
    assert came.wrong == 0, came.where
    assert came.loaded < at.chunks * at.here.chunk


def test_pools_in_host_memory_are_refused() -> None:
    (model,) = (model for model in models.MODELS if model.name == "glm_5_2")
    with pytest.raises(InvalidError, match="keeps its KV in host memory .HiSparse.; allowed is"):
        groups_of(configs.hisparse_groups(model))
