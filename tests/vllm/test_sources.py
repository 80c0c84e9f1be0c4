"""Where hits came from, as vLLM counts it on its own page. From 0.32 on vLLM asks the connector for that."""

from pathlib import Path

import pytest
from conftest import ASKED, CHUNK, Daemon, Engine, arguments, transfer
from processes import until

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="SKIPPED: no vLLM here, or one that does not say this"
)


def test_vllm_counts_what_came_from_memory_and_what_from_the_disk(
    model: Path, plain: dict[str, list[int]], tmp_path: Path
) -> None:
    node = Daemon(tmp_path / "node")
    given = arguments(model, transfer(node.socket), disable_log_stats=False)
    (tokens, count), whole = ASKED["short"], len(ASKED["short"][0]) // CHUNK * CHUNK

    def cached() -> int:
        """Of the prompt, when vLLM itself has kept nothing."""
        assert engine.forget()
        (said,) = engine.generate(prompts=[tokens], tokens=count)
        assert said["tokens"] == plain["short"]
        return int(said["cached"])

    with node, Engine(given, tmp_path / "log") as engine:
        assert cached() == 0 and engine.sources() == {}
        engine.settle()
        node.written((len(tokens) + count - 1) // CHUNK)
        assert cached() == whole and engine.sources() == {"host": whole}
        node.kill()
        until(lambda: not engine.connected())
        node.start()
        until(engine.connected)  # A load that fails is counted too.
        until(lambda: cached() == whole)
        assert engine.sources() == {"host": whole, "disk": whole}
