"""`forebay.Node` from Python, with a real node."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from agent_peer import Pool
from processes import Daemon, freeze, until

import forebay
from forebay.pages import Pages

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 20.0
LAYERS, LAYER_BYTES, BLOCK_BYTES = 4, 24_000, 8_000
NAMESPACE = bytes(range(32))


def layers_at(base: int) -> list[list[tuple[int, int, int]]]:
    """The pieces of each layer: blocks that lie in another order than they count."""
    order = (2, 0, 1)
    return [
        [(base + layer * LAYER_BYTES + at * BLOCK_BYTES, BLOCK_BYTES, 0) for at in order]
        for layer in range(LAYERS)
    ]


def copy_threads() -> int:
    """How many threads of this process copy."""
    names = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    return sum(name.startswith("forebay-copy-") for name in names)


def test_a_client_that_registers_no_memory_starts_no_thread_that_copies(daemon: Daemon) -> None:
    before = copy_threads()
    node = forebay.Node(daemon.socket, copy_threads=3)
    assert node.lookup(forebay.chunk_ids(NAMESPACE, list(range(600)), 256)) == 0
    assert copy_threads() == before, "an engine's scheduler only asks"
    node.register_memory(bytearray(64))
    node.register_memory(bytearray(64))
    # A thread names itself once it runs.
    until(lambda: copy_threads() == before + 3)
    node.close()


def test_what_one_client_stored_another_one_loads(daemon: Daemon) -> None:
    chunk_bytes = LAYERS * LAYER_BYTES
    one, other = forebay.Node(daemon.socket, name="one"), forebay.Node(str(daemon.socket), name="other")
    tokens = list(range(600))
    ids = forebay.chunk_ids(NAMESPACE, tokens, 256)
    assert len(ids) == 2 and one.lookup(ids) == 0 and len(one.lease(ids)) == 0
    data = random.Random(8).randbytes(chunk_bytes)
    source = one.register_memory(bytearray(data))
    for parent, id in ((None, ids[0]), (ids[0], ids[1])):
        storing = one.store(id, parent, layers_at(source.address))
        assert storing.wait() and storing.has_ended and storing.why is None
    assert one.store(ids[0], None, layers_at(source.address)).wait(), "what is there already is there"
    one.close()

    assert other.lookup(ids) == 2
    target = np.zeros(chunk_bytes, dtype=np.uint8)
    memory = other.register_memory(target)
    lease = other.lease(ids)
    assert (len(lease), lease.in_memory, lease.on_disk, lease.on_peers, lease.is_alive) == (2, 2, 0, 0, True)
    loading = other.load(lease, 1, layers_at(memory.address))
    assert loading.wait() and loading.why is None
    assert target.tobytes() == data
    lease.release()
    assert not lease.is_alive
    with pytest.raises(forebay.NotFoundError, match="released"):
        other.load(lease, 0, layers_at(memory.address))
    other.deregister_memory(memory)
    with pytest.raises(forebay.NotFoundError, match="registered"):
        other.load(other.lease(ids), 0, layers_at(memory.address))
    stats = other.stats()
    assert stats is not None and stats["chunks"] == 2
    other.close()
    with pytest.raises(forebay.PeerLostError, match="closed"):
        other.lookup(ids)


def two_of_three(node: forebay.Node) -> list[bytes]:
    """The ids of three chunks, of which the node has the first two."""
    memory = node.register_memory(bytearray(LAYERS * LAYER_BYTES))
    ids = forebay.chunk_ids(NAMESPACE, list(range(768)), 256)
    for parent, id in ((None, ids[0]), (ids[0], ids[1])):
        assert node.store(id, parent, layers_at(memory.address)).wait()
    return ids


def test_what_a_node_has_is_said_without_waiting_for_it(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    ids = two_of_three(node)
    assert node.find([ids]).wait(TIMEOUT_S) == (2, 0, 0)
    assert node.find([ids, ids[:1]]).wait(TIMEOUT_S) == (1, 0, 0), "each chunk needs both parts"
    assert node.find([ids, []]).wait(TIMEOUT_S) == (0, 0, 0)

    def leases() -> int:
        stats = node.stats()
        return -1 if stats is None else stats["leases"]

    hold = node.hold(ids)
    until(lambda: leases() == 1)
    hold.release()
    until(lambda: leases() == 0)
    node.hold(ids).release()
    until(lambda: leases() == 0)

    assert daemon.process is not None
    freeze(daemon.process)
    finding, hold = node.find([ids]), node.hold(ids)
    assert finding.wait() is None and finding.wait(0.01) is None
    assert node.is_connected, "they have waited until it was taken for dead"
    assert finding.wait(TIMEOUT_S) == (0, 0, 0), "it is taken for dead"
    hold.release()
    daemon.process.send_signal(signal.SIGCONT)
    until(lambda: node.find([ids]).wait(TIMEOUT_S) == (2, 0, 0))


def test_others_go_on_while_one_thread_lets_go_of_what_a_frozen_node_kept(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    memory = node.register_memory(bytearray(LAYERS * LAYER_BYTES))
    ids = forebay.chunk_ids(NAMESPACE, list(range(768)), 256)
    assert node.store(ids[0], None, layers_at(memory.address)).wait()
    kept: list[object] = [node.lease(ids)]
    assert daemon.process is not None
    freeze(daemon.process)

    def fill() -> None:
        while node.is_connected:
            node.used(ids * 1000, 1)

    filling = threading.Thread(target=fill)
    filling.start()
    # The socket is full, and whoever sends waits until the node is given up, after two seconds.
    time.sleep(0.3)
    begun, ended = threading.Event(), threading.Event()

    def let_go() -> None:
        begun.set()
        kept.clear()
        ended.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    assert begun.wait(TIMEOUT_S)
    time.sleep(0.1)
    assert not ended.is_set(), "this thread stood still until then"
    filling.join()
    letting_go.join()
    daemon.process.send_signal(signal.SIGCONT)


def test_loads_that_are_under_way_when_a_client_closes_all_end(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket, copy_threads=1)
    layer_bytes = 200_000
    memory = node.register_memory(bytearray(2 * LAYERS * layer_bytes))

    def layers(base: int) -> list[list[tuple[int, int, int]]]:
        return [[(base + layer * layer_bytes, layer_bytes, 0)] for layer in range(LAYERS)]

    ids = forebay.chunk_ids(NAMESPACE, list(range(256)), 256)
    assert node.store(ids[0], None, layers(memory.address)).wait()
    lease = node.lease(ids)
    into = layers(memory.address + LAYERS * layer_bytes)
    loadings = [node.load(lease, 0, into) for _ in range(200)]
    node.close()
    assert all(loading.has_ended for loading in loadings)
    assert not all(loading.wait() for loading in loadings), "some had not begun"


def test_chunks_that_are_watched_are_said_to_have_gone_without_waiting_for_it(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    ids = two_of_three(node)
    said: list[tuple[int | None, list[bytes] | None]] = []

    def heard(count: int) -> bool:
        said.extend(node.take_watched())
        return len(said) >= count

    asked = node.watch(ids)
    until(lambda: heard(1))
    assert said == [(asked, ids[2:])], "one is not there"
    assert daemon.process is not None
    daemon.process.kill()
    until(lambda: heard(2))
    assert said[1:] == [(None, None)], "with the node all of them have gone"
    asked = node.watch(ids[:1])
    until(lambda: heard(3))
    assert said[2:] == [(asked, ids[:1])]


def test_what_is_held_for_others_to_load_is_no_hit(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    memory = node.register_memory(bytearray(LAYERS * LAYER_BYTES))
    (id,) = forebay.chunk_ids(NAMESPACE, list(range(256)), 256)
    assert node.store(id, None, layers_at(memory.address)).wait()

    def counted(name: str) -> int:
        stats = node.stats()
        return -1 if stats is None else stats[name]

    hold = node.hold([id])
    until(lambda: counted("leases") == 1)
    assert counted("hits_in_memory") == 0
    node.lease([id]).release()
    assert counted("hits_in_memory") == 1
    hold.release()


def test_a_chunk_that_does_not_fit_its_target_is_refused(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    memory = node.register_memory(bytearray(LAYERS * LAYER_BYTES))
    ids = forebay.chunk_ids(NAMESPACE, list(range(256)), 256)
    assert node.store(ids[0], None, layers_at(memory.address)).wait()
    lease = node.lease(ids)
    with pytest.raises(forebay.TransferError):
        node.load(lease, 0, [*layers_at(memory.address), [(memory.address, 8, 0)]])
    with pytest.raises(forebay.TransferError):
        node.load(lease, 7, layers_at(memory.address))
    with pytest.raises(forebay.InvalidError, match="overlaps"):
        node.register_memory((memory.address + 8, 8))


def test_a_client_for_a_tenant_has_its_chunks_and_no_others_and_lives_as_long_as_it_is_used(
    daemon: Daemon,
) -> None:
    own = forebay.Node(daemon.socket)
    tenant = own.for_tenant(3)
    memory = tenant.register_memory(bytearray(LAYERS * LAYER_BYTES))
    ids = forebay.chunk_ids(NAMESPACE, list(range(256)), 256)
    assert tenant.store(ids[0], None, layers_at(memory.address)).wait()
    assert (tenant.lookup(ids), own.lookup(ids), len(own.lease(ids))) == (1, 0, 0)
    assert tenant.find([ids]).wait(TIMEOUT_S) == (1, 0, 0) and own.find([ids]).wait(TIMEOUT_S) == (0, 0, 0)
    assert own.forget(ids)[0][:2] == ("rejected", "not_stored")
    del own
    assert tenant.is_connected and tenant.load(tenant.lease(ids), 0, layers_at(memory.address)).wait()
    assert tenant.forget(ids)[0][:2] == ("accepted", "none")
    with pytest.raises(forebay.InvalidError, match="tenant is 65535; allowed: 0 to 65534"):
        tenant.for_tenant(65535)
    tenant.close()
    with pytest.raises(forebay.PeerLostError, match="closed"):
        tenant.lookup(ids)


def test_why_a_chunk_was_not_stored_is_said_in_words(daemon: Daemon) -> None:
    node = forebay.Node(daemon.socket)
    memory = node.register_memory(bytearray(2 << 20))
    storing = node.store(NAMESPACE, None, [[(memory.address, memory.bytes, 0)]])
    assert not storing.wait() and storing.why is not None
    assert "a slab has" in storing.why and "{" not in storing.why, storing.why


def test_what_is_not_allowed_is_said_with_what_is(daemon: Daemon) -> None:
    with pytest.raises(forebay.InvalidError, match="tenant is 70000; allowed: 0 to 65534"):
        forebay.Node(daemon.socket, tenant=70_000)
    for token in (-1, 1 << 32):
        with pytest.raises(forebay.InvalidError, match=f"a token is {token}; allowed: 0 to 4294967295"):
            forebay.chunk_ids(NAMESPACE, [1, token], 1)
    node = forebay.Node(daemon.socket)
    memory = node.register_memory(bytearray(8))
    for call in (
        lambda: node.lookup([b"short"]),
        lambda: node.lease([b"short"]),
        lambda: node.used([b"short"], 1),
        lambda: node.store(b"short", None, [[(memory.address, 8, 0)]]),
        lambda: node.store(NAMESPACE, b"short", [[(memory.address, 8, 0)]]),
        lambda: forebay.chunk_ids(NAMESPACE, [1], 1, parent=b"short"),
    ):
        with pytest.raises(forebay.InvalidError, match="a chunk's id has 5 bytes; allowed: 32"):
            call()
    with pytest.raises(forebay.InvalidError, match="the key of a namespace has 5 bytes; allowed: 32"):
        forebay.chunk_ids(b"short", [1], 1)
    with pytest.raises(forebay.InvalidError, match="read-only; allowed: one that can be written"):
        node.register_memory(b"read-only")


def test_a_dead_node_is_a_miss_and_its_successor_is_found(daemon: Daemon) -> None:
    node, pool = forebay.Node(daemon.socket), Pool(1 << 17, 3)
    memory = node.register_memory((pool.address, pool.length))
    ids = forebay.chunk_ids(NAMESPACE, list(range(256)), 256)
    assert node.store(ids[0], None, layers_at(memory.address)).wait()
    lease = node.lease(ids)
    daemon.kill()
    until(lambda: not node.is_connected)
    assert not lease.is_alive and node.lookup(ids) == 0 and len(node.lease(ids)) == 0 and node.stats() is None
    with pytest.raises(forebay.TransferError):
        node.load(lease, 0, layers_at(memory.address))
    daemon.start()
    until(lambda: node.is_connected)
    assert node.lookup(ids) == 0
    assert node.store(ids[0], None, layers_at(memory.address)).wait()
    assert node.lookup(ids) == 1 and not lease.is_alive


class Moving:
    """A page on its way until somebody waits for it, or interrupts that."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted, self.under_way = interrupted, True

    def wait(self) -> bool:
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        self.under_way = False
        return True


