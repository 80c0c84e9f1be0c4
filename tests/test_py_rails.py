"""Rails from Python: UCX's shared memory and its `tcp` on the loopback device, between two agents."""

import ctypes
import random
from typing import Any, Literal

import pytest
from agent_peer import Pool
from processes import until

import forebay

BLOCK = 26_000
BLOCKS = 200
TIMEOUT_S = 30.0


def need_ucx() -> None:
    """Skips where the library of rails is missing, and says so."""
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError as error:
        pytest.skip(f"libucp.so.0 is not installed: {error}")


def connected(ours: list[forebay.Rail], theirs: list[forebay.Rail]) -> tuple[forebay.Agent, forebay.Agent]:
    one, two = forebay.Agent("one", rails=ours), forebay.Agent("two", rails=theirs)
    one.add_peer(two.metadata())
    one.connect("two")
    return one, two


def stat(agent: forebay.Agent) -> dict[str, Any]:
    found: dict[str, Any] = agent.stats()["two"]
    return found


def bytes_arrive(one: forebay.Agent, two: forebay.Agent, operation: Literal["read", "write"]) -> None:
    here, there = Pool(BLOCK * BLOCKS, 0), Pool(BLOCK * BLOCKS, 0)
    source, target = (here, there) if operation == "write" else (there, here)
    data = random.Random(operation).randbytes(BLOCK * BLOCKS)
    source.write(0, data)
    registered = [
        one.register_memory((here.address, here.length)),
        two.register_memory((there.address, there.length)),
    ]
    one.add_peer(two.metadata())
    order = random.Random(1).sample(range(BLOCKS), BLOCKS)
    mine = one.prepare([(here.address + BLOCK * block, BLOCK, 0) for block in range(BLOCKS)])
    theirs = one.prepare([(there.address + BLOCK * block, BLOCK, 0) for block in range(BLOCKS)], peer="two")
    transfer = one.transfer(operation, mine, theirs, remote_indices=order)
    transfer.post()
    assert transfer.wait(TIMEOUT_S)
    for at, other in enumerate(order):
        to, of = (other, at) if operation == "write" else (at, other)
        assert target.read(BLOCK * to, BLOCK) == data[BLOCK * of : BLOCK * (of + 1)], f"block {at}"
    one.deregister_memory(registered[0])
    two.deregister_memory(registered[1])


@pytest.mark.parametrize(
    ("rail", "path"),
    [(forebay.Rail("memory"), "ucx_memory"), (forebay.Rail("tcp", devices=["lo"]), "ucx_tcp")],
)
def test_bytes_take_the_rail_that_both_ends_have(rail: forebay.Rail, path: str) -> None:
    need_ucx()
    one, two = connected([rail], [rail])
    until(lambda: bool(stat(one)["flows"] == 2 or stat(one)["idle_rails"]))
    assert stat(one)["idle_rails"] == []
    bytes_arrive(one, two, "write")
    bytes_arrive(one, two, "read")
    assert stat(one)["paths"] == {path: 2 * BLOCK * BLOCKS}
    one.close()
    two.close()


def test_a_rail_that_the_peer_does_not_have_leaves_the_bytes_on_tcp_and_says_why() -> None:
    one, two = connected([forebay.Rail("memory")], [])
    until(lambda: bool(stat(one)["idle_rails"]))
    assert stat(one)["idle_rails"] == [("memory", "the peer has no rail of this fabric")]
    bytes_arrive(one, two, "write")
    assert stat(one)["paths"] == {"tcp": BLOCK * BLOCKS}
    one.close()
    two.close()


def test_a_rail_shows_what_it_was_given_and_refuses_what_is_none() -> None:
    rail = forebay.Rail("rdma", devices=("mlx5_0:1", "mlx5_1:1"))
    assert (rail.fabric, rail.devices) == ("rdma", ["mlx5_0:1", "mlx5_1:1"])
    assert rail == forebay.Rail("rdma", devices=["mlx5_0:1", "mlx5_1:1"]) != forebay.Rail("rdma")
    with pytest.raises(forebay.InvalidError, match='allowed are "memory", "rdma" and "tcp"'):
        forebay.Rail("infiniband")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        forebay.Rail("tcp", devices="lo")
    with pytest.raises(forebay.InvalidError, match="17 given"):
        forebay.Agent("one", rails=[forebay.Rail("memory")] * 17)
