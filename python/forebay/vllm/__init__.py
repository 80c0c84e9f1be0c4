"""Forebay in vLLM: `register` makes its parts known to vLLM by name.

`connector` is the KV connector, `tiering` a tier below vLLM's own cache in host memory, `sleep` the
sleep-mode backend, and `worker` the worker that chooses it. `register` is the entry point `forebay`
in the group `vllm.general_plugins`, which vLLM calls once in each of its processes. Nothing here
imports vLLM before that.
"""

from contextlib import suppress

SLEEP_BACKEND = "forebay"
CONNECTOR = "ForebayConnector"


def register() -> None:
    """Registers connector, tier and sleep-mode backend. May be called again."""
    if_new = suppress(ValueError)  # A name that is there already is refused.
    with if_new:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "forebay.vllm.sleep", "ForebayBackend")
    with if_new:  # Then the secondary tier type `forebay` names it. vLLM 0.26 knows no path for that.
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier("forebay", "forebay.vllm.tiering", "ForebayTierManager")
    with if_new:  # Then `kv_connector` names it without a module's path.
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR, "forebay.vllm.connector", CONNECTOR)
