"""How KV is cut and lies in blocks: what is taken, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, facts  # noqa: E402
from test_policies import FULL_SPEC, LATENT_SPEC  # noqa: E402

import forebay  # noqa: E402
from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import namespace  # noqa: E402
from forebay.vllm.connector.config import Shape, settings_of  # noqa: E402
from forebay.vllm.connector.groups import Group  # noqa: E402
from forebay.vllm.connector.namespace import refuse_shape  # noqa: E402
from forebay.vllm.connector.policies import Window  # noqa: E402
from forebay.vllm.connector.worker import WorkerHalf  # noqa: E402

pytestmark = pytest.mark.smoke


def test_latents_are_one_head_however_many_are_computed_from_them() -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 128)
    assert [namespace.heads_of_model(model, spec) for spec in (LATENT_SPEC, FULL_SPEC)] == [1, 128]


def test_shapes_that_cannot_be_cut_are_refused() -> None:
    both = facts(groups=(Group(BLOCK, 8), Group(BLOCK, 4, Window(40))))
    with pytest.raises(InvalidError, match="block_tokens is 32; allowed with several groups of layers is 16"):
        refuse_shape("here", Shape(1, 32), both)
    with pytest.raises(InvalidError, match="tp is 2; allowed is 1"):
        refuse_shape("here", Shape(2, BLOCK), both)
    for uneven in (both, facts(groups=(Group(BLOCK, 8, even=False),))):
        refuse_shape("here", Shape(1, BLOCK), uneven)
        for shape in (Shape(2, BLOCK), Shape(1, 32)):
            with pytest.raises(InvalidError, match="allowed"):
                refuse_shape("here", shape, uneven)
    for tp in (2, 4, 8, 16, 32):
        refuse_shape("here", Shape(tp, 32), facts())
    for tp in (3, 12, 64):
        with pytest.raises(InvalidError, match=f"tp is {tp}; allowed are divisors of the model's 8 KV heads"):
            refuse_shape("here", Shape(tp, 32), facts())
    refuse_shape("here", Shape(64, 32), facts(heads=1, shape=Shape(64, BLOCK)))


def place(heads: int, *shape: int, block_tokens: int = 128, strides: Any = None, layout: str = "HND") -> Any:
    """What a worker makes of a layer of 4 blocks and so many heads that has such a tensor."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    tensor = tensor if strides is None else tensor.permute(strides)
    spec = SimpleNamespace(
        num_kv_heads=heads, block_size=block_tokens, real_page_size_bytes=heads * block_tokens * 64 * 2
    )
    half: Any = SimpleNamespace(
        num_blocks=4,
        layers_of_groups=[{"layer 0": spec}],
        groups=(Group(block_tokens, heads),),
        settings=settings_of({"layout": layout}),
    )
    at, *found = WorkerHalf.place(half, "layer 0", tensor, 0)
    assert at == tensor.data_ptr()
    return found


def test_pages_are_what_their_namespace_says_or_are_refused() -> None:
    assert place(8, 4, 8, 128, 64) == [4, 131_072, 131_072, 0]
    assert place(1, 4, 1, 128, 64) == place(1, 4, 128, 64) == place(1, 8, 1, 64, 64) == [4, 16_384, 16_384, 0]
    for heads, shape in (
        (8, (8, 8, 64, 64)),  # kernels with blocks of 64 in blocks of 128: heads come twice
        (8, (4, 2, 128, 8, 32)),  # keys, then values
        (8, (4, 16, 128, 32)),  # the same
        (1, (4, 2, 128, 32)),
        (1, (4, 2, 128, 1, 32)),
        (8, (4, 128, 8, 64)),  # tokens, then heads
        (8, (4, 128, 512)),
    ):
        with pytest.raises(InvalidError, match=f"layer 0 has pages of .*; allowed are {heads} heads of 128"):
            place(heads, *shape)
    with pytest.raises(InvalidError, match="allowed is the layout HND"):
        place(8, 4, 128, 8, 64, strides=(0, 2, 1, 3))
    with pytest.raises(InvalidError, match="has 6 blocks; allowed are multiples of 4"):
        place(8, 6, 8, 128, 64)
    with pytest.raises(InvalidError, match="has pages of 65536 bytes, .*; its specification says 131072"):
        place(8, 4, 8, 128, 32)


def test_pages_with_tokens_before_heads_are_taken_where_that_was_said() -> None:
    strides = (0, 2, 1, 3)
    assert place(8, 4, 128, 8, 64, strides=strides, layout="NHD") == [4, 131_072, 131_072, 0]
    assert place(8, 8, 64, 8, 64, strides=strides, layout="NHD") == [4, 131_072, 131_072, 0], "two in a block"
    assert (
        place(1, 4, 1, 128, 64, layout="NHD") == place(1, 4, 128, 64, layout="NHD") == [4, 16_384, 16_384, 0]
    )
    with pytest.raises(InvalidError, match="allowed is the layout NHD"):
        place(8, 4, 8, 128, 64, layout="NHD")
    with pytest.raises(InvalidError, match="layout is 'DNH'; allowed is HND or NHD"):
        settings_of({"layout": "DNH"})


def test_kv_with_tokens_before_heads_has_names_of_its_own_and_is_cut_over_as_many_ranks() -> None:
    two = Shape(2, BLOCK)
    hnd, nhd = facts(shape=two), facts(shape=two, layout="NHD", heads=namespace.heads_to_cut(8, 2, False))
    assert hnd.identity() != nhd.identity()
    assert hnd.namespaces(None, two) != nhd.namespaces(None, two)
    refuse_shape("here", Shape(2, 32), nhd)
    for tp in (1, 4):
        refuse_shape("here", Shape(tp, BLOCK), hnd)
        with pytest.raises(InvalidError, match=f"tp is {tp}; allowed with the layout NHD is 2"):
            refuse_shape("here", Shape(tp, BLOCK), nhd)
    # Each rank reads what the rank of its number stored, all heads as one.
    assert [forebay.head_reads(nhd.heads, 2, rank, 2) for rank in range(2)] == [
        [(0, 0, 0, 1)],
        [(1, 0, 0, 1)],
    ]
