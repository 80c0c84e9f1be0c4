"""`forebay.Agent` from Python, against a second process."""

import array
import asyncio
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from agent_peer import Peer, Pool
from processes import until

import forebay
from forebay.aio import Waiter

MIB = 1 << 20
TIMEOUT_S = 20.0


@pytest.fixture
def agent() -> Iterator[forebay.Agent]:
    made = forebay.Agent("here")
    yield made
    made.close()


def connected(agent: forebay.Agent, peer: Peer, pool: Pool) -> None:
    agent.register_memory((pool.address, pool.length))
    assert agent.add_peer(peer.metadata) == "peer"


def whole(agent: forebay.Agent, peer: Peer, pool: Pool, operation: str) -> forebay.Transfer:
    here = agent.prepare([(pool.address, pool.length, 0)])
    there = agent.prepare([(peer.address, pool.length, 0)], peer="peer")
    return agent.transfer(operation, here, there)


def test_bytes_that_are_written_are_there_when_the_transfer_is_done(agent: forebay.Agent) -> None:
    with Peer(MIB) as peer:
        pool = Pool(MIB, 0)
        data = random.Random(1).randbytes(MIB)
        pool.write(0, data)
        connected(agent, peer, pool)
        transfer = whole(agent, peer, pool, "write")
        assert transfer.state == "ready"
        transfer.post()
        assert transfer.wait(TIMEOUT_S)
        assert (transfer.state, transfer.total_bytes, transfer.blocks) == ("done", MIB, 1)
        assert peer.read(0, MIB) == data


def test_a_transfer_can_be_posted_again_and_reads_what_is_there_then(agent: forebay.Agent) -> None:
    with Peer(MIB, fill=7) as peer:
        pool = Pool(MIB, 0)
        connected(agent, peer, pool)
        transfer = whole(agent, peer, pool, "read")
        transfer.post()
        assert transfer.wait(TIMEOUT_S)
        assert pool.read(0, MIB) == b"\x07" * MIB
        peer.ask("write", offset=5, bytes="0908")
        transfer.post()
        assert transfer.wait(TIMEOUT_S)
        assert pool.read(4, 4) == b"\x07\x09\x08\x07"


def test_arrays_lists_and_strides_say_the_same(agent: forebay.Agent) -> None:
    """Every second block of the peer comes into every third here, in an order of its own."""
    block, count = 1000, 200
    with Peer(MIB) as peer:
        data = random.Random(2).randbytes(2 * block * count)
        peer.ask("write", offset=0, bytes=data.hex())
        pool = Pool(MIB, 0)
        connected(agent, peer, pool)
        plain = np.zeros((count, 3), dtype=np.uint64)
        plain[:, 0] = peer.address + 2 * block * np.arange(count, dtype=np.uint64)
        plain[:, 1] = block
        strided = np.array([[peer.address, block, 0, 2 * block, count]], dtype=np.int64)
        tuples = [(peer.address + 2 * block * nth, block, 0) for nth in range(count)]
        order = np.random.default_rng(3).permutation(count).astype(np.int32)
        here = agent.prepare([(pool.address, block, 0, 3 * block, count)])
        for rows in (plain, strided, tuples, forebay.Descriptors(tuples)):
            there = agent.prepare(rows, peer="peer")
            assert (len(there), there.peer, here.peer) == (count, "peer", None)
            pool.fill(0)
            transfer = agent.transfer(
                "read", here, there, local_indices=order, remote_indices=list(range(count))
            )
            transfer.post()
            assert transfer.wait(TIMEOUT_S)
            for nth, place in enumerate(order.tolist()):
                assert pool.read(3 * block * place, block) == data[2 * block * nth :][:block]
                assert pool.read(3 * block * place + block, 8) == b"\0" * 8


