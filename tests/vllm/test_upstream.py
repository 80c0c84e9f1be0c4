"""vLLM's own tests, with our classes in the places of those that they were written for.

They come from vLLM's source distribution. What is left out is left out by name and with the reason; all
else must pass. Runs in the Python that has vLLM.
"""

from pathlib import Path

import pytest
import upstream
from nodes import Node

pytest.importorskip("vllm.config", reason="SKIPPED: this Python has no vLLM: `make test-vllm`")

CONNECTOR = "tests/v1/kv_connector/unit/test_"
TIERING = "tests/v1/kv_offload/tiering/test_"
ABOUT_CONNECTORS = [
    "cache_pollution_prevention",
    "config",
    "error_propagation",
    "invalid_blocks_correctness",
    "kv_connector_lifecycle",
    "kv_load_failure_recovery",
    "output_aggregator",
    "remote_decode_lifecycle",
    "remote_prefill_lifecycle",
]
ABOUT_TIERS = ["tiering_offloading", "fs_tier"]
FILES = "asks for paths, threads or what is in files of the tier that keeps files"
EVENTS = "KV events and localities of a tier: ours reports none"
ANSWERED = "answers in the connector's place, so that it has found nothing when it is to load"
MAMBA = "models with Mamba layers are refused"
STORED = "wants the blocks of a request back while it is stored"
MEDIUM = "a tier that names its medium: ours is memory, disk and peers"
LABELS = "asks for the labels that the example tier gives its own figures"
SIZES = "tensor-parallel sizes that share a tier: with ours, engines share nothing that differ in anything"
LEFT_OUT = {
    "test_remote_decode_lifecycle.py::test_prefix_cache_lifecycle": STORED,
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba": MAMBA,
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_inflight": ANSWERED,
    "test_remote_prefill_lifecycle.py::test_async_loads_both_admitted_when_pool_fits": ANSWERED,
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin": ANSWERED,
    "test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks": MAMBA,
    "test_remote_prefill_lifecycle.py::test_deferred_lookup_does_not_block_parked_load": ANSWERED,
    "test_tiering_offloading.py::TestTieringOffloadingManager::test_tier_filter_skips_filtered_secondary"
    "[non_matching_medium]": MEDIUM,
    "test_tiering_offloading.py::TestExampleSecondaryTierManager::test_config_info_keys_match": LABELS,
    "test_fs_tier.py::test_store_accepts_block_published_by_another_writer": FILES,
    "test_fs_tier.py::test_failed_load_after_abort_does_not_break_newer_probe": FILES,
    "test_fs_tier.py::test_invalid_path_raises_at_construction": FILES,
    "test_fs_tier.py::test_shutdown_discards_pending_tasks": FILES,
    "test_fs_tier.py::test_wait_idle_blocks_until_tasks_complete": FILES,
    "test_fs_tier.py::test_batch_lookup_c_extension": FILES,
    "test_fs_tier.py::test_batch_lookup_dispatch": FILES,
    "test_fs_tier.py::test_store_load_roundtrip_without_o_direct": FILES,
    "test_fs_tier.py::test_failed_load_corrects_verdict_and_removes_corrupt_file": FILES,
    "test_fs_tier.py::test_batched_partial_load_failure_keeps_loaded_blocks": FILES,
    "test_fs_tier.py::test_batched_load_first_block_fails_marks_whole_batch": FILES,
    "test_fs_tier.py::test_transient_load_failure_leaves_file": FILES,
    "test_fs_tier.py::test_fs_tier_cross_tp_round_trip": SIZES,
    "test_fs_tier.py::test_invalid_locality_raises_at_construction": EVENTS,
    "test_fs_tier.py::test_factory_forwards_locality_to_fs_tier": EVENTS,
    "test_fs_tier.py::test_successful_store_emits_stored_event": EVENTS,
    "test_fs_tier.py::test_store_event_uses_configured_locality": EVENTS,
    "test_fs_tier.py::test_mixed_job_results_emit_event_only_for_successful_job": EVENTS,
    "test_fs_tier.py::test_partially_failed_store_emits_no_event": EVENTS,
    "test_fs_tier.py::test_events_disabled_by_default": EVENTS,
    "test_fs_tier.py::test_events_require_global_kv_events_flag": EVENTS,
    "test_fs_tier.py::test_cascade_store_emits_fs_event_through_tiering_manager": EVENTS,
}


@pytest.fixture(scope="module")
def outcome(model: Path, tmp_path_factory: pytest.TempPathFactory) -> upstream.Outcome:
    """All of them in one process: importing vLLM takes longer than the tests."""
    sources = upstream.vllm_tests()
    files = [f"{CONNECTOR}{name}.py" for name in ABOUT_CONNECTORS]
    files += [f"{TIERING}{name}.py" for name in ABOUT_TIERS]
    node = Node(tmp_path_factory.mktemp("upstream"))
    settings = {"FOREBAY_TEST_NODE": str(node.socket), "FOREBAY_TEST_MODEL": str(model)}
    try:
        return upstream.run(sources, files, "upstream_stand_ins", settings)
    finally:
        node.kill()


def check(outcome: upstream.Outcome, names: list[str], enough: int) -> None:
    """All that were not left out have passed, and they are many."""
    of_these = tuple(f"test_{name}.py" for name in names)
    left_out = tuple(LEFT_OUT)
    failed = {one for one in outcome.failed if one.startswith(of_these) and not one.startswith(left_out)}
    passed = {one for one in outcome.passed if one.startswith(of_these)}
    assert not failed, f"{sorted(failed)}\n{outcome.text[-20_000:]}"
    assert len(passed) >= enough, f"only {sorted(passed)}\n{outcome.text[-5_000:]}"


def test_a_request_goes_its_way_with_our_connector_as_with_vllms(outcome: upstream.Outcome) -> None:
    check(outcome, ABOUT_CONNECTORS, 40)


def test_tiers_work_together_with_ours_as_with_vllms(outcome: upstream.Outcome) -> None:
    check(outcome, ABOUT_TIERS, 34)
