"""docs/reference/format.md is enough: a reader that was written from it reads what Forebay wrote."""

import os
import pathlib
import random
import re
import signal
import subprocess
import time

import format_reader
import pytest
from format_reader import Damaged, Log, Refused, crc32c, seal

SEGMENT_BYTES = 2 << 20
ROOT = pathlib.Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/reference/format.md"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def write_log() -> str:
    """The program that fills logs; `make test-python` builds it."""
    path = TARGET / "debug/examples/write_log"
    assert path.exists(), f"{path} is missing: cargo build --workspace --example write_log"
    return str(path)


def layer(number, index, length, seed):
    """What write_log stores."""
    period = bytes((number + 7 * index + at * (2 * seed + 1)) % 251 for at in range(251))
    return (period * (length // 251 + 1))[:length]


def promised(lines):
    """Chunks that write_log called durable, by id."""
    chunks = {}
    for line in lines:
        number, chunk, tenant, parent, lengths = line.split()
        chunks[chunk] = (int(number), int(tenant), parent, [int(length) for length in lengths.split(",")])
    return chunks


def filled(path, count, seed=0):
    """A log of so many chunks, closed, and what was promised."""
    done = subprocess.run(
        [write_log(), path, str(count), str(seed)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return promised(done.stdout.splitlines())


def check_all(log, chunks, seed=0):
    """Fails unless every chunk of the log is one of these, with its bytes; returns their ids."""
    found = set()
    for chunk in log.chunks():
        number, tenant, parent, lengths = chunks[chunk.id.hex()]
        assert chunk.tenant == tenant and not chunk.is_sealed
        assert chunk.parent is None or chunk.parent.hex() == parent
        assert [length for _, length in chunk.shape.layers] == lengths
        for index, length in enumerate(lengths):
            assert log.layer(chunk, index) == layer(number, index, length, seed)
        found.add(chunk.id.hex())
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A log in which everything that was written still is, and what was promised."""
    path = tmp_path_factory.mktemp("format") / "log"
    return path, filled(path, 38)


@pytest.fixture
def spoilt(small, tmp_path):
    """Copies of the small log with some bytes replaced."""

    def make(*changes):
        image = bytearray(small[0].read_bytes())
        for offset, data in changes:
            image[offset : offset + len(data)] = data
        path = tmp_path / "log"
        path.write_bytes(image)
        return path

    return make


def test_the_documents_worked_example_comes_out():
    text = DOCUMENT.read_text()
    for data, crc in [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
    ]:
        assert crc32c(data) == crc and f"`{crc:#010x}`" in text
    expected = {name: int(value, 16) for name, value in re.findall(r"^(seal|crc|sum) +(0x\w+)", text, re.M)}
    key = seal(bytes(range(0x10, 0x20)), bytes(range(0x20, 0x40)), 9, 3, 5, 1)
    assert expected == {"seal": key, "crc": crc32c(b"forebay"), "sum": key ^ crc32c(b"forebay")}


def test_every_chunk_of_a_closed_log_is_read_with_its_bytes(small):
    path, chunks = small
    with Log(path) as log:
        assert log.superblock.clean
        assert check_all(log, chunks) == set(chunks)
        assert any(chunk.parent for chunk in log.chunks())


def test_a_log_that_was_filled_many_times_over_is_read(tmp_path):
    chunks = filled(tmp_path / "log", 1500, seed=3)
    with Log(tmp_path / "log") as log:
        found = check_all(log, chunks, seed=3)
    assert 30 < len(found) < len(chunks)


def test_what_was_durable_before_a_sigkill_is_read_after_it(tmp_path):
    held = 0
    for kill in range(4):
        seed, path = kill + 10, tmp_path / f"log{kill}"
        command = [write_log(), path, "0", str(seed)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(0.1 + 0.2 * kill)
        process.send_signal(signal.SIGKILL)
        chunks = promised(
            line for line in process.communicate(timeout=30)[0].splitlines(True) if line[-1] == "\n"
        )
        last = max((number for number, *_ in chunks.values()), default=-1)
        with Log(path) as log:
            assert not log.superblock.clean
            ours = {chunk.id.hex() for chunk in log.chunks()}
            # Chunks may be there that were not promised yet; those that were have their bytes.
            assert all(
                int.from_bytes(bytes.fromhex(chunk)[:8], "little") > last for chunk in ours - set(chunks)
            )
            for chunk in log.chunks():
                number = int.from_bytes(chunk.id[:8], "little")
                for index, (_, length) in enumerate(chunk.shape.layers):
                    assert log.layer(chunk, index) == layer(number, index, length, seed)
        # The oldest ones gave way to others; the newest ones never did.
        newest = [chunk for chunk, (number, *_) in chunks.items() if number > last - 10]
        held += len(newest)
        assert all(chunk in ours for chunk in newest)
    assert held > 0


def test_a_flipped_bit_is_never_data(small, spoilt):
    path, chunks = small
    image = path.read_bytes()
    with Log(path) as log:
        places = [chunk.slot_at + chunk.shape.layers[-1][0] for chunk in log.chunks()]
        used = [chunk.slot_at + at for chunk in log.chunks() for at in range(0, chunk.shape.slot_bytes, 977)]
    dice = random.Random(5)
    for at in dice.sample(places, 4) + dice.sample(used, 6):
        with Log(spoilt((at, bytes([image[at] ^ 1 << dice.randrange(8)])))) as log:
            missed = 0
            for chunk in log.chunks():
                number, _, _, lengths = chunks[chunk.id.hex()]
                try:
                    assert log.read(chunk) == b"".join(
                        layer(number, index, length, 0) for index, length in enumerate(lengths)
                    )
                except Damaged:
                    missed += 1
            assert missed + len(chunks) - len(list(log.chunks())) <= 1


def test_two_slots_that_changed_places_are_both_missed(small, spoilt):
    path, _ = small
    image = path.read_bytes()
    with Log(path) as log:
        first, second = [chunk for chunk in log.chunks() if chunk.bytes == 20_000][:2]
    size = first.shape.slot_bytes
    slots = [image[chunk.slot_at : chunk.slot_at + size] for chunk in (first, second)]
    with Log(spoilt((first.slot_at, slots[1]), (second.slot_at, slots[0]))) as log:
        assert not {first.id, second.id} & {chunk.id for chunk in log.chunks()}
    data = size - format_reader.PAGE
    with Log(spoilt((first.slot_at, slots[1][:data]))) as log, pytest.raises(Damaged):
        log.read(next(chunk for chunk in log.chunks() if chunk.id == first.id))


def test_one_damaged_superblock_checkpoint_or_summary_does_no_harm(small, spoilt):
    path, chunks = small
    with Log(path) as log:
        block, segments = log.superblock, {chunk.segment for chunk in log.chunks()}
    summaries = [
        (block.segments_at + segment * SEGMENT_BYTES + format_reader.PAGE, b"junk") for segment in segments
    ]
    older = [(area.offset, b"junk") for area in block.checkpoints[:1]]
    for change in [[(0, b"junk")], [(65536, b"junk")], summaries, older]:
        with Log(spoilt(*change)) as log:
            assert check_all(log, chunks) <= set(chunks)
    with Log(spoilt(*summaries)) as log:
        assert check_all(log, chunks) == set(chunks)


def test_files_that_are_no_log_of_this_version_are_refused_with_the_reason(small, spoilt):
    image = bytearray(small[0].read_bytes()[:4096])
    image[12] = 2
    image[8:12] = crc32c(bytes(image[12:])).to_bytes(4, "little")
    with pytest.raises(Refused, match="version 2"):
        Log(spoilt((0, bytes(image))))
    with pytest.raises(Refused, match="not a log"):
        Log(spoilt((0, b"x"), (65536, b"x")))
    path = spoilt()
    os.truncate(path, 1 << 20)
    with pytest.raises(Refused, match="1048576 bytes"):
        Log(path)
    with pytest.raises(Refused, match="no checkpoint"):
        with Log(small[0]) as log:
            areas = log.superblock.checkpoints
        Log(spoilt(*[(area.offset, b"x") for area in areas]))


def test_as_a_program_it_lists_and_extracts(small, capsys, monkeypatch):
    path, chunks = small
    monkeypatch.setattr("sys.argv", ["format_reader.py", str(path)])
    assert format_reader.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(chunks) and all(line.endswith(" ok") for line in listed)
    wanted = next(chunk for chunk, (number, *_) in chunks.items() if number == 5)
    program = [os.sys.executable, format_reader.__file__, str(path), "--extract", wanted]
    done = subprocess.run(program, capture_output=True, timeout=30)
    assert done.stdout == b"".join(
        layer(5, index, length, 0) for index, length in enumerate([100, 4096, 9000])
    )
