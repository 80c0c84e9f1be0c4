"""`forebay.nixl`: NIXL's Python API on Forebay's agent."""

import contextlib
import itertools
import json
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_peer import Peer, Pool
from processes import kill, line_of, until

from forebay.nixl import _bindings, _exchange
from forebay.nixl._api import nixl_agent, nixl_agent_config, nixl_xfer_handle

MIB = 1 << 20
TIMEOUT_S = 20.0
NAMES = (f"agent-{number}" for number in itertools.count())


class End:
    """An agent with registered memory."""

    def __init__(self, length: int, fill: int, **config: object) -> None:
        self.pool = Pool(length, fill)
        self.agent = nixl_agent(next(NAMES), nixl_agent_config(**config))
        self.registered = self.agent.register_memory([(self.pool.address, length, 0, "pool")], "DRAM")

    @property
    def whole(self) -> _bindings.nixlXferDList:
        return self.agent.get_xfer_descs([(self.pool.address, self.pool.length, 0)], "DRAM")


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    here, there = End(MIB, 1), End(MIB, 2)
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    there.agent.add_remote_agent(here.agent.get_agent_metadata())
    yield here, there


def finish(agent: nixl_agent, handle: nixl_xfer_handle) -> None:
    until(lambda: agent.check_xfer_state(handle) == "DONE")


def test_initialized_and_prepared_transfers_move_the_same_bytes(ends: tuple[End, End]) -> None:
    here, there = ends
    name = there.agent.name
    handle = here.agent.initialize_xfer("WRITE", here.whole, there.whole, name, b"all")
    assert here.agent.transfer(handle) in ("PROC", "DONE")
    finish(here.agent, handle)
    assert there.pool.read(0, MIB) == b"\x01" * MIB
    until(lambda: there.agent.check_remote_xfer_done(here.agent.name, b"all"))

    blocks = 256
    data = random.Random(4).randbytes(MIB)
    there.pool.write(0, data)
    table = np.zeros((blocks, 3), dtype=np.uint64)
    table[:, 0] = np.arange(blocks, dtype=np.uint64) * np.uint64(4096)
    table[:, 1] = 4096
    move = np.zeros_like(table)
    move[:, 0] = 1
    local = here.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table + move * np.uint64(here.pool.address), "DRAM")
    remote = here.agent.prep_xfer_dlist(name, table + move * np.uint64(there.pool.address), "DRAM")
    order = np.random.default_rng(5).permutation(blocks).astype(np.int32)
    handle = here.agent.make_prepped_xfer("READ", local, order, remote, np.arange(blocks))
    here.agent.transfer(handle)
    finish(here.agent, handle)
    assert b"".join(here.pool.read(4096 * place, 4096) for place in order.tolist()) == data


def test_a_strided_array_is_a_list_of_its_blocks(ends: tuple[End, End]) -> None:
    here, there = ends
    data = random.Random(6).randbytes(MIB)
    there.pool.write(0, data)
    local = here.agent.prep_xfer_dlist("", np.array([[here.pool.address, 512, 0, 512, 100]]), "DRAM")
    spread = np.array([[there.pool.address, 512, 0, 4096, 100]], dtype=np.uint64)
    remote = here.agent.prep_xfer_dlist(there.agent.name, spread, "DRAM")
    handle = here.agent.make_prepped_xfer("READ", local, list(range(100)), remote, list(range(100)))
    here.agent.transfer(handle)
    finish(here.agent, handle)
    assert here.pool.read(0, 51200) == b"".join(data[4096 * nth :][:512] for nth in range(100))
    with pytest.raises(ValueError, match="memory type"):
        here.agent.prep_xfer_dlist("", spread)


def test_a_transfer_is_posted_again_with_another_message(ends: tuple[End, End]) -> None:
    here, there = ends
    handle = here.agent.initialize_xfer("WRITE", here.whole, there.whole, there.agent.name, b"first")
    for message in (b"", b"second", b""):
        here.agent.transfer(handle, message)
        finish(here.agent, handle)
    until(lambda: len(there.agent.update_notifs().get(here.agent.name, [])) == 3)
    assert there.agent.notifs[here.agent.name] == [b"first", b"second", b"first"]
    assert not there.agent.check_remote_xfer_done(here.agent.name, b"eco")
    assert there.agent.check_remote_xfer_done(here.agent.name, b"eco", tag_is_prefix=False)


