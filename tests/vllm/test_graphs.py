"""CUDA graphs, as vLLM has them on GPUs if it is not told otherwise. What a graph reads is there before it
begins: none of its layers asks for it. `FOREBAY_VLLM_ON=graphs` has all other tests with them too.
"""

from pathlib import Path

import pytest
from conftest import ASKED, GRAPHS, Daemon, Engine, arguments, transfer


@pytest.mark.skipif(not GRAPHS, reason="SKIPPED: no CUDA graphs here: FOREBAY_VLLM_ON=graphs on a GPU")
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
def test_what_a_graph_reads_is_there_before_it_begins(
    model: Path, plain: dict[str, list[int]], tmp_path: Path, mode: str
) -> None:
    daemon = Daemon(tmp_path / "node")
    given = arguments(model, transfer(daemon.socket), compilation_config={"cudagraph_mode": mode})
    with daemon, Engine(given, tmp_path / "log") as engine:
        graphs = 0
        for name in ("even", "long", "even", "long"):
            tokens, count = ASKED[name]
            engine.whole_graphs()
            engine.layerwise(possible=True)
            (said,) = engine.generate(prompts=[tokens], tokens=count)
            assert said["tokens"] == plain[name], name
            if said["cached"]:
                graphs += engine.whole_graphs()
            assert engine.forget()
        # A prompt of which all is there computes one token, as decodes do, which are graphs as a
        # whole.
        assert (graphs > 0) == mode.startswith("FULL")
