"""What a chunk keeps of each kind of layer, and which specifications are refused.

The specifications here are made up, with the fields of vLLM's. `test_model_bytes` has vLLM's own.
"""

from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_parts import BLOCK, CHUNK  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import namespace  # noqa: E402
from forebay.vllm.connector.groups import Group, block_tokens_of, fail_as_one, groups_of  # noqa: E402
from forebay.vllm.connector.policies import FULL, Absent, Full, Local, State, Window, policy_of  # noqa: E402

pytestmark = pytest.mark.smoke


def a_spec(name: str, bounded: bool = False, without: str | None = None, **more: Any) -> Any:
    """A specification of a class of this name. `bounded`: blocks leave a request before it ends."""
    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"} | more
    fields.pop(without, None)
    methods = {"max_admission_blocks_per_request": lambda self, *_: 1} if bounded else {}
    made = make_dataclass(
        name,
        [(name, type(value), field(default=None)) for name, value in fields.items()],
        namespace=methods,
        frozen=True,
    )
    return made(**fields)


def a_state(**more: Any) -> Any:
    """The specification of a layer with states."""
    good = {"mamba_cache_mode": "align", "num_speculative_blocks": 0, "shapes": ((4, 8),), "dtypes": ("f",)}
    made = make_dataclass("MambaSpec", [("block_size", int), *[(name, Any) for name in good | more]])
    return made(BLOCK, **(good | more))


def absent(**methods: Any) -> Any:
    """The specification of a layer that vLLM's own cache never holds."""
    fields = [("block_size", int), ("num_kv_heads", int), ("head_size", int), ("dtype", str)]
    made = make_dataclass("NeverCachedSpec", fields, namespace={"prefix_cacheable": False, **methods})
    return made(5, 1, 64, "float32")


FULL_SPEC = a_spec("FullAttentionSpec")
LATENT_SPEC = a_spec("MLAAttentionSpec")


def a_model(*specs: Any) -> Any:
    """A model with a layer of each specification, in groups of their own."""
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{number}"])
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (a_spec("NobodyHasSeenSpec"), FULL),
        (a_spec("NobodyHasSeenSpec", sliding_window=128), FULL),  # its blocks stay
        (a_spec("NobodyHasSeenSpec", sink_len=16), FULL),
        (a_spec("NobodyHasSeenSpec", tokens_per_state=128, state_content_bytes=584), FULL),
        (a_spec("NobodyHasSeenSpec", rswa_window=64), Full(prompt_only=True)),
        (a_spec("NobodyHasSeenSpec", bounded=True, sliding_window=128), Window(128)),
        (a_spec("NobodyHasSeenSpec", bounded=True, sliding_window=128, extra_retained_tokens=2), Window(130)),
        (a_spec("NobodyHasSeenSpec", bounded=True, attention_chunk_size=8192), Local(8192)),
        (a_state(), State()),
        (a_state(num_speculative_blocks=3, num_prefill_checkpoint_blocks=1), State(4)),
        (absent(uses_slot_mapping=False), Absent("ring")),
        (absent(uses_slot_mapping=False, has_layer_views=False), Absent("replica")),
        (absent(bounded_replay=True), Absent("replayed window")),
    ],
)
def test_a_specification_nobody_has_seen_is_derived_or_refused(spec: Any, policy: Any) -> None:
    assert policy_of("layers.7", spec) == policy


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (a_spec("NewSpec", banks=4), "layers.7: NewSpec has a field banks that .* does not know; allowed"),
        (a_spec("NewSpec", without="head_size"), "layers.7: NewSpec has no field head_size; allowed are"),
        (a_spec("NewSpec", without="dtype"), "layers.7: NewSpec has no field dtype; allowed are"),
        (
            a_spec("NewSpec", bounded=True),
            "layers.7: NewSpec gives blocks back .*; allowed are sliding",
        ),
        (a_spec("NewSpec", non_causal=True), "layers.7: NewSpec has non_causal True.*; allowed is False"),
        (a_spec("CrossAttentionSpec"), "layers.7: CrossAttentionSpec holds no KV of the prompt's tokens"),
        (a_spec("EncoderOnlyAttentionSpec"), "layers.7: EncoderOnlyAttentionSpec holds no KV"),
        (SimpleNamespace(block_size=16), "layers.7: SimpleNamespace is no dataclass; allowed"),
        (absent(), "layers.7: NeverCachedSpec is not cached by vLLM, and no field says why; allowed"),
        (a_state(mamba_cache_mode="none"), "layers.7: mamba_cache_mode is 'none'; allowed is 'align'"),
    ],
)
def test_what_cannot_be_derived_is_refused_with_the_layer_and_the_field(spec: Any, says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        policy_of("layers.7", spec)


def test_layers_that_share_blocks_have_one_policy() -> None:
    window = a_spec("SlidingWindowSpec", bounded=True, sliding_window=128)
    each = {"layers.0": FULL_SPEC, "layers.1": window}
    mixed = SimpleNamespace(kv_cache_specs=each, block_size=BLOCK)
    group = SimpleNamespace(kv_cache_spec=mixed, layer_names=list(each))
    with pytest.raises(InvalidError, match=r"layers layers.0 and layers.1 share blocks, .*; allowed is one"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]))