class SlowNode:
    """A node that takes its time, and memory at addresses above 0."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self.moving: list[Moving] = []

    def store(self, key: bytes, parent: None, layers: list[list[tuple[int, int, int]]]) -> Moving:
        if layers[0][0][0] <= 0:
            raise OverflowError("no address")
        self.moving.append(Moving(self.interrupted and not self.moving))
        return self.moving[-1]


@pytest.mark.parametrize(
    ("interrupted", "last", "error"), [(False, -1, OverflowError), (True, 1, KeyboardInterrupt)]
)
def test_whatever_goes_wrong_with_a_page_no_other_is_left_on_its_way(
    interrupted: bool, last: int, error: type[BaseException]
) -> None:
    node = SlowNode(interrupted)
    pages = Pages(node, NAMESPACE)  # type: ignore[arg-type]
    with pytest.raises(error):
        pages.store([b"a", b"b", b"c"], [[(1, 8)], [(9, 8)], [(last, 8)]])
    assert node.moving and not any(one.under_way for one in node.moving)


def test_where_there_is_no_node_the_socket_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(forebay.PeerLostError, match=r"nobody\.sock"):
        forebay.Node(tmp_path / "nobody.sock")


def test_a_log_filter_that_means_nothing_is_refused_with_what_is_allowed() -> None:
    for value, good in (("warn,forebay_node=debug", True), ("loud", False)):
        ran = subprocess.run(
            [sys.executable, "-c", "import forebay"],
            env=os.environ | {"FOREBAY_LOG": value},
            capture_output=True,
            text=True,
        )
        assert (ran.returncode == 0) is good, ran.stderr
        if not good:
            assert "FOREBAY_LOG is" in ran.stderr and "it takes a level (off, error" in ran.stderr