def test_buffers_are_registered_and_kept(agent: forebay.Agent) -> None:
    with Peer(4096, fill=3) as peer:
        agent.add_peer(peer.metadata)
        there = agent.prepare([(peer.address, 4096, 0)], peer="peer")
        for memory in (bytearray(4096), np.zeros(512, dtype=np.float64), array.array("B", bytes(4096))):
            registration = agent.register_memory(memory)
            assert registration.bytes == 4096
            transfer = agent.transfer("read", agent.prepare([(registration.address, 4096, 0)]), there)
            transfer.post()
            assert transfer.wait(TIMEOUT_S)
            assert bytes(memory) == b"\x03" * 4096
            if isinstance(memory, bytearray):
                with pytest.raises(BufferError):
                    memory.append(1)
            agent.deregister_memory(registration)
        with pytest.raises(forebay.InvalidError, match="read-only"):
            agent.register_memory(bytes(4096))


def test_a_notification_never_overtakes_its_bytes(agent: forebay.Agent) -> None:
    length = 32 * MIB
    with Peer(length, fill=1) as peer:
        pool = Pool(length, 2)
        connected(agent, peer, pool)
        here = agent.prepare([(pool.address, length, 0)])
        there = agent.prepare([(peer.address, length, 0)], peer="peer")
        agent.transfer("write", here, there, notification=b"in place").post()
        taken: list[object] = []

        def has_come() -> bool:
            answer = peer.ask("notifications")
            taken.extend(answer["notifications"])
            assert not answer["notifications"] or (answer["first"], answer["last"]) == (2, 2)
            return bool(taken)

        until(has_come)
        assert taken == [["here", "in place"]]


def test_messages_go_both_ways(agent: forebay.Agent) -> None:
    with Peer(4096) as peer:
        agent.add_peer(peer.metadata)
        peer.ask("add_peer", metadata=agent.metadata().hex())
        agent.notify("peer", b"ping")
        until(lambda: peer.ask("notifications")["notifications"] == [["here", "ping"]])
        peer.ask("notify", peer="here", text="pong")
        ready, _, _ = select.select([agent.fileno()], [], [], TIMEOUT_S)
        assert ready, "the descriptor is readable when a notification has come"
        agent.clear_events()
        assert agent.take_notifications() == [("peer", b"pong")]


def test_after_cancel_nothing_is_written_any_more(agent: forebay.Agent) -> None:
    length = 64 * MIB
    with Peer(length, fill=9) as peer:
        pool = Pool(length, 0)
        connected(agent, peer, pool)
        transfer = whole(agent, peer, pool, "read")
        for delay_ms in (0, 1, 3, 8):
            pool.fill(0)
            transfer.post()
            time.sleep(delay_ms / 1000)
            transfer.cancel()
            before = pool.read(0, length)
            assert transfer.state in ("done", "failed")
            if transfer.state == "failed":
                assert isinstance(transfer.error, forebay.CancelledError)
            time.sleep(0.05)
            assert pool.read(0, length) == before


def test_a_killed_peer_is_an_error_that_names_it(agent: forebay.Agent) -> None:
    length = 256 * MIB
    with Peer(length) as peer:
        pool = Pool(length, 0)
        connected(agent, peer, pool)
        transfer = whole(agent, peer, pool, "write")
        transfer.post()
        peer.process.send_signal(signal.SIGKILL)
        with pytest.raises(forebay.PeerLostError, match="peer"):
            # It may have ended before the signal came; then the next one cannot.
            transfer.wait(TIMEOUT_S)
            transfer.post()
            transfer.wait(TIMEOUT_S)
        assert transfer.state == "failed"


def test_a_frozen_peer_is_found_within_the_limit() -> None:
    length = 64 * MIB
    agent = forebay.Agent("here", progress_limit_us=300_000)
    with Peer(length) as peer:
        pool = Pool(length, 0)
        connected(agent, peer, pool)
        agent.connect("peer")
        peer.freeze()
        transfer = whole(agent, peer, pool, "write")
        transfer.post()
        with pytest.raises(forebay.PeerLostError):
            transfer.wait(TIMEOUT_S)
        peer.thaw()
    agent.close()