def test_an_agent_is_its_own_peer_too(ends: tuple[End, End]) -> None:
    here, _ = ends
    agent, base = here.agent, here.pool.address
    here.pool.write(0, b"\x07" * 4096)
    source = agent.get_xfer_descs([(base, 4096, 0)], "DRAM")
    target = agent.get_xfer_descs([(base + 8192, 4096, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", source, target, agent.name, b"to myself")
    agent.transfer(handle)
    finish(agent, handle)
    assert here.pool.read(8192, 4096) == b"\x07" * 4096
    until(lambda: agent.check_remote_xfer_done(agent.name, b"to myself"))
    agent.send_notif(agent.name, b"note")
    until(lambda: agent.get_new_notifs() == {agent.name: [b"note"]})


def test_every_failure_is_an_exception_of_its_own(ends: tuple[End, End]) -> None:
    here, there = ends
    agent, base = here.agent, here.pool.address
    with pytest.raises(_bindings.nixlNotFoundError, match="NIXL_ERR_NOT_FOUND: .*nobody"):
        agent.prep_xfer_dlist("nobody", here.whole)
    with pytest.raises(_bindings.nixlNotFoundError, match="registered"):
        agent.prep_xfer_dlist("", [(base, MIB + 1, 0)], "DRAM")
    with pytest.raises(_bindings.nixlNotFoundError):
        agent.send_notif("nobody", b"")
    with pytest.raises(_bindings.nixlNotFoundError):
        agent.make_connection("nobody")
    with pytest.raises(_bindings.nixlNotFoundError):
        agent.create_backend("UVX")
    with pytest.raises(_bindings.nixlInvalidParamError, match="already"):
        agent.create_backend("UCX")
    with pytest.raises(_bindings.nixlMismatchError):
        agent.add_remote_agent(b"\x80pickle?")
    with pytest.raises(_bindings.nixlNotSupportedError, match="FILE_SEG: .* DRAM_SEG and VRAM_SEG only"):
        agent.register_memory([(base, 64, 0, "")], "FILE")
    with pytest.raises(_bindings.nixlNotSupportedError, match="GPU"):
        agent.prep_mem_view(here.whole)
    with pytest.raises(_bindings.nixlNotFoundError):
        agent.deregister_memory(agent.get_reg_descs([(base + 64, 64, 0, "")], "DRAM"))
    short = there.agent.get_xfer_descs([(there.pool.address, 5, 0)], "DRAM")
    with pytest.raises(_bindings.nixlInvalidParamError):
        agent.initialize_xfer("WRITE", here.whole, short, there.agent.name)
    local = agent.prep_xfer_dlist("", here.whole)
    remote = agent.prep_xfer_dlist(there.agent.name, there.whole)
    for mine, theirs in (([3], [0]), ([0, 0], [0])):
        with pytest.raises(_bindings.nixlInvalidParamError):
            agent.make_prepped_xfer("READ", local, mine, remote, theirs)
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [0])
    with pytest.raises(_bindings.nixlNotPostedError):
        agent.check_xfer_state(handle)
    with pytest.raises(_bindings.nixlNoTelemetryError):
        agent.get_xfer_telemetry(handle)


def test_a_killed_peer_is_a_remote_disconnect() -> None:
    length = 64 * MIB
    here = End(length, 0)
    with Peer(length, fill=1) as peer:
        name = here.agent.add_remote_agent(peer.metadata)
        assert name == b"peer"
        there = here.agent.get_xfer_descs([(peer.address, length, 0)], "DRAM")
        handle = here.agent.initialize_xfer("READ", here.whole, there, name)
        here.agent.transfer(handle)
        peer.process.kill()
        peer.process.wait()
        with pytest.raises(_bindings.nixlRemoteDisconnectError, match="peer"):
            finish(here.agent, handle)
            here.agent.transfer(handle)
            finish(here.agent, handle)


def test_releasing_a_transfer_that_is_under_way_stops_it() -> None:
    length = 64 * MIB
    here = End(length, 0)
    with Peer(length, fill=1) as peer:
        here.agent.add_remote_agent(peer.metadata)
        there = here.agent.get_xfer_descs([(peer.address, length, 0)], "DRAM")
        handle = here.agent.initialize_xfer("READ", here.whole, there, "peer")
        here.agent.transfer(handle)
        here.agent.release_xfer_handle(handle)
        before = here.pool.read(0, length)
        time.sleep(0.1)
        assert here.pool.read(0, length) == before


def test_telemetry_is_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_TELEMETRY_ENABLE", raising=False)
    here, there = End(MIB, 0, capture_telemetry=True), End(MIB, 1)
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    handle = here.agent.initialize_xfer("READ", here.whole, there.whole, there.agent.name)
    began = time.time()
    here.agent.transfer(handle)
    finish(here.agent, handle)
    took_us = (time.time() - began) * 1e6
    telemetry = here.agent.get_xfer_telemetry(handle)
    assert (telemetry.totalBytes, telemetry.descCount) == (MIB, 1)
    assert abs(telemetry.startTime / 1e6 - began) < 5
    assert 0 < telemetry.postDuration <= telemetry.xferDuration <= took_us + 1000
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "no")
    quiet = nixl_agent(next(NAMES), nixl_agent_config(capture_telemetry=True))
    assert not quiet.agent._telemetry


def test_the_same_memory_may_be_registered_twice(ends: tuple[End, End]) -> None:
    here, there = ends
    again = here.agent.register_memory([(here.pool.address, MIB, 0, "again")], "DRAM")
    here.agent.deregister_memory(again)
    handle = here.agent.initialize_xfer("READ", here.whole, there.whole, there.agent.name)
    here.agent.transfer(handle)
    finish(here.agent, handle)
    here.agent.deregister_memory(here.registered)
    with pytest.raises(_bindings.nixlNotFoundError):
        here.agent.prep_xfer_dlist("", here.whole)


def test_nobody_waits_for_memory_that_is_being_taken_back_and_is_in_use() -> None:
    here = End(4096, 0)
    with Peer(4096) as peer:
        here.agent.add_remote_agent(peer.metadata)
        there = here.agent.get_xfer_descs([(peer.address, 4096, 0)], "DRAM")
        here.agent.make_connection("peer")
        peer.freeze()
        handle = here.agent.initialize_xfer("READ", here.whole, there, "peer")
        here.agent.transfer(handle)
        taking_back = threading.Thread(target=here.agent.deregister_memory, args=(here.registered,))
        taking_back.start()
        time.sleep(0.2)
        assert here.agent.get_new_notifs() == {}
        here.agent.send_notif(here.agent.name, b"note")
        assert here.agent.get_new_notifs() == {here.agent.name: [b"note"]}
        assert taking_back.is_alive(), "the peer counts as frozen after 2 s"
        taking_back.join()


def test_lists_behave_as_lists() -> None:
    rows = [(1000, 105, 0), (2000, 30, 0), (1010, 20, 0)]
    made = _bindings.nixlXferDList(_bindings.DRAM_SEG, rows)
    assert list(made) == rows and made.descCount() == 3 and made.getType() == _bindings.DRAM_SEG
    assert made.index(rows[2]) == 2
    with pytest.raises(_bindings.nixlNotFoundError):
        made.index((1, 1, 1))
    made.remDesc(1)
    made[0] = (5, 6, 7)
    made.addDesc((8, 9, 0))
    assert list(made) == [(5, 6, 7), (1010, 20, 0), (8, 9, 0)]
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            _ = made[beyond]
    registered = _bindings.nixlRegDList(_bindings.DRAM_SEG, [(1, 2, 0, "x"), (3, 4, 0, b"y\xff")])
    assert registered[1] == (3, 4, 0, b"y\xff")
    assert list(registered.trim()) == [(1, 2, 0), (3, 4, 0)]
    for wrong in ([(1, 2)], [(1, 2, -3)], [(1, 2, "3")], np.zeros((2, 4), dtype=np.uint64), np.zeros((2, 3))):
        with pytest.raises(ValueError):
            _bindings.nixlXferDList(_bindings.DRAM_SEG, wrong)
    made.clear()
    assert made.isEmpty()


def lists() -> list[_bindings.nixlXferDList | _bindings.nixlRegDList]:
    many = np.arange(3000, dtype=np.uint64).reshape(1000, 3)
    return [
        _bindings.nixlXferDList(_bindings.DRAM_SEG),
        _bindings.nixlXferDList(_bindings.VRAM_SEG, many),
        _bindings.nixlRegDList(_bindings.DRAM_SEG, [(1, 2, 0, "x"), (2**64 - 1, 4, 0, b"y\xff")]),
        _bindings.nixlRegDList(_bindings.FILE_SEG, many),
    ]


def test_serialized_lists_come_back_the_same() -> None:
    agent = nixl_agent(next(NAMES), nixl_agent_config(backends=[]))
    for descs in lists():
        assert agent.deserialize_descs(agent.get_serialized_descs(descs)) == descs
        assert pickle.loads(pickle.dumps(descs)) == descs


def test_damaged_lists_are_refused() -> None:
    agent = nixl_agent(next(NAMES), nixl_agent_config(backends=[]))
    chance = random.Random(7)
    for data in map(agent.get_serialized_descs, lists()):
        for at in {*range(16), *(chance.randrange(len(data)) for _ in range(200))}:
            damaged = bytearray(data)
            damaged[at] ^= 1 << chance.randrange(8)
            with pytest.raises(_bindings.nixlMismatchError):
                agent.deserialize_descs(bytes(damaged))
        for end in (0, 3, 15, len(data) - 1):
            with pytest.raises(_bindings.nixlMismatchError):
                agent.deserialize_descs(data[:end])
    with pytest.raises(_bindings.nixlMismatchError):
        agent.deserialize_descs(pickle.dumps({"a": 1}))


def test_metadata_travels_by_the_listener() -> None:
    here = End(4096, 0)
    there = End(4096, 5, enable_listen_thread=True, listen_port=0)
    port = there.agent.agent._listener.port
    here.agent.fetch_remote_metadata(there.agent.name, "127.0.0.1", port)
    here.agent.send_local_metadata("127.0.0.1", port)
    assert here.agent.check_remote_metadata(there.agent.name)
    assert here.agent.check_remote_metadata(there.agent.name, there.whole)
    until(lambda: there.agent.check_remote_metadata(here.agent.name))
    handle = here.agent.initialize_xfer("READ", here.whole, there.whole, there.agent.name)
    here.agent.transfer(handle)
    finish(here.agent, handle)
    assert here.pool.read(0, 4096) == b"\x05" * 4096
    here.agent.invalidate_local_metadata("127.0.0.1", port)
    until(lambda: not there.agent.check_remote_metadata(here.agent.name))


def test_a_listener_outlives_what_is_not_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"secret\n")
    monkeypatch.setenv("FOREBAY_TOKEN_FILE", str(token))
    there = End(4096, 5, enable_listen_thread=True, listen_port=0)
    port = there.agent.agent._listener.port
    for hostile in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\x01\xff\xff\xff\xff", b""):
        # The listener may close before all of it is said.
        with socket.create_connection(("127.0.0.1", port)) as probe, contextlib.suppress(OSError):
            probe.settimeout(TIMEOUT_S)
            probe.sendall(hostile)
            probe.shutdown(socket.SHUT_WR)
            while probe.recv(4096):
                pass
    with pytest.raises((_exchange.Malformed, OSError)):
        _exchange.ask(("127.0.0.1", port), b"guess", _exchange.FETCH_METADATA, b"")
    metadata = _exchange.ask(("127.0.0.1", port), b"secret", _exchange.FETCH_METADATA, b"")
    assert metadata == there.agent.get_agent_metadata()


