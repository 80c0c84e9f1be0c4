"""Prefill in one `vllm serve`, decode in another, behind the toy proxy of vLLM's own tests as it is.

The proxy was written for NIXL's connector and knows nothing of ours. What it answers must be what one vLLM
alone says, and the decoder's metrics must say that it did not compute the prompt.
"""

import json
import os
import re
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import llm_d
import pytest
import upstream
from conftest import ASKED, CHUNK, prompt, transfer
from nodes import two_peers
from processes import until
from servers import Process, serve, toy_proxy
from servers import router as start_router

pytest.importorskip("vllm.config", reason="SKIPPED: this Python has no vLLM: `make test-vllm`")

PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
# Longer than any store takes; what never comes is waited for once.
WAIT_S = 30
PAGE = Path(__file__).parents[2] / "docs/reference/vllm-metrics.md"
CROWD = [name for name in ASKED if name.startswith("crowd")]


@dataclass
class Site:
    """What stands behind the proxy."""

    prefiller: Process
    decoder: Process
    proxy: Process

    def ask(self, name: str) -> str:
        """What the proxy says to one of `ASKED`."""
        return str(self.proxy.complete(*ASKED[name])["choices"][0]["text"])


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    script = upstream.vllm_tests() / PROXY
    folder = tmp_path_factory.mktemp("http")
    with ExitStack() as ends:
        servers = []
        for number, node in enumerate(two_peers(folder)):
            ends.callback(node.kill)
            log = folder / f"log{number}"
            servers.append(serve(model, transfer(node.socket, handover_wait_s=WAIT_S), number, log))
            ends.callback(servers[-1].kill)
        proxy = toy_proxy(script, *servers, folder / "proxy")
        ends.callback(proxy.kill)
        for process in (*servers, proxy):
            process.wait()
        yield Site(*servers, proxy)


@pytest.fixture(scope="module")
def alone(plain: dict[str, list[int]]) -> dict[str, str]:
    """What one vLLM without a connector says, as text."""
    return {name: " ".join(f"t{token}" for token in tokens) for name, tokens in plain.items()}


@pytest.mark.parametrize("name", ["short", "even", "long"])
def test_the_answer_is_that_of_one_server_alone(site: Site, alone: dict[str, str], name: str) -> None:
    before = site.decoder.counters()
    assert site.ask(name).strip() == alone[name]
    # The last token is computed again for its logits, and no other. The decoder's metrics say so:
    # the answer itself says, from vLLM 0.32 on, how many tokens the prefiller had cached.
    loaded = "vllm:external_prefix_cache_hits_total"
    until(lambda: moved(site, before).get(loaded, 0) >= len(ASKED[name][0]) - 1)


def test_a_streamed_answer_is_the_same_and_comes_in_pieces(site: Site, alone: dict[str, str]) -> None:
    pieces = list(site.proxy.stream(*ASKED["left"]))
    assert "".join(pieces).strip() == alone["left"] and len(pieces) > 1


def test_requests_at_the_same_time_do_not_mix(site: Site, alone: dict[str, str]) -> None:
    with ThreadPoolExecutor(len(CROWD)) as threads:
        said = list(threads.map(site.ask, CROWD))
    assert [text.strip() for text in said] == [alone[name] for name in CROWD]


