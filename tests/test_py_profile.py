"""`python -m forebay.vllm.profile`: which steps it times, and what it leaves out, on a made-up engine."""

import json
import os
from pathlib import Path

import pytest

from forebay.vllm import profile


class Made:
    """A timer whose engine takes a millisecond for each new token, and keeps so many tokens of a prefix."""

    def __init__(self, keeps: int) -> None:
        self.most_tokens, self.most_new, self.block_tokens, self.keeps = 6000, 2048, 16, keeps
        self.known: list[list[int]] = []
        self.next = 0

    def draw(self, tokens: int) -> list[int]:
        self.next += tokens
        return list(range(self.next - tokens, self.next))

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        shared = [len(os.path.commonprefix([prompt, other])) for other in self.known]
        cached = min(max(shared, default=0), self.keeps) // 16 * 16
        self.known.append(prompt)
        return (len(prompt) - cached) / 1000, cached


def test_each_step_is_timed_behind_a_prefix_that_is_there() -> None:
    steps = list(profile.times(Made(keeps=1 << 20)))
    assert {prefix for _, prefix, _ in steps} == {0, 1024, 4096}
    assert all(seconds == pytest.approx(new / 1000) for new, _, seconds in steps)
    assert len([one for one in steps if one[:2] == (256, 1024)]) == profile.RUNS


def test_no_step_is_longer_than_the_engine_takes() -> None:
    made = Made(keeps=1 << 20)
    steps = list(profile.times(made))
    assert max(new for new, _, _ in steps) == made.most_new
    assert max(map(len, made.known)) + profile.ANSWER_TOKENS <= made.most_tokens


def test_a_prefix_that_the_engine_forgot_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    steps = list(profile.times(Made(keeps=1024)))
    assert {prefix for _, prefix, _ in steps} == {0, 1024}
    assert "behind 4096: 1024 were there, not timed" in capsys.readouterr().err


def test_a_profile_has_the_median_of_steps_that_are_alike() -> None:
    text = profile.profile_of(32, [(256, 0, 0.3), (256, 0, 0.1), (256, 0, 0.2), (256, 1024, 0.5)])
    assert json.loads(text) == {
        "version": 1,
        "layers": 32,
        "steps": [
            {"new_tokens": 256, "prefix_tokens": 0, "seconds": 0.2, "count": 3},
            {"new_tokens": 256, "prefix_tokens": 1024, "seconds": 0.5, "count": 1},
        ],
    }


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    profile.check_out(tmp_path / "new")
    (tmp_path / "old").touch()
    profile.check_out(tmp_path / "old")
    for bad in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(ValueError, match="--out is"):
            profile.check_out(bad)


def test_what_is_no_object_is_refused_by_name() -> None:
    assert profile.engine_arguments("m", '{"dtype": "float32"}')["dtype"] == "float32"
    for bad in ("[1]", "{", "1"):
        with pytest.raises(ValueError, match="--engine is"):
            profile.engine_arguments("m", bad)


def test_a_server_with_a_connector_is_timed_without_it_and_with_a_cache_of_prefixes() -> None:
    server = {"kv_transfer_config": {"kv_connector": "ForebayConnector"}, "enable_prefix_caching": False}
    given = profile.engine_arguments("m", json.dumps(server))
    assert given["kv_transfer_config"] is None and given["enable_prefix_caching"] is True
