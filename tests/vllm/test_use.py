"""What the node learns of use: a prompt's chunks are used once for each request, whoever has them. By
that it keeps on its disk what is used again.
"""

from pathlib import Path

from conftest import CHUNK, Daemon, Engine, arguments, prompt, transfer, until

CHUNKS = 4


def test_a_prompt_that_vllm_itself_has_cached_is_used_again_too(model: Path, tmp_path: Path) -> None:
    node = Daemon(tmp_path / "node", write_back="second-hit")
    given = arguments(model, transfer(node.socket))
    once, again = prompt(70, CHUNKS * CHUNK + 5), prompt(71, CHUNKS * CHUNK + 5)

    def used_once() -> float:
        return node.metric('forebay_admission_bytes_total{verdict="used_once"')

    with node, Engine(given, tmp_path / "log") as engine:
        for tokens in (once, again):
            engine.generate(prompts=[tokens], tokens=1)
            engine.settle()
        assert node.metric('forebay_chunks{tier="memory"') == 2 * CHUNKS
        until(lambda: used_once() > 0)
        assert node.metric('forebay_chunks{tier="disk"') < CHUNKS
        (said,) = engine.generate(prompts=[again], tokens=1)
        assert said["cached"] == CHUNKS * CHUNK and engine.stats()["loads"] == 0, "vLLM was to have it"
        node.written(CHUNKS)
        until(lambda: node.metric("forebay_write_back_waiting_chunks") == 0)
        assert node.metric('forebay_chunks{tier="disk"') < 2 * CHUNKS, "what was used once is there too"