def test_the_decoders_metrics_count_what_came_over(site: Site, alone: dict[str, str]) -> None:
    before = site.decoder.counters()
    assert site.ask("handed").strip() == alone["handed"]
    # vLLM's front end hears of a step's counters a moment after its tokens.
    until(lambda: "vllm:forebay_bytes_loaded_total" in moved(site, before))
    counted = moved(site, before)
    assert counted["vllm:forebay_handovers_total"] == counted["vllm:forebay_loads_total"] == 1
    assert counted["vllm:forebay_tokens_peer_total"] == -(-len(ASKED["handed"][0]) // CHUNK) * CHUNK
    assert "vllm:forebay_loads_failed_total" not in counted


# What llm-d's sidecar (v0.9, `nixlv2`) tells a prefiller: what NIXL's connector would fill in is
# null.
SIDECAR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


def test_what_llm_ds_sidecar_sends_hands_a_prompt_over(site: Site, alone: dict[str, str]) -> None:
    before = site.decoder.counters()
    tokens, count = ASKED["middle"]
    prefilled = site.prefiller.complete(tokens, 1, stream=False, kv_transfer_params=SIDECAR_PREFILL)
    said = site.decoder.complete(tokens, count, kv_transfer_params=prefilled["kv_transfer_params"])
    assert said["choices"][0]["text"].strip() == alone["middle"]
    until(lambda: moved(site, before).get("vllm:forebay_handovers_total") == 1)


@pytest.fixture
def sidecar(site: Site, tmp_path: Path) -> Iterator[Process]:
    """llm-d's own sidecar before the decoder."""
    program = os.environ.get("LLM_D_SIDECAR")
    if program is None:
        pytest.skip("SKIPPED: no sidecar of llm-d: LLM_D_SIDECAR names one")
    made = llm_d.sidecar(program, site.decoder, tmp_path / "sidecar")
    try:
        made.wait()
        yield made
    finally:
        made.kill()


def test_behind_llm_ds_own_sidecar_the_answer_is_that_of_one_server_alone(
    site: Site, alone: dict[str, str], sidecar: Process
) -> None:
    before = site.decoder.counters()
    prefiller = {"x-prefiller-host-port": site.prefiller.base.removeprefix("http://")}
    for name, stream in (("right", False), ("crowd 20", True)):
        with sidecar.post(*ASKED[name], headers=prefiller, stream=stream) as answer:
            assert text_of(answer.read()).strip() == alone[name]
    until(lambda: moved(site, before).get("vllm:forebay_handovers_total", 0) > 0)


def test_behind_llm_ds_picker_and_sidecar_prompts_are_handed_over(
    site: Site, alone: dict[str, str], sidecar: Process, tmp_path: Path
) -> None:
    program = os.environ.get("LLM_D_EPP")
    if program is None:
        pytest.skip("SKIPPED: no picker of llm-d: LLM_D_EPP names one")
    with ExitStack() as ends:
        envoy = llm_d.gateway(program, site.prefiller, sidecar, tmp_path, ends)
        envoy.wait()
        before = site.decoder.counters()
        with envoy.post(*ASKED["handed"]) as answer:
            assert text_of(answer.read()).strip() == alone["handed"]
        until(lambda: moved(site, before).get("vllm:forebay_handovers_total", 0) > 0)


def text_of(answer: bytes) -> str:
    """What an answer says, streamed or not."""
    lines = (line.removeprefix("data: ") for line in answer.decode().splitlines())
    said = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(piece["choices"][0]["text"] for piece in said if piece["choices"])


# A router that takes a token for a millisecond has reasons to hand over. Its engines are quicker.
PROFILE = """
name = "slow"
[model]
name = "tiny"
layers = 2
vocab = 1000
kv_bytes_per_token = 1024
max_model_tokens = 2048
[step]
linear_us_per_token = 1000.0
attention_ns_per_pair = 0.0
kv_read_ns_per_context_token = 10000.0
us_per_request = 10.0
floor_eager_us = 1000.0
floor_graph_us = 1000.0
[api]
us_per_request = 100.0
us_per_token = 0.1
[memory]
pool_tokens = 12800
block_tokens = 16
[scheduler]
max_batched_tokens = 512
max_seqs = 8
[host_link]
gb_per_s = 25.0
"""


@pytest.fixture
def router(site: Site, tmp_path: Path) -> Iterator[Process]:
    """Hands over where it saves waiting, either engine to the other."""
    profile = tmp_path / "slow.toml"
    profile.write_text(PROFILE)
    engines = {"e0": site.prefiller, "e1": site.decoder}
    made = start_router("elastic", profile, engines, tmp_path / "router", "--hand-over", "forebay")
    try:
        made.wait()
        yield made
    finally:
        made.kill()


def test_the_router_hands_over_and_the_answer_is_that_of_one_server_alone(
    router: Process, alone: dict[str, str]
) -> None:
    # One engine says a long answer behind a long context. The other one's answer comes as a whole:
    # as far as the router sees, its prompt is not computed.
    with ExitStack() as ends:
        long = ends.enter_context(router.post(prompt(30, 1400), 600, stream=True))
        assert long.readline()
        threads = ends.enter_context(ThreadPoolExecutor(1))
        whole = threads.submit(router.complete, prompt(31, 700), 1000)
        until(lambda: router.counters()["forebay_route_pending_prefill_tokens"] > 0)
        tokens, count = ASKED["left"]
        with router.post(tokens, count) as answer:
            by = {answer.headers["x-forebay-prefill"], answer.headers["x-forebay-backend"]}
            said = json.loads(answer.read())["choices"][0]["text"]
        assert not whole.done(), "it was still busy"
        assert by == {"e0", "e1"} and said.strip() == alone["left"]


def test_every_counter_of_the_documentation_is_on_the_page(site: Site) -> None:
    page = PAGE.read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {f"vllm:forebay_{name}_total" for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    histograms = set(re.findall(r"`(vllm:forebay_\w+)` is a histogram", page))
    # A counter with labels has a type before it has a value.
    types = re.findall(r"^# TYPE (vllm:forebay_\w+) (\w+)$", site.decoder.page("/metrics"), re.MULTILINE)
    assert histograms == {name for name, kind in types if kind == "histogram"}
    assert named == {name for name, kind in types if kind == "counter"} and len(named) > 10


def test_a_prefiller_that_dies_takes_with_it_only_what_it_had_not_handed_over(
    site: Site, alone: dict[str, str]
) -> None:
    going_on = site.proxy.stream(*ASKED["talk"])
    first = next(going_on)
    site.prefiller.freeze()
    with ThreadPoolExecutor(len(CROWD)) as threads:
        lost = [threads.submit(site.ask, name) for name in CROWD]
        site.prefiller.kill()
        for answer in lost:
            assert is_refused(answer.exception())
    assert (first + "".join(going_on)).strip() == alone["talk"]
    with pytest.raises(urllib.error.HTTPError, match="500"):
        site.ask("short")


def test_a_decoder_whose_prefiller_is_gone_computes(site: Site, alone: dict[str, str]) -> None:
    before = site.decoder.counters()
    ticket = {"do_remote_prefill": True, "do_remote_decode": False}
    said = site.decoder.complete(*ASKED["never"], kv_transfer_params=ticket)
    assert said["choices"][0]["text"].strip() == alone["never"]
    until(lambda: moved(site, before).get("vllm:forebay_handovers_late_total") == 1)


def is_refused(error: BaseException | None) -> bool:
    """Whether the proxy has said that it cannot."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 500


def moved(site: Site, before: dict[str, float]) -> dict[str, float]:
    """What the decoder has counted since then."""
    after = site.decoder.counters()
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
