"""Forebay in vLLM. This file knows what vLLM looks up by name; it imports no vLLM before it is called.

`register` is the entry point `forebay` in the group `vllm.general_plugins`: vLLM calls it once in each of its
processes. `forebay.vllm.sleep` is the sleep-mode backend, `forebay.vllm.worker` the worker that chooses it.
"""

SLEEP_BACKEND = "forebay"


def register() -> None:
    """Makes the sleep-mode backend `forebay` known to vLLM. May be called any number of times.

    A vLLM without sleep-mode backends has nothing to register with: then nothing happens.
    """
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ModuleNotFoundError:
        return
    try:
        SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "forebay.vllm.sleep", "ForebayBackend")
    except ValueError:
        return  # Already there: the entry point was called, and the worker calls it where there is none.
