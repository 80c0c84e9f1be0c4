"""The scheduler's half for a model that keeps no KV, such as one that only encodes: all is left alone.

Knows what vLLM's scheduler calls. Must never know a node: there is nothing to ask for.
"""

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

from forebay.vllm.connector import step_recovery
from forebay.vllm.connector.corrections import Corrections, before_counts_are_read
from forebay.vllm.connector.metadata import NOTHING, Report, Step
from forebay.vllm.connector.namespace import is_alone
from forebay.vllm.connector.stats import Counts

logger = init_logger("vllm.forebay.scheduler")


class NoKv:
    """What `SchedulerHalf` is where there is KV."""

    events = None

    def __init__(self, vllm_config: Any) -> None:
        """Says so in the log."""
        self.counts = Counts()
        self.corrections = Corrections(1, 1, is_alone(vllm_config))
        before_counts_are_read()
        logger.warning("%s keeps no KV: all its requests are left alone", vllm_config.model_config.model)

    def request_added(self, request: Any) -> None:
        """A request came."""
        self.counts.add("requests_left_alone")

    def match(self, request: Any, held: int) -> tuple[int | None, bool]:
        """There is nothing."""
        self.corrections.told[request.request_id] = held
        return 0, False

    def blocks_allocated(self, request: Any, blocks: Any, external: int) -> None:
        """A request is computed."""
        self.corrections.admitted(None, request, external, may_load=False)

    def blocks_lost(self, name: str) -> None:
        """It has none."""

    def departed_requests(self) -> list[tuple[str, step_recovery.Tables]]:
        """Nobody."""
        return []

    def sources(self, request: Any, external: int) -> dict[str, int]:
        """None."""
        return {}

    def frees_soon(self) -> bool:
        """No."""
        return False

    def freed(self, names: Iterable[str]) -> None:
        """Nothing was kept."""

    def received(self, names: Iterable[str]) -> None:
        """Nothing was loaded."""

    def build_step(self, output: Any) -> Step:
        """Nothing moves."""
        self.corrections.told.clear()
        return NOTHING

    def step_ended(self, report: Report | None) -> None:
        """Nothing was begun."""

    def reset(self) -> bool:
        """There is nothing to forget."""
        return True

    def request_finished(
        self, request: Any, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended."""
        return False, None

    def close(self) -> None:
        """Nothing is open."""
