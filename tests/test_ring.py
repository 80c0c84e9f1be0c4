"""docs/reference/ring.md is enough: a producer that was written from it asks, and is answered right."""

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ring_producer
from ring_producer import CANCEL, COMMIT, NOP, READ, Full, Producer

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs/reference/ring.md").read_text()
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
DONE, PARTIAL, MALFORMED, STALE = range(4)
NOT_READ = 3


@contextmanager
def ring(posted: int = 4, armed: int = 2, contexts: int = 256) -> Iterator[tuple[Producer, list[str]]]:
    """A ring with its consumer, and at the end what that has taken."""
    path = TARGET / "debug/examples/serve_ring"
    assert path.exists(), f"{path} is missing: cargo build --workspace --example serve_ring"
    sizes = [str(posted), str(armed), str(contexts)]
    server = subprocess.Popen([path, *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert server.stdout and server.stdin
        yield Producer(server.stdout.readline().strip()), lines
    finally:
        said, _ = server.communicate(timeout=30)
        lines += said.splitlines()
    assert server.returncode == 0


def read(extent: int, layer: int) -> tuple[int, int, int]:
    """What the consumer says of a layer."""
    if extent % 10 == 7:
        return 0, 0, NOT_READ
    return (extent << 20) + (layer << 12), extent ^ layer, DONE


def test_a_layer_of_many_chunks_is_one_request_and_every_result_is_its_own_contexts() -> None:
    with ring() as (producer, lines):
        for layer in range(50):
            producer.post(READ, 9, [(chunk, layer, 0) for chunk in range(256)], user=layer)
            ended = producer.wait()
            assert ended.results == [read(chunk, layer) for chunk in range(256)]
            done = sum(status == DONE for _, _, status in ended.results)
            assert (ended.user, ended.status, ended.contexts_done) == (layer, PARTIAL, done)
            assert ended.bytes == done * 4096
    assert lines == ["Read 9 256"] * 50


def test_requests_come_back_in_any_order_and_a_slot_that_did_not_is_not_used() -> None:
    with ring(posted=2) as (producer, _):
        producer.post(READ, 1, [(1, 1, 0)], user=1, rank=3)
        producer.post(READ, 1, [(2, 2, 0)], user=2, rank=3)
        with pytest.raises(Full):
            producer.post(READ, 1, [(3, 3, 0)])
        assert {producer.wait().user, producer.wait().user} == {1, 2}
        producer.post(READ, 1, [(3, 3, 0)], user=3)
        assert producer.wait().user == 3


def test_what_is_armed_waits_until_somebody_publishes_it_in_any_order() -> None:
    with ring(armed=2) as (producer, lines):
        for _ in range(30):
            first, second = (producer.arm(COMMIT, n, [(0, 0, n)], user=n) for n in (1, 2))
            with pytest.raises(Full):
                producer.arm(COMMIT, 3, [(0, 0, 3)])
            for user, (at, word) in ((2, second), (1, first)):
                producer.set_word(at, word)
                ended = producer.wait()
                assert (ended.user, ended.status, ended.results) == (user, DONE, [(0, user, DONE)])
    assert lines == ["Commit 2 1", "Commit 1 1"] * 30


def test_what_is_no_request_is_named_and_the_next_one_is_served() -> None:
    with ring(contexts=4) as (producer, lines):
        producer.post(READ, 1, [(0, 0, 0)] * 5)
        assert producer.wait().status == MALFORMED
        producer.post(READ, 1, [(0, 0, 0)], rank=4)
        assert producer.wait().status == MALFORMED
        producer.epoch += 1
        producer.post(READ, 1, [(0, 0, 0)])
        assert producer.wait().status == STALE
        producer.epoch -= 1
        producer.post(CANCEL, 5, [(0, 0, 0)])
        assert producer.wait().results == [(0, 0, 2)]
        producer.post(NOP, 0, [])
        assert producer.wait().status == DONE
    assert lines[0] == "Ended(Some(Contexts { value: 5, limit: 4 }))"
    assert lines[1] == "Ended(Some(Class { value: 4 }))"


def test_a_sequence_word_that_is_not_the_next_one_closes_the_ring() -> None:
    with ring() as (producer, lines):
        producer.next = 6
        producer.post(READ, 1, [(0, 0, 0)])
        producer.set_word(ring_producer.HEADER + 56, 9)
        until = 200
        while not producer.word(ring_producer.CLOSED_AT) and until:
            until -= 1
            producer._futex(ring_producer.PRODUCER_ASLEEP_AT, ring_producer.FUTEX_WAIT, 0)
    assert lines == ["slot 0: the sequence word is 9; allowed are 0 and 1"]


def test_the_page_gives_the_offsets_that_the_producer_uses() -> None:
    offsets = {name: int(at) for at, name in re.findall(r"^ *(\d+)  (\w+(?: \w+)*?)  +u\d+", DOCUMENT, re.M)}
    names = ("consumer asleep", "closed", "producer asleep", "armed", "epoch")
    used = [ring_producer.CONSUMER_ASLEEP_AT, ring_producer.CLOSED_AT, ring_producer.PRODUCER_ASLEEP_AT]
    assert [offsets[name] for name in names[:4]] == [*used, ring_producer.ARMED_AT]
    assert f"{ring_producer.MAGIC:#018x}"[2:].startswith("46425249")