def test_a_listener_answers_on_the_address_that_is_set_also_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    monkeypatch.setenv("FOREBAY_LISTEN", "[::1]:0")
    there = End(4096, 5, enable_listen_thread=True, listen_port=0)
    address = ("::1", there.agent.agent._listener.port)
    metadata = _exchange.ask(address, b"", _exchange.FETCH_METADATA, b"")
    assert metadata == there.agent.get_agent_metadata()


def test_those_who_connect_to_a_listener_and_say_nothing_hold_nobody_up() -> None:
    there = End(4096, 5, enable_listen_thread=True, listen_port=0)
    address = ("127.0.0.1", there.agent.agent._listener.port)
    with contextlib.ExitStack() as silent:
        for _ in range(3):
            silent.enter_context(socket.create_connection(address))
        metadata = _exchange.ask(address, b"", _exchange.FETCH_METADATA, b"")
    assert metadata == there.agent.get_agent_metadata()


RECEIVER = """
import json, sys
from forebay.nixl._api import nixl_agent, nixl_agent_config

agent = nixl_agent("receiver", nixl_agent_config(backends=["UCX"]))
print(agent.get_agent_metadata().hex(), flush=True)
got = []
while len(got) < int(sys.argv[1]):
    for texts in agent.get_new_notifs().values():
        got += texts
print(json.dumps([int(text) for text in got]), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def receiver(count: int) -> Iterator[tuple[nixl_agent, "subprocess.Popen[str]"]]:
    """A process that takes so many messages in and says which, and an agent that knows it."""
    command = [sys.executable, "-c", RECEIVER, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        sender = nixl_agent(next(NAMES), nixl_agent_config(backends=["UCX"]))
        sender.add_remote_agent(bytes.fromhex(line_of(process).strip()))
        yield sender, process
    finally:
        kill(process)


def test_every_message_that_was_sent_arrives_in_its_order() -> None:
    with receiver(5_000) as (sender, process):
        for number in range(5_000):
            sender.send_notif("receiver", str(number).encode())
        assert json.loads(line_of(process)) == list(range(5_000))


def test_a_message_to_a_dead_peer_raises() -> None:
    with receiver(1) as (sender, process):
        sender.send_notif("receiver", b"0")
        assert json.loads(line_of(process)) == [0]
        kill(process)
        for _ in range(2):
            with pytest.raises(_bindings.nixlRemoteDisconnectError):
                sender.send_notif("receiver", b"1")
        faults = sender.agent.forebay.stats()["receiver"]["faults"]
        assert faults["not_notified"] == 2, "nothing is counted as sent"


def test_messages_to_oneself_have_a_limit() -> None:
    agent = nixl_agent(next(NAMES), nixl_agent_config())
    for _ in range(65_536):
        agent.send_notif(agent.name, b"")
    with pytest.raises(_bindings.nixlNotAllowedError, match="65536 messages"):
        agent.send_notif(agent.name, b"")
    assert len(agent.get_new_notifs()[agent.name]) == 65_536
