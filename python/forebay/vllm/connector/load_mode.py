"""Decides how a load runs: layer by layer under the forward pass, or in the background.

These are pure functions that know no vLLM. Whether to load at all is decided in
`load_or_compute.py`.
"""

from enum import Enum

# A load this short delays other requests less than an extra step would delay this one.
SHORT_LOAD_S = 0.002
# A step that waits for a load delays new requests and cannot be aborted, so it waits no longer.
HOLD_UP_S = 0.5


class LoadMode(Enum):
    """How a load runs."""

    LAYERWISE = "layerwise"  # in the request's own step, each layer just before it is needed
    BACKGROUND = "background"  # between steps, while the request waits


def choose_load_mode(
    *,
    layerwise_possible: bool,
    handed_over: bool,
    others: int,
    load_s: float | None,
    compute_s: float,
    in_memory: bool,
) -> LoadMode:
    """Chooses the mode of one load.

    `layerwise_possible`: a load that fails in its own step can be undone. `handed_over`: all of it
    comes from a prefiller, so nothing can be computed meanwhile. `others`: requests that compute or
    load in this step, and engines that wait for it. `load_s`: how long the load takes, if known.
    `compute_s`: how long the step computes after it. `in_memory`: the node has all in memory.
    """
    if handed_over or not layerwise_possible:
        return LoadMode.BACKGROUND
    if load_s is None:
        is_short = others == 0 and in_memory
    elif others == 0:
        is_short = load_s <= compute_s + HOLD_UP_S
    else:
        is_short = load_s <= SHORT_LOAD_S
    return LoadMode.LAYERWISE if is_short else LoadMode.BACKGROUND


def layerwise_is_possible(
    *,
    recovers_steps: bool,
    speculates: bool,
    recompute: bool,
    pipeline_ranks: int,
    fails_whole: bool,
) -> bool:
    """Whether a step that computed from a failed load can be undone.

    The engine must be able to recover steps (`step_recovery.py`). To recompute a request, it must
    know how many tokens the steps scheduled ahead will return, which speculation hides. A pipeline
    has several steps in flight. A request whose load fails as a whole needs other blocks, which
    vLLM gives only to waiting requests.
    """
    return recovers_steps and not (speculates and recompute) and pipeline_ranks == 1 and not fails_whole