def test_a_deadline_ends_a_transfer(agent: forebay.Agent) -> None:
    length = 64 * MIB
    with Peer(length) as peer:
        pool = Pool(length, 0)
        connected(agent, peer, pool)
        here = agent.prepare([(pool.address, length, 0)])
        there = agent.prepare([(peer.address, length, 0)], peer="peer")
        agent.connect("peer")
        transfer = agent.transfer("write", here, there, deadline_us=1)
        transfer.post()
        with pytest.raises(forebay.DeadlineError):
            transfer.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """A certificate that is its own authority, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("SKIPPED: no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    own, key = folder / "own.pem", folder / "key.pem"
    # An authority may not stand for an agent, but an agent's certificate may be the only one that
    # is let in.
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=agent"
    made += f" -addext basicConstraints=critical,CA:FALSE -out {own}"
    subprocess.run([openssl, *made.split(), "-keyout", str(key)], check=True, capture_output=True)
    return own.read_bytes(), key.read_bytes(), own.read_bytes()


def test_with_tls_only_those_with_a_certificate_are_spoken_to(
    certificate: tuple[bytes, bytes, bytes],
) -> None:
    there, pool = forebay.Agent("there", tls=certificate), Pool(4096, 6)
    there.register_memory((pool.address, 4096))
    target = bytearray(4096)
    for tls in (certificate, None):
        here = forebay.Agent("here", tls=tls)
        mine = here.register_memory(target)
        here.add_peer(there.metadata())
        one, other = (
            here.prepare([(mine.address, 4096, 0)]),
            here.prepare([(pool.address, 4096, 0)], peer="there"),
        )
        transfer = here.transfer("read", one, other)
        transfer.post()
        if tls:
            assert transfer.wait(TIMEOUT_S)
            assert target == b"\x06" * 4096
        else:
            with pytest.raises(forebay.PeerLostError):
                transfer.wait(TIMEOUT_S)
        here.close()
    there.close()
    with pytest.raises(forebay.InvalidError, match="tls"):
        forebay.Agent("here", tls=(b"", b"", b""))


@contextmanager
def frozen(limit_us: int) -> Iterator[tuple[forebay.Agent, Peer, forebay.Transfer]]:
    """An agent, a peer that is frozen, and a transfer to it, which does not move."""
    agent = forebay.Agent("here", progress_limit_us=limit_us)
    with Peer(4096) as peer:
        pool = Pool(4096, 0)
        connected(agent, peer, pool)
        agent.connect("peer")
        peer.freeze()
        yield agent, peer, whole(agent, peer, pool, "write")
    agent.close()


def test_waiting_lets_other_threads_run() -> None:
    with frozen(60_000_000) as (_, peer, transfer):
        transfer.post()
        waiter = threading.Thread(target=transfer.wait, args=(1.0,))
        waiter.start()
        ran = 0
        while waiter.is_alive():
            ran += 1
            time.sleep(0.001)
        assert ran > 1
        peer.thaw()
        assert transfer.wait(TIMEOUT_S)


def test_asyncio_waits_on_the_descriptor(agent: forebay.Agent) -> None:
    async def scenario(peer: Peer, pool: Pool) -> None:
        async with Waiter(agent) as waiter:
            here = agent.prepare([(pool.address, 4096, 0, 4096, pool.length // 4096)])
            there = agent.prepare([(peer.address, 4096, 0, 4096, pool.length // 4096)], peer="peer")
            transfers = [
                agent.transfer("read", here, there, local_indices=[nth], remote_indices=[nth])
                for nth in range(64)
            ]
            await asyncio.wait_for(asyncio.gather(*map(waiter.run, transfers)), TIMEOUT_S)
            peer.ask("notify", peer="here", text="hello")
            assert await asyncio.wait_for(waiter.notification(), TIMEOUT_S) == ("peer", b"hello")
            peer.process.kill()
            with pytest.raises(forebay.PeerLostError):
                await asyncio.wait_for(waiter.run(transfers[0]), TIMEOUT_S)

    with Peer(64 * 4096, fill=5) as peer:
        pool = Pool(64 * 4096, 0)
        connected(agent, peer, pool)
        peer.ask("add_peer", metadata=agent.metadata().hex())
        asyncio.run(scenario(peer, pool))
        assert pool.read(0, pool.length) == b"\x05" * pool.length


def test_a_waiter_that_is_closed_ends_all_that_wait_and_no_transfer() -> None:
    async def scenario(agent: forebay.Agent, transfer: forebay.Transfer) -> None:
        waiter = Waiter(agent)
        waiting = [asyncio.create_task(one) for one in (waiter.run(transfer), waiter.notification())]
        await asyncio.sleep(0)
        waiter.close()
        waiter.close()
        ended, _ = await asyncio.wait(waiting, timeout=TIMEOUT_S)
        assert len(ended) == 2 and all(one.cancelled() for one in waiting)
        assert transfer.state == "moving"
        for late in (waiter.run(transfer), waiter.notification()):
            with pytest.raises(forebay.InvalidError, match="closed"):
                await late

    with frozen(60_000_000) as (agent, peer, transfer):
        asyncio.run(scenario(agent, transfer))
        peer.thaw()
        assert transfer.wait(TIMEOUT_S) and transfer.state == "done"


def test_a_coroutine_that_is_cancelled_cancels_its_transfer() -> None:
    async def scenario(agent: forebay.Agent, transfer: forebay.Transfer) -> None:
        async with Waiter(agent) as waiter:
            running = asyncio.create_task(waiter.run(transfer))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running], timeout=TIMEOUT_S)
            assert running.cancelled()

    with frozen(1_000_000) as (agent, _, transfer):
        asyncio.run(scenario(agent, transfer))
        assert isinstance(transfer.error, forebay.CancelledError)


def test_a_coroutine_that_is_cancelled_twice_ends_no_sooner_than_its_transfer() -> None:
    async def scenario(agent: forebay.Agent, transfer: forebay.Transfer) -> None:
        async with Waiter(agent) as waiter:
            running = asyncio.create_task(waiter.run(transfer))
            await asyncio.sleep(0)
            for _ in range(2):
                running.cancel()
                await asyncio.sleep(0.1)
            await asyncio.wait([running], timeout=TIMEOUT_S)
            assert running.cancelled() and transfer.state == "failed"

    with frozen(1_000_000) as (agent, _, transfer):
        asyncio.run(scenario(agent, transfer))


def test_a_transfer_that_is_run_again_before_its_end_was_heard_of_ends_both_runs(
    agent: forebay.Agent,
) -> None:
    async def scenario(transfer: forebay.Transfer) -> None:
        async with Waiter(agent) as waiter:
            first = asyncio.create_task(waiter.run(transfer))
            await asyncio.sleep(0)
            # The loop does not run meanwhile, so that it does not hear of the end.
            assert transfer.wait(TIMEOUT_S)
            await asyncio.wait_for(waiter.run(transfer), TIMEOUT_S)
            await asyncio.wait_for(first, TIMEOUT_S)

    with Peer(64 * MIB) as peer:
        pool = Pool(64 * MIB, 0)
        connected(agent, peer, pool)
        asyncio.run(scenario(whole(agent, peer, pool, "read")))


def test_messages_that_nobody_asks_a_waiter_for_are_refused_like_those_that_nobody_takes() -> None:
    text = bytes(60_000)

    async def scenario(here: forebay.Agent, there: forebay.Agent) -> None:
        async with Waiter(here) as waiter:
            sent = 0
            with pytest.raises(forebay.TransferError, match="wait to be taken"):
                while sent < 2_000:
                    await asyncio.to_thread(there.notify, "here", text)
                    sent += 1
            for _ in range(sent):
                assert await asyncio.wait_for(waiter.notification(), TIMEOUT_S) == ("there", text)
            await asyncio.to_thread(there.notify, "here", b"again")
            assert await asyncio.wait_for(waiter.notification(), TIMEOUT_S) == ("there", b"again")

    here, there = forebay.Agent("here"), forebay.Agent("there")
    there.add_peer(here.metadata())
    asyncio.run(scenario(here, there))
    there.close()
    here.close()


def test_an_agent_that_is_closed_ends_all_that_wait() -> None:
    async def scenario(agent: forebay.Agent, transfer: forebay.Transfer) -> None:
        waiter = Waiter(agent)
        waiting = [asyncio.create_task(one) for one in (waiter.run(transfer), waiter.notification())]
        await asyncio.sleep(0)
        await asyncio.to_thread(agent.close)
        ended, _ = await asyncio.wait(waiting, timeout=TIMEOUT_S)
        assert len(ended) == 2
        assert isinstance(waiting[0].exception(), forebay.CancelledError)
        assert isinstance(waiting[1].exception(), forebay.PeerLostError)
        waiter.close()

    with frozen(1_000_000) as (agent, _, transfer):
        asyncio.run(scenario(agent, transfer))


def test_what_is_not_acceptable_is_refused_with_the_reason(agent: forebay.Agent) -> None:
    memory = bytearray(4096)
    registration = agent.register_memory(memory)
    inside = agent.prepare([(registration.address, 64, 0)])
    with pytest.raises(forebay.InvalidError, match="2 dimensions"):
        agent.prepare(np.zeros(3, dtype=np.uint64))
    with pytest.raises(forebay.InvalidError, match="not 4"):
        agent.prepare(np.zeros((1, 4), dtype=np.uint64))
    with pytest.raises(forebay.InvalidError, match="uint64 or int64"):
        agent.prepare(np.zeros((1, 3), dtype=np.float64))
    with pytest.raises(forebay.InvalidError, match="at least 0"):
        agent.prepare(np.array([[-1, 4, 0]], dtype=np.int64))
    with pytest.raises(forebay.InvalidError, match="tuple of 3"):
        agent.prepare([(1, 2)])
    with pytest.raises(forebay.NotFoundError, match="registered"):
        agent.prepare([(registration.address + 4000, 100, 0)])
    with pytest.raises(forebay.NotFoundError, match="nobody"):
        agent.prepare([(registration.address, 64, 0)], peer="nobody")
    with pytest.raises(forebay.InvalidError, match="overlap"):
        agent.register_memory((registration.address + 100, 100))
    with pytest.raises(forebay.InvalidError, match="metadata"):
        agent.add_peer(b"anything else")
    with pytest.raises(forebay.InvalidError, match="append"):
        agent.transfer("append", inside, inside)
    with pytest.raises(forebay.InvalidError):
        forebay.Agent("")
    with pytest.raises(forebay.InvalidError, match="here:there"):
        forebay.Agent("here", listen="here:there")


def test_memory_that_is_not_registered_any_more_is_refused(agent: forebay.Agent) -> None:
    with Peer(4096) as peer:
        agent.add_peer(peer.metadata)
        there = agent.prepare([(peer.address, 4096, 0)], peer="peer")
        registration = agent.register_memory(bytearray(4096))
        here = agent.prepare([(registration.address, 4096, 0)])
        agent.deregister_memory(registration)
        with pytest.raises(forebay.ForebayError):
            transfer = agent.transfer("read", here, there)
            transfer.post()
            transfer.wait(TIMEOUT_S)


def test_importing_loads_neither_numpy_nor_torch() -> None:
    loaded = "import sys, forebay.nixl._api; print(sorted({'numpy', 'torch', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_program_may_end_with_everything_still_under_way() -> None:
    program = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import forebay
from agent_peer import Pool
one, other, pool = forebay.Agent("one"), forebay.Agent("other"), Pool({64 * MIB}, 1)
one.register_memory((pool.address, {32 * MIB}))
other.register_memory((pool.address + {32 * MIB}, {32 * MIB}))
one.add_peer(other.metadata())
here = one.prepare([(pool.address, {32 * MIB}, 0)])
there = one.prepare([(pool.address + {32 * MIB}, {32 * MIB}, 0)], peer="other")
transfer = one.transfer("write", here, there)
transfer.post()
print("posted", flush=True)
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "posted\n", "")
