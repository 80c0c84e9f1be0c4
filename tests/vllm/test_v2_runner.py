"""vLLM's V2 model runner writes to blocks that were given out before it tells connectors of the step: no
store that still reads them may see that.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="SKIPPED: no vLLM here: `make test-vllm`")

from test_reset import a_worker  # noqa: E402

from forebay.errors import InvalidError  # noqa: E402
from forebay.vllm.connector import compat  # noqa: E402
from forebay.vllm.connector.metadata import Step, Store  # noqa: E402

pytestmark = pytest.mark.smoke


class Runner:
    """Stands in for the model runner. It writes down what happens."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def update_requests(self, scheduler_output: Any) -> None:
        self.happened.append(f"writes to {scheduler_output.new_block_ids_to_zero}")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    module: Any = ModuleType("vllm.v1.worker.gpu.model_runner")
    module.GPUModelRunner = type("GPUModelRunner", (Runner,), {"update_requests": Runner.update_requests})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", module)
    monkeypatch.setattr(compat, "_before_writes", [])
    found: type[Runner] = module.GPUModelRunner
    return found


def a_step(message: Any) -> Any:
    return SimpleNamespace(new_block_ids_to_zero=[5], kv_connector_metadata=message)


@pytest.mark.parametrize("several", [False, True])
def test_stores_end_before_their_blocks_are_zeroed(runner: type[Runner], several: bool) -> None:
    happened: list[str] = []
    half = a_worker(happened)
    half.step, half.is_alone = None, not several
    for _ in range(2):  # A process may have several connectors, and one wrapper is enough.
        compat.before_writes(half.before_writes)
    compat.not_before_writes(half.before_writes)
    step: Any = Step(2, idle=False, flush=[3, 4], early=True)  # 4 has ended.
    message = SimpleNamespace(metadata=(SimpleNamespace(), step)) if several else step
    runner(happened).update_requests(a_step(message))
    assert happened == ["stored [3]", "writes to [5]"], "loads begin later: the runner would zero them"
    compat.not_before_writes(half.before_writes)
    runner(happened).update_requests(a_step(message))
    assert happened[2:] == ["writes to [5]"]


def test_a_warm_up_has_no_message(runner: type[Runner]) -> None:
    happened: list[str] = []
    half = a_worker(happened)
    half.step = None
    compat.before_writes(half.before_writes)
    runner(happened).update_requests(a_step(None))
    assert happened == ["writes to [5]"]


def test_stores_of_the_last_step_that_vllm_did_not_ask_for_are_begun_before_their_blocks_are_zeroed(
    runner: type[Runner],
) -> None:
    happened: list[str] = []
    half = a_worker(happened)
    half.step = Step(1, idle=False, stores=[Store(8, [[]], [])])
    half.start_stores = lambda: happened.append("begun")
    compat.before_writes(half.before_writes)
    runner(happened).update_requests(a_step(Step(2, idle=False, flush=[3])))
    assert happened == ["begun", "stored [3]", "writes to [5]"]


def test_a_model_runner_that_cannot_be_made_to_wait_is_refused(
    runner: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(runner, "update_requests")
    monkeypatch.delattr(Runner, "update_requests")
    with pytest.raises(InvalidError, match="has no update_requests.* allowed is VLLM_USE_V2_MODEL_RUNNER=0"):
        compat.before_writes(lambda _: None)
