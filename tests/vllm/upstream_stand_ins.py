"""A plug-in of pytest for vLLM's own tests: our classes take the places of theirs.

Knows which of vLLM's classes and defaults the tests reach for. The tests themselves are not changed; where
they demand that something happens at once, the stand-in waits.
"""

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from forebay.vllm.connector.finder import Finder
from forebay.vllm.connector.matcher import Matcher
from forebay.vllm.connector.tracked import Found
from forebay.vllm.tiering import ForebayTierManager

TIMEOUT_S = 60.0
NUMBERS = itertools.count()


def digest(text: str) -> str:
    """Weights of an engine's own, so that tests do not find blocks of one another."""
    return hashlib.sha256(text.encode()).hexdigest()


class Blocks(dict):
    """What is in the tier, as the example has it: a test that says so puts a block there."""

    def __init__(self, tier):
        super().__init__()
        self.tier = tier

    def __setitem__(self, key, value):
        row = (self.tier._base, self.tier._row_bytes)
        assert self.tier._pages.store([key], [[row]]) == [True]
        super().__setitem__(key, value)


class AtOnce(ForebayTierManager):
    """In place of the tier that vLLM has as an example, which does everything at once."""

    made: ClassVar[list["AtOnce"]] = []

    def __init__(self, offloading_spec, primary_kv_view, tier_type, custom_param=0):
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            node=os.environ["FOREBAY_TEST_NODE"],
            weights_digest=digest(f"{os.getpid()} {next(NUMBERS)}"),
            keep_on_reset=True,  # As the example does. The tests wait with what vLLM calls for a reset alone.
        )
        self.made.append(self)
        # From 0.32 on they are called chunks.
        self.blocks = self.chunks = Blocks(self)
        self.completed_jobs = []

    def lookup(self, key, req_context):
        end = time.monotonic() + TIMEOUT_S
        while (found := super().lookup(key, req_context)) is LookupResult.RETRY:
            assert time.monotonic() < end
            super().on_schedule_end(None)
            time.sleep(0.001)
        # What was found stays found only while a request asks: tests look again after they stored.
        super().on_request_finished(req_context)
        return found

    def submit_store(self, job_metadata):
        super().submit_store(job_metadata)
        self.complete()
        self.blocks.update(dict.fromkeys(job_metadata.keys, True))

    def submit_load(self, job_metadata):
        super().submit_load(job_metadata)
        self.complete()

    def complete(self):
        super().drain_jobs()
        self.completed_jobs += super().get_finished_jobs()

    def get_finished_jobs(self):
        completed, self.completed_jobs = self.completed_jobs, []
        return completed

    def get_num_blocks(self):
        return len(self.blocks)

    get_num_chunks = get_num_blocks


class Files:
    """Where a test looks whether a block is in the tier: there is such a file if the node has the block."""

    def __init__(self, tier, root):
        self.tier, self.root = tier, Path(root)

    def get_file_name(self, key):
        path = self.root / key.hex()
        if self.tier._pages.which([key]) == [True]:
            path.touch()
        else:
            path.unlink(missing_ok=True)
        return str(path)


class InPlaceOfFiles(ForebayTierManager):
    """In place of the tier that keeps files, which works in the background as ours does."""

    def __init__(self, offloading_spec, primary_kv_view, tier_type, root_dir, **_):
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            node=os.environ["FOREBAY_TEST_NODE"],
            weights_digest=digest(root_dir),
            keep_on_reset=True,  # As files are. The tests wait with what vLLM calls for a reset alone.
        )
        self.file_mapper = Files(self, root_dir)

    def on_schedule_end(self, context):
        super().on_schedule_end(context)
        lookups, end = self._lookup_manager, time.monotonic() + TIMEOUT_S
        # The tests give an answer one second.
        while any(state.result is None for state in lookups._lookup_state.values()):
            assert time.monotonic() < end
            time.sleep(0.001)
            lookups.drain_results()


def put_connector() -> None:
    """Ours is the connector of engines for which a test names none.

    What was prefilled elsewhere, as a request says, is said to be there, and nothing else is.
    """
    from tests.v1.kv_connector.unit import utils

    made = utils.create_vllm_config
    everywhere = {"model": os.environ["FOREBAY_TEST_MODEL"], "dtype": "float32", "max_model_len": 8192}
    ours = {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.vllm.connector",
        "kv_connector_extra_config": {"node": os.environ["FOREBAY_TEST_NODE"], "chunk_tokens": 16},
    }

    def create_vllm_config(**given):
        # An engine that only loads frees blocks at once; the tests of prefillers are of engines
        # that store.
        if sys._getframe(1).f_globals["__name__"].endswith("test_remote_decode_lifecycle"):
            given["kv_role"] = "kv_producer"
        return made(**everywhere | ({} if "kv_connector" in given else ours) | given)

    utils.create_vllm_config = create_vllm_config
    Finder.answer = lambda self, asked: Found(
        asked.shape, asked.ids, asked.tokens, in_memory=len(asked.ids[0])
    )
    Finder.hold = lambda self, ids, tenant: []
    Matcher.ask_each_shape = lambda self, tracked: [
        self.finder.ask(tracked.ids.shape, [[] for _ in tracked.ids.ranks], 0)
    ]


def pytest_configure() -> None:
    """Puts ours in, before any test is imported."""
    put_connector()
    example.ExampleSecondaryTierManager = AtOnce
    fs.FileSystemTierManager = InPlaceOfFiles


def pytest_runtest_teardown():
    """Tests do not end the example, which holds nothing. Ours are clients, of which a node takes 64."""
    while AtOnce.made:
        AtOnce.made.pop().shutdown()