def test_rings_and_replicas_are_in_no_chunk_and_cut_no_chunk() -> None:
    full, ring = groups_of(a_model(FULL_SPEC, absent(uses_slot_mapping=False)))
    assert full == Group(BLOCK, 2) and ring == Group(5, 1, Absent("ring"))
    assert block_tokens_of((full, ring)) == BLOCK and not ring.paged and ring.blocks_at_most(999, 9) == 1
    assert [fail_as_one(groups) for groups in [(full,), (full, ring)]] == [False, True]
    host = a_model(FULL_SPEC)
    host.kv_cache_groups[0].host_resident = True
    with pytest.raises(InvalidError, match="layers.0 keeps its KV in host memory"):
        groups_of(host)


def test_of_a_window_a_chunk_keeps_what_is_seen_from_its_end() -> None:
    kept = [
        Group(block_tokens, 1, policy).kept_pages(256)
        for block_tokens, policy in [
            (64, FULL),
            (64, Window(128)),
            (64, Window(129)),
            (64, Window(4096)),
            (4, Window(8)),  # the compressor of DeepSeek-V4
            (64, Local(8192)),
            (64, Local(64)),
        ]
    ]
    assert kept == [4, 2, 3, 4, 2, 4, 1]


def test_ranks_that_share_the_tokens_of_a_block_have_longer_blocks() -> None:
    (two,) = groups_of(a_model(LATENT_SPEC), context_ranks=2)
    assert two == Group(2 * BLOCK, 2, shared=False), "each rank has every second token"
    replicated = a_spec("MLAAttentionSpec", dcp_sharded=False)
    assert groups_of(a_model(replicated), context_ranks=2) == (Group(BLOCK, 2, shared=True),)


@dataclass(frozen=True)
class Layer:
    """A layer, with fields that only newer models have."""

    block_size: int = BLOCK
    num_kv_heads: int = 1
    head_size: int = 512
    dtype: str = "uint8"
    tokens_per_state: int = 1
    cache_role: str = "sparse"
    page_size_padded: int | None = None


def said_of(*specs: Layer) -> str:
    """What a namespace says of a group with these layers."""
    each = {f"layers.{number}": spec for number, spec in enumerate(specs)}
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs=each, block_size=BLOCK))
    return str(namespace.attention_of(SimpleNamespace(), SimpleNamespace(kv_cache_groups=[group])))


def test_kv_that_differs_in_one_field_of_one_layer_is_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace.compat, "cpu_kernel", lambda *_: None)
    plain = said_of(Layer(), Layer(head_size=128))
    for other in (
        (Layer(), Layer(head_size=132)),  # an indexer of another width
        (Layer(tokens_per_state=4), Layer(head_size=128)),  # a compressor of another ratio
        (Layer(), Layer(head_size=128, cache_role="indexer")),
        (Layer(head_size=128), Layer()),
    ):
        assert said_of(*other) != plain
    assert said_of(Layer(page_size_padded=1 << 20), Layer(head_size=128)) == plain, "room is no KV"


def test_a_chunk_holds_no_generated_tokens_where_these_see_less_than_a_prompt_would() -> None:
    from test_parts import a_request, facts

    from forebay.vllm.connector.stores import Stores

    (group,) = groups_of(a_model(a_spec("RSWASpec", rswa_window=64)))
    for groups, goal in (((group,), 2), ((Group(BLOCK, 8),), 4)):
        planner, one = Stores(facts(groups=groups), workers=1), a_request(4 * CHUNK + 10, 0)
        one.request.num_prompt_tokens = 2 * CHUNK + 10
        planner.set_goal(one, 4 * CHUNK + 10, is_prefill=False)
        assert one.goal == goal
