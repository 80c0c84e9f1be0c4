"""What `driver.py` counts: in the connector, in vLLM, and on vLLM's page of metrics."""

from collections.abc import Callable
from functools import wraps
from typing import Any


class Counts:
    """Part of `Driver`."""

    half: Any
    scheduler: Any
    slowest_s: float
    workers: Callable[..., list[Any]]

    def left_alone(self) -> Any:
        """How many requests the connector has left alone."""
        return self.half.counts.totals.get("requests_left_alone", 0)

    def whole_graphs(self) -> Any:
        """How many steps that loaded layer by layer were one CUDA graph, since it was last asked here."""
        from forebay.vllm.connector import compat

        if not hasattr(self, "graphs"):
            self.graphs, look = 0, compat.runs_whole_graph

            def counted(forward_context: Any) -> bool:
                whole = look(forward_context)
                self.graphs += whole
                return whole

            compat.runs_whole_graph = counted
        graphs, self.graphs = self.graphs, 0
        return graphs

    def slowest(self) -> Any:
        """Seconds of the longest step since it was last asked here."""
        found, self.slowest_s = self.slowest_s, 0.0
        return found

    def asks(self) -> Any:
        """How often the connector has told the scheduler of tokens to load, since it was last asked here."""
        if not hasattr(self, "asked"):
            self.asked, match = 0, self.half.match

            def counted(*arguments: Any) -> Any:
                said = match(*arguments)
                self.asked += said[0] is not None  # None: the node has not answered yet.
                return said

            self.half.match = counted
        asked, self.asked = self.asked, 0
        return asked

    def stats(self) -> Any:
        """The counters of both halves, those of all workers together."""
        mine = {f"totals_{name}": count for name, count in self.half.counts.totals.items()}
        theirs = self.workers(lambda half: half.cache.stats())
        return {name: sum(of_one[name] for of_one in theirs) for name in theirs[0]} | mine

    def serialize_stats(self) -> Any:
        """As between processes: vLLM's MultiConnector counts on it that a front end gets what was sent."""
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        make = self.scheduler.make_stats

        def sent(*arguments: Any, **named: Any) -> Any:
            stats = make(*arguments, **named)
            return stats and MsgpackDecoder(type(stats)).decode(MsgpackEncoder().encode(stats))

        self.scheduler.make_stats = sent
        return True

    def metrics(self) -> Any:
        """What vLLM's page of metrics says of Forebay."""
        from prometheus_client import REGISTRY

        families = [one for one in REGISTRY.collect() if one.name.startswith("vllm:forebay_")]
        return {one.name: sum(x.value for x in one.samples if x.name.endswith("_total")) for one in families}

    def counted(self) -> Any:
        """What vLLM has counted since this was asked first: of prompts, what its page of metrics says; of
        caches, what its scheduler gives away. Of that an engine in this process drops what it has of steps
        without an answer, which a server does not.
        """
        if not hasattr(self, "given"):
            self.given: dict[str, float] = {}
            make = self.scheduler.make_stats

            def kept(*arguments: Any, **named: Any) -> Any:
                stats = make(*arguments, **named)
                for cache in ("prefix_cache", "connector_prefix_cache"):
                    of_cache = getattr(stats, f"{cache}_stats")
                    for what in ("queries", "hits"):
                        name = f"{cache}_{what}"
                        self.given[name] = self.given.get(name, 0) + getattr(of_cache, what)
                return stats

            self.scheduler.make_stats = kept
        return self.given | self.prompts()

    def prompts(self) -> dict[str, float]:
        """What vLLM's page of metrics says of prompts."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            name = family.name.removeprefix("vllm:")
            if name in ("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source"):
                for sample in family.samples:
                    if sample.name.endswith("_total"):
                        key = sample.labels.get("source", name)
                        found[key] = found.get(key, 0.0) + sample.value
        return found

    def sources(self) -> Any:
        """What the page of metrics says of where hits came from. Before 0.32 it does not say it."""
        from prometheus_client import REGISTRY

        families = [one for one in REGISTRY.collect() if one.name == "vllm:prompt_tokens_cached_by_source"]
        samples = [x for one in families for x in one.samples if x.name.endswith("_total") and x.value]
        return {x.labels["source"]: x.value for x in samples}

    def preemptions(self) -> Any:
        """How often requests lost their blocks. Counted from the first call on."""
        if not hasattr(self, "preempted"):
            self.preempted, preempt = 0, self.scheduler._preempt_request

            @wraps(preempt)  # The connector looks which arguments it takes.
            def counted(*arguments: Any, **more: Any) -> Any:
                self.preempted += 1
                return preempt(*arguments, **more)

            self.scheduler._preempt_request = counted
        return self.preempted

    def layered(self) -> Any:
        """How many loads ran layer by layer under a step, of which workers say so. Counted from the first
        call on.
        """
        if not hasattr(self, "loads_layered"):
            self.loads_layered = 0

            def look(half: Any) -> None:
                start = half.start_loads

                def counted(*arguments: Any) -> None:
                    before = set(half.layerwise)
                    start(*arguments)
                    self.loads_layered += len(half.layerwise - before)

                half.start_loads = counted

            self.workers(look)
        return self.loads_layered

    def drafts(self) -> Any:
        """Drafts that were made, and those that were accepted. Counted from the first call on."""
        if not hasattr(self, "drafted"):
            self.drafted, make = [0, 0], self.scheduler.make_spec_decoding_stats

            def counted(*arguments: Any, **more: Any) -> Any:
                self.drafted[0] += more["num_draft_tokens"]
                self.drafted[1] += more["num_accepted_tokens"]
                return make(*arguments, **more)

            self.scheduler.make_spec_decoding_stats = counted
        return self.drafted
