"""Stands for `SchedulerHalf` where a model keeps no KV, such as one that only encodes.

All requests are left alone. There is no node to ask.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.logger import init_logger

from forebay.vllm.connector.corrections import Corrections, before_counts_are_read
from forebay.vllm.connector.metadata import NOTHING, Report, Step
from forebay.vllm.connector.namespace import is_alone
from forebay.vllm.connector.stats import Counts

logger = init_logger("vllm.forebay.scheduler")


class NoKv:
    """The methods that `ForebayConnector` calls. Nothing is loaded, stored or found."""

    events = None

    def __init__(self, vllm_config: Any) -> None:
        self.counts = Counts()
        self.corrections = Corrections(1, 1, is_alone(vllm_config))
        before_counts_are_read()
        logger.warning("%s keeps no KV: all its requests are left alone", vllm_config.model_config.model)

    def workers_opened(self, workers: Mapping[int, object]) -> None: ...

    def request_added(self, request: Any) -> None:
        self.counts.add("requests_left_alone")

    def match(self, request: Any, held: int) -> tuple[int | None, bool]:
        self.corrections.answered[request.request_id] = held
        return 0, False

    def blocks_allocated(self, request: Any, blocks: Any, external: int) -> None:
        self.corrections.admitted(None, request, external, may_load=False)

    def sources(self, request: Any, external: int) -> dict[str, int]:
        return {}

    def frees_soon(self) -> bool:
        return False

    def freed(self, names: Iterable[str]) -> None: ...

    def received(self, names: Iterable[str]) -> None: ...

    def build_step(self, output: Any) -> Step:
        self.corrections.answered.clear()
        return NOTHING

    def step_ended(self, report: Report | None) -> None: ...

    def reset(self) -> bool:
        return True

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def close(self) -> None: ...
