"""Prefill in one `vllm serve`, decode in another, behind the toy proxy of vLLM's own tests as it is.

The proxy was written for NIXL's connector and knows nothing of ours. What it answers must be what one vLLM
alone says, and the decoder's metrics must say that it did not compute the prompt.
"""

import re
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import upstream
from conftest import ASKED, CHUNK, transfer
from nodes import two_peers
from processes import until
from servers import Process, serve, toy_proxy

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
    # The last token is computed again for its logits, and no other. The decoder's metrics say so: the answer
    # itself says, from vLLM 0.32 on, how many tokens the prefiller had cached.
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


def test_every_counter_of_the_documentation_is_on_the_page(site: Site) -> None:
    page = PAGE.read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {f"vllm:forebay_{name}_total" for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    on_page = {name for name in site.decoder.counters() if name.startswith("vllm:forebay_")}
    histograms = set(re.findall(r"`(vllm:forebay_\w+)` is a histogram", page))
    assert histograms == {name.removesuffix("_bucket") for name in on_page if name.endswith("_bucket")}
    assert named == {name for name in on_page if name.endswith("_total")} and len(named) > 10


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
