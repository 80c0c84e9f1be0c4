"""Forebay in vLLM. This file knows what vLLM looks up by name; it imports no vLLM before it is called.

`register` is the entry point `forebay` in the group `vllm.general_plugins`: vLLM calls it once in each of its
processes. `forebay.vllm.connector` is the KV connector, `forebay.vllm.tiering` a tier below vLLM's own cache
in host memory, `forebay.vllm.sleep` the sleep-mode backend, `forebay.vllm.worker` the worker that chooses it.
"""

from contextlib import suppress

SLEEP_BACKEND = "forebay"
TIER = "forebay"
CONNECTOR = "ForebayConnector"


def register() -> None:
    """Makes connector, tier and sleep-mode backend known to vLLM. May be called any number of times."""
    _register_sleep()
    _register_tier()
    _register_connector()


def _register_connector() -> None:
    """Then `kv_connector` alone names it, without a module's path."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ModuleNotFoundError:
        return
    with suppress(ValueError):  # Already there.
        KVConnectorFactory.register_connector(CONNECTOR, "forebay.vllm.connector", CONNECTOR)


def _register_tier() -> None:
    """Then a secondary tier's type `forebay` names it, without a module's path, which 0.26 does not know."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ModuleNotFoundError:
        return
    with suppress(ValueError):  # Already there.
        SecondaryTierFactory.register_tier(TIER, "forebay.vllm.tiering", "ForebayTierManager")


def _register_sleep() -> None:
    """A vLLM without sleep-mode backends has nothing to register with: then nothing happens."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ModuleNotFoundError:
        return
    try:
        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "forebay.vllm.sleep", "ForebayBackend")
    except ValueError:
        return  # Already there: the entry point was called, and the worker calls it where there is none.
