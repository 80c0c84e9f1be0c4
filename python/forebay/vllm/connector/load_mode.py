"""Decides how a load runs: layer by layer under the forward pass, or in the background.

These are pure functions that know no vLLM. Whether to load at all is decided in
`load_or_compute.py`.
"""

# A load this short delays other requests less than an extra step would delay this one.
SHORT_LOAD_S = 0.002
# A step that waits for a load delays new requests and cannot be aborted, so it waits no longer.
HOLD_UP_S = 0.5


def runs_layerwise(
    *,
    layerwise_possible: bool,
    handed_over: bool,
    others: int,
    load_s: float | None,
    compute_s: float,
    in_memory: bool,
) -> bool:
    """Whether one load runs in the request's own step, each layer just before it is needed.

    If not, it runs in the background: between steps, while the request waits.

    `layerwise_possible`: a load that fails in its own step can be undone. `handed_over`: all of it
    comes from a prefiller, so nothing can be computed meanwhile. `others`: requests that compute or
    load in this step, and engines that wait for it. `load_s`: how long the load takes, if known.
    `compute_s`: how long the step computes after it. `in_memory`: the node has all in memory.
    """
    if handed_over or not layerwise_possible:
        return False
    if load_s is None:
        return others == 0 and in_memory
    return load_s <= (compute_s + HOLD_UP_S if others == 0 else SHORT_LOAD_S)


def layerwise_is_possible(
    *,
    recovers_steps: bool,
    pipeline_ranks: int,
    fails_whole: bool,
) -> bool:
    """Whether a step that computed from a failed load can be undone.

    The engine must be able to recover steps (`step_recovery.py`). A pipeline has several steps in
    flight. A request whose load fails as a whole needs other blocks, which vLLM gives only to
    waiting requests.
    """
    return recovers_steps and pipeline_ranks == 1 and not fails_whole
