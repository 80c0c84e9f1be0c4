"""Whether a load runs layer by layer under the forward pass, or in the background while others compute.

A pure function and its reasons; it knows no vLLM. What is worth loading at all is `forebay.Slack`'s
business.
"""

from enum import Enum

# A load this short holds up the others less than the step in between costs the one that waits for it.
SHORT_LOAD_S = 0.002
# A step that waits for a load holds up whoever comes meanwhile, and takes no abort: no longer than this.
HOLD_UP_S = 0.5


class Way(Enum):
    """How a load runs."""

    LAYERWISE = "layerwise"  # in the request's own step, each layer just before it is needed
    BACKGROUND = "background"  # between steps; the request waits meanwhile


def way_of_loading(
    *,
    layerwise_possible: bool,
    handed: bool,
    others: int,
    load_s: float | None,
    computes_s: float,
    in_memory: bool,
) -> Way:
    """Decides it.

    `layerwise_possible`: a load that fails in its own step can be undone. `handed`: all of it comes from a
    prefiller, maybe of another host, and there is nothing to compute meanwhile. `others`: requests that
    compute, or that are loaded in this step already, and engines that wait for each step of this one.
    `load_s`: how long the load will take, as far as that is known. `computes_s`: how long the step computes
    behind it. `in_memory`: all of it is in the node's memory, which is near.
    """
    if handed or not layerwise_possible:
        return Way.BACKGROUND
    if load_s is None:
        is_short = others == 0 and in_memory
    elif others == 0:
        is_short = load_s <= computes_s + HOLD_UP_S
    else:
        is_short = load_s <= SHORT_LOAD_S
    return Way.LAYERWISE if is_short else Way.BACKGROUND


def layerwise_is_possible(
    *, starts_over: bool, speculates: bool, recompute: bool, pipeline_ranks: int, as_one: bool
) -> bool:
    """Whether a step that computed from a load that failed can be undone.

    What it has left in vLLM's cache must go, whoever has left meanwhile (`starts_over`). A request that is to
    be recomputed must also drop what steps that were scheduled ahead say of it: how many tokens that is, is
    known unless it speculates. In pipelines several steps are under way. A request whose loads fail as one
    needs other blocks than it has, which vLLM gives only to a request that waits.
    """
    says_too_much = speculates and recompute
    return starts_over and not says_too_much and pipeline_ranks == 1 and not as_one
