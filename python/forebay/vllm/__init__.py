"""Forebay in vLLM: `register` makes its parts known to vLLM by name.

`connector` is the KV connector, `tiering` a tier below vLLM's own cache in host memory, `sleep` the
sleep-mode backend, and `worker` the worker that chooses it. `register` is the entry point `forebay`
in the group `vllm.general_plugins`, which vLLM calls once in each of its processes. Nothing here
imports vLLM before that.
"""

from contextlib import suppress

SLEEP_BACKEND = "forebay"
TIER = "forebay"
CONNECTOR = "ForebayConnector"


def register() -> None:
    """Registers connector, tier and sleep-mode backend. May be called again."""
    _register_sleep()
    _register_tier()
    _register_connector()


def _register_connector() -> None:
    """Then `kv_connector` names it without a module's path."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ModuleNotFoundError:
        return
    with suppress(ValueError):  # Already there.
        KVConnectorFactory.register_connector(CONNECTOR, "forebay.vllm.connector", CONNECTOR)


def _register_tier() -> None:
    """Then the secondary tier type `forebay` names it. vLLM 0.26 knows no path for that."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ModuleNotFoundError:
        return
    with suppress(ValueError):  # Already there.
        SecondaryTierFactory.register_tier(TIER, "forebay.vllm.tiering", "ForebayTierManager")


def _register_sleep() -> None:
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ModuleNotFoundError:
        return
    with suppress(ValueError):  # Already there: the worker calls this too.
        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "forebay.vllm.sleep", "ForebayBackend")
