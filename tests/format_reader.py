"""Reads a log of the SSD tier. Written from docs/reference/format.md alone, to show that the page is enough.

Knows the bytes of version 1 and nothing of the program that writes them. Standard library only. As a program:

    python3 tests/format_reader.py FILE                      # lists the chunks and checks every layer's sum
    python3 tests/format_reader.py FILE --extract ID > bytes # the layers of one chunk, one after another
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

PAGE = 4096
VERSION = 1
SUPERBLOCKS_AT = (0, 65536)
ENTRIES_PER_PAGE = 56
RECORDS_PER_BLOCK = 63
MAX_LAYERS = 496
STARTS_EXTENT = 1 << 31


class Refused(Exception):
    """The file is not a log that this reader may read."""


class Damaged(Exception):
    """Bytes that are not what they should be; whoever looked for them takes them for absent."""


def _crc_tables() -> list[list[int]]:
    """Eight tables, for eight bytes at a time."""
    first = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        first.append(value)
    tables = [first]
    for _ in range(7):
        tables.append([value >> 8 ^ first[value & 0xFF] for value in tables[-1]])
    return tables


_TABLES = _crc_tables()


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C of bytes."""
    t0, t1, t2, t3, t4, t5, t6, t7 = _TABLES
    crc = 0xFFFFFFFF
    whole = len(data) // 8 * 8
    for low, high in struct.iter_unpack("<II", data[:whole]):
        low ^= crc
        crc = (
            t7[low & 0xFF]
            ^ t6[low >> 8 & 0xFF]
            ^ t5[low >> 16 & 0xFF]
            ^ t4[low >> 24]
            ^ t3[high & 0xFF]
            ^ t2[high >> 8 & 0xFF]
            ^ t1[high >> 16 & 0xFF]
            ^ t0[high >> 24]
        )
    for byte in data[whole:]:
        crc = crc >> 8 ^ t0[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def seal(log: bytes, chunk: bytes, sequence: int, segment: int, slot: int, layer: int) -> int:
    """What a layer's CRC-32C is combined with by exclusive or."""
    return crc32c(struct.pack("<16s32sQIHH", log, chunk, sequence, segment, slot, layer))


def roundup(value: int, unit: int = PAGE) -> int:
    """The next multiple of a unit."""
    return -(-value // unit) * unit


def require(is_allowed: bool, what: str) -> None:
    """Fails unless a field holds what it may hold."""
    if not is_allowed:
        raise Damaged(what)


def page_log(page: bytes, magic: bytes) -> bytes:
    """Checks the head of a page and returns the log that it belongs to."""
    require(len(page) == PAGE, f"{len(page)} bytes of a page")
    found, crc, version = struct.unpack_from("<8sIH", page)
    require(found == magic, f"not a page {magic.decode()}")
    require(crc == crc32c(page[12:]), "the CRC of the page does not match")
    if version != VERSION:
        raise Refused(f"format version {version}; this reader reads version {VERSION}")
    return page[16:32]


@dataclass(frozen=True)
class Area:
    """A stretch of the file."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.bytes


@dataclass(frozen=True)
class Superblock:
    """What the file is and how it is divided."""

    log: bytes
    epoch: int
    clean: bool
    file_bytes: int
    journal: Area
    checkpoints: tuple[Area, Area]
    segments_at: int
    segment_bytes: int
    segments: int

    @classmethod
    def parse(cls, page: bytes) -> "Superblock":
        """What a superblock says."""
        log = page_log(page, b"FBLOGSUP")
        epoch, clean, file_bytes, *rest = struct.unpack_from("<QB7xQ6QQQI", page, 32)
        areas = [Area(rest[i], rest[i + 1]) for i in (0, 2, 4)]
        block = cls(log, epoch, clean == 1, file_bytes, areas[0], (areas[1], areas[2]), *rest[6:])
        require(clean <= 1, f"clean is {clean}")
        require(not any(page[124:]), "bytes after the last field")
        block._check()
        return block

    def _check(self) -> None:
        slots = min(self.segment_bytes // 8192, 65535)
        checkpoint = PAGE + roundup(self.segments * (16 + -(-slots // 8)))
        require(1 << 16 <= self.segment_bytes <= 1 << 30, f"segment_bytes is {self.segment_bytes}")
        require(4 <= self.segments <= 1 << 20, f"segments is {self.segments}")
        require(1 << 14 <= self.journal.bytes <= 1 << 30, f"journal is {self.journal}")
        end = 131072
        segments = Area(self.segments_at, self.segments * self.segment_bytes)
        for area in (self.journal, *self.checkpoints, segments):
            require(area.offset >= end and area.offset % PAGE == 0 == area.bytes % PAGE, f"area {area}")
            end = area.end
        require(all(area.bytes >= checkpoint for area in self.checkpoints), "the checkpoints are too short")
        require(end <= self.file_bytes, f"file_bytes is {self.file_bytes}")


@dataclass(frozen=True)
class Shape:
    """Where the layers of a chunk lie in its slot: start and length of each."""

    words: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    footer_at: int

    @classmethod
    def of(cls, words: tuple[int, ...]) -> "Shape":
        """The shape that the words of a header or footer say."""
        require(1 <= len(words) <= MAX_LAYERS, f"{len(words)} layers")
        end, layers = 0, []
        for word in words:
            start, length = roundup(end) if word & STARTS_EXTENT else end, word & ~STARTS_EXTENT
            require(length > 0, "a layer without bytes")
            layers.append((start, length))
            end = start + length
        return cls(words, tuple(layers), roundup(end))

    @property
    def slot_bytes(self) -> int:
        """Length of a slot."""
        return self.footer_at + PAGE


@dataclass
class Segment:
    """A segment according to checkpoint and journal."""

    state: int = 0
    slots: int = 0
    frontier: int = 0
    summary: int = 0
    sequence: int = 0
    live: set[int] = field(default_factory=set)
    # Chunks that the journal named, by slot.
    named: dict[int, bytes] = field(default_factory=dict)

    def live_as(self, sequence: int) -> bool:
        """Whether a record is of the segment's present life."""
        return sequence == self.sequence


@dataclass(frozen=True)
class Chunk:
    """A chunk that the log holds. Its layers have still to be verified."""

    id: bytes
    tenant: int
    parent: bytes | None
    is_sealed: bool
    segment: int
    slot: int
    sequence: int
    shape: Shape
    sums: tuple[int, ...]
    slot_at: int

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(length for _, length in self.shape.layers)


class Log:
    """A log, opened for reading."""

    def __init__(self, path: Path | str) -> None:
        """Chooses the superblock, reads the checkpoint and replays the journal."""
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed by close()
        try:
            self.superblock = self._choose_superblock()
            self.segments: list[Segment] = []
            self.doomed: set[int] = set()
            self.blocks_replayed = self._replay(*self._load_checkpoint())
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "Log":
        """The log itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()

    def _read(self, offset: int, count: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(count)

    def _page(self, offset: int, magic: bytes) -> bytes:
        """A page of this log."""
        page = self._read(offset, PAGE)
        try:
            require(page_log(page, magic) == self.superblock.log, "a page of another log")
        except Refused as other_version:
            raise Damaged(str(other_version)) from None
        return page

    def _choose_superblock(self) -> Superblock:
        sound, faults = [], []
        for offset in SUPERBLOCKS_AT:
            try:
                sound.append(Superblock.parse(self._read(offset, PAGE)))
            except Damaged as fault:
                faults.append(f"{offset}: {fault}")
        if not sound:
            raise Refused("not a log: " + "; ".join(faults))
        if len({block.log for block in sound}) > 1:
            raise Refused("superblocks of two logs")
        block = max(sound, key=lambda block: block.epoch)
        self.newest_epoch = block.epoch + (len(sound) == 1)
        have = self._file.seek(0, 2)
        if have < block.file_bytes:
            raise Refused(f"the file has {have} bytes, the log {block.file_bytes}")
        return block

    def _load_checkpoint(self) -> tuple[int, int]:
        """Loads the newer valid checkpoint; returns block and epoch from which to replay the journal."""
        sound, faults = [], []
        for area in self.superblock.checkpoints:
            try:
                sound.append(self._checkpoint(area))
            except (Damaged, struct.error) as fault:
                faults.append(str(fault))
        if not sound:
            raise Refused("no checkpoint can be read: " + "; ".join(faults))
        _, epoch, journal, self.doomed, self.segments = max(sound, key=lambda found: found[0])
        return journal, epoch

    def _checkpoint(self, area: Area) -> tuple[int, int, int, set[int], list[Segment]]:
        head = self._page(area.offset, b"FBLOGCHK")
        fields = struct.unpack_from("<4QIH2xQI4x", head, 32)
        serial, epoch, journal, _, segments, doomed, body_bytes, body_crc = fields
        require(segments == self.superblock.segments, f"a checkpoint of {segments} segments")
        require(doomed <= 64 and body_bytes <= area.bytes - PAGE, "a checkpoint that cannot be")
        body = self._read(area.offset + PAGE, body_bytes)
        require(crc32c(body) == body_crc, "the CRC of the checkpoint's body does not match")
        rows, at = [], 0
        for _ in range(segments):
            state, _, slots, frontier, summary, sequence = struct.unpack_from("<BBHHHQ", body, at)
            require(state <= 3 and frontier <= slots and summary <= slots, "a segment that cannot be")
            bits = int.from_bytes(body[at + 16 : at + 16 + -(-slots // 8)], "little")
            live = {slot for slot in range(slots) if bits >> slot & 1}
            rows.append(Segment(state, slots, frontier, summary, sequence, live))
            at += 16 + -(-slots // 8)
        return serial, epoch, journal, set(struct.unpack_from(f"<{doomed}H", head, 88)), rows

    def _replay(self, block: int, epoch: int) -> int:
        """Applies the journal from a block on; returns how many blocks there were."""
        journal, replayed = self.superblock.journal, 0
        while True:
            try:
                page = self._page(journal.offset + block % (journal.bytes // PAGE) * PAGE, b"FBLOGJRN")
                found_epoch, found, records = struct.unpack_from("<QQH", page, 32)
                require(found == block, "another block")
                require(epoch <= found_epoch <= self.newest_epoch, "of another epoch")
                require(records <= RECORDS_PER_BLOCK, f"{records} records")
                kinds = [page[64 + 64 * i : 66 + 64 * i] for i in range(records)]
                require(all(1 <= kind <= 9 and flags <= 1 for kind, flags in kinds), "unknown records")
            except Damaged:
                return replayed
            for i in range(records):
                self._apply(page[64 + 64 * i : 128 + 64 * i])
            block, epoch, replayed = block + 1, found_epoch, replayed + 1

    def _apply(self, record: bytes) -> None:
        fields = struct.unpack("<BBHIQHHIH6x32s", record)
        kind, flags, tenant, number, sequence, slot, slots, from_segment, from_slot, chunk = fields
        if kind >= 8:
            (self.doomed.add if kind == 8 else self.doomed.discard)(tenant)
            return
        if number >= len(self.segments):
            return
        segment = self.segments[number]
        if kind == 1:
            self.segments[number] = Segment(1, slots, sequence=sequence)
        elif kind in (6, 7):
            self.segments[number] = Segment(3 if kind == 6 else 0, sequence=segment.sequence)
        elif not segment.live_as(sequence):
            return
        elif kind == 2 and slot < segment.slots:
            segment.live.add(slot)
            segment.frontier = max(segment.frontier, slot + 1)
            segment.named[slot] = chunk
            if flags & 1 and from_segment < len(self.segments):
                self.segments[from_segment].live.discard(from_slot)
        elif kind == 3:
            segment.live.discard(slot)
        elif kind == 4:
            segment.state = 2
        elif kind == 5:
            segment.live, segment.state = set(), 0

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, by segment and slot."""
        for number, segment in enumerate(self.segments):
            if not segment.live:
                continue
            try:
                head_bytes, shape = self._header(number, segment)
            except Damaged:
                continue
            at = self.superblock.segments_at + number * self.superblock.segment_bytes + head_bytes
            for slot in sorted(segment.live):
                try:
                    chunk = self._chunk(number, slot, shape, at + slot * shape.slot_bytes)
                except Damaged:
                    continue
                if chunk.tenant not in self.doomed:
                    yield chunk

    def _header(self, number: int, segment: Segment) -> tuple[int, Shape]:
        """Bytes before the first slot, and the shape of all chunks."""
        page = self._page(self.superblock.segments_at + number * self.superblock.segment_bytes, b"FBLOGSEG")
        found, slots, layers, sequence = struct.unpack_from("<IHHQ", page, 32)
        require((found, sequence) == (number, segment.sequence), "the header of another life")
        require(layers <= MAX_LAYERS, f"{layers} layers")
        shape = Shape.of(struct.unpack_from(f"<{layers}I", page, 48))
        require(not any(page[48 + 4 * layers :]), "bytes after the last field")
        head_bytes = PAGE * (1 + -(-slots // ENTRIES_PER_PAGE))
        end = head_bytes + slots * shape.slot_bytes
        require(slots == segment.slots and end <= self.superblock.segment_bytes, f"{slots} slots")
        return head_bytes, shape

    def _chunk(self, number: int, slot: int, shape: Shape, slot_at: int) -> Chunk:
        """The chunk of a slot according to its footer, which must agree with summary and journal."""
        page = self._page(slot_at + shape.footer_at, b"FBLOGFTR")
        fields = struct.unpack_from("<IHHQHH4xQ32s32s", page, 32)
        found, found_slot, tenant, sequence, flags, layers, total, chunk, parent = fields
        segment = self.segments[number]
        require((found, found_slot, sequence) == (number, slot, segment.sequence), "another copy")
        require(flags <= 3 and layers == len(shape.layers), f"flags {flags}, {layers} layers")
        pairs = struct.unpack_from(f"<{2 * layers}I", page, 128)
        require(Shape.of(pairs[::2]) == shape, "another shape")
        require(total == sum(length for _, length in shape.layers), f"{total} bytes")
        require(segment.named.get(slot, chunk) == chunk, "not the chunk that the journal names")
        require(self.summary_id(number, slot) in (None, chunk), "not the chunk that the summary names")
        known = parent if flags & 1 else None
        sealed = flags & 2 != 0
        return Chunk(chunk, tenant, known, sealed, number, slot, sequence, shape, pairs[1::2], slot_at)

    def summary_id(self, number: int, slot: int) -> bytes | None:
        """Which chunk the summary says is in a slot, if it says anything."""
        index, entry = divmod(slot, ENTRIES_PER_PAGE)
        start = self.superblock.segments_at + number * self.superblock.segment_bytes
        try:
            page = self._page(start + PAGE * (1 + index), b"FBLOGSUM")
        except Damaged:
            return None
        segment, first, entries, sequence = struct.unpack_from("<IHHQ", page, 32)
        life = self.segments[number].sequence
        if (segment, first, sequence) != (number, slot - entry, life) or entry >= entries:
            return None
        chunk, flags = struct.unpack_from("<32s34xH", page, 48 + 72 * entry)
        return chunk if flags & 1 else None

    def layer(self, chunk: Chunk, layer: int) -> bytes:
        """The verified bytes of a layer."""
        start, length = chunk.shape.layers[layer]
        data = self._read(chunk.slot_at + start, length)
        key = seal(self.superblock.log, chunk.id, chunk.sequence, chunk.segment, chunk.slot, layer)
        require(len(data) == length and crc32c(data) ^ key == chunk.sums[layer], f"layer {layer} is damaged")
        return data

    def read(self, chunk: Chunk) -> bytes:
        """The verified bytes of all layers, one after another."""
        return b"".join(self.layer(chunk, layer) for layer in range(len(chunk.sums)))


def faults(log: Log, chunk: Chunk) -> list[str]:
    """What is wrong with a chunk's layers."""
    found = []
    for layer in range(len(chunk.sums)):
        try:
            log.layer(chunk, layer)
        except Damaged as fault:
            found.append(str(fault))
    return found


def main() -> int:
    """Lists or extracts chunks; 1 if something is damaged."""
    parser = argparse.ArgumentParser(description="Reads a log of Forebay's SSD tier.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--extract", metavar="ID", help="write this chunk's layers to standard output")
    options = parser.parse_args()
    try:
        with Log(options.file) as log:
            return extract(log, options.extract) if options.extract else listing(log)
    except (Refused, Damaged, OSError) as fault:
        print(f"{options.file}: {fault}", file=sys.stderr)
        return 1


def extract(log: Log, wanted: str) -> int:
    """Writes one chunk to standard output."""
    for chunk in log.chunks():
        if chunk.id.hex() == wanted:
            sys.stdout.buffer.write(log.read(chunk))
            return 0
    print(f"no chunk {wanted}", file=sys.stderr)
    return 1


def listing(log: Log) -> int:
    """Prints a line per chunk: id, tenant, parent, place, layers, bytes, faults."""
    damaged = 0
    for chunk in log.chunks():
        found = faults(log, chunk)
        damaged += bool(found)
        parent = chunk.parent.hex() if chunk.parent else "-"
        place = f"{chunk.segment}:{chunk.slot}:{chunk.sequence}"
        state = ", ".join(found) or "ok"
        print(chunk.id.hex(), chunk.tenant, parent, place, len(chunk.sums), chunk.bytes, state)
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
