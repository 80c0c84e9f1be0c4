"""A connector that does nothing: what vLLM itself takes in each step as soon as there is one.

It knows vLLM's interface of connectors and must never do anything.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Nothing(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Has nothing, and takes nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """A request has come."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request got blocks."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers do in this step."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """A request has ended."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """A step begins."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer's KV is about to be read."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's KV was written."""

    def wait_for_save(self) -> None:
        """A step ends."""
