//! Numbers and lists as bytes: little-endian, each list behind its length. They are read from
//! somebody who may be lying.

use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, MAX_LAYERS};
use forebay_transfer::Class;
use thiserror::Error;

/// Why bytes are not what was expected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadBytes {
    #[error("{what} needs {needed} bytes, {left} are left")]
    Short { what: &'static str, needed: usize, left: usize },
    #[error("{left} bytes are left behind the end")]
    Long { left: usize },
    #[error("{what} is {value}; allowed is {allowed}")]
    Value { what: &'static str, value: u64, allowed: &'static str },
}

/// Reads from the front of a slice.
#[derive(Debug, Clone)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `len` bytes.
    pub fn bytes(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], BadBytes> {
        let short = BadBytes::Short { what, needed: len, left: self.0.len() };
        let (front, rest) = self.0.split_at_checked(len).ok_or(short)?;
        self.0 = rest;
        Ok(front)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], BadBytes> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(what, N)?);
        Ok(array)
    }
    pub fn u8(&mut self, what: &'static str) -> Result<u8, BadBytes> {
        self.array::<1>(what).map(|[byte]| byte)
    }
    pub fn u16(&mut self, what: &'static str) -> Result<u16, BadBytes> {
        self.array(what).map(u16::from_le_bytes)
    }
    pub fn u32(&mut self, what: &'static str) -> Result<u32, BadBytes> {
        self.array(what).map(u32::from_le_bytes)
    }
    pub fn u64(&mut self, what: &'static str) -> Result<u64, BadBytes> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A byte that says yes or no.
    pub fn bool(&mut self, what: &'static str) -> Result<bool, BadBytes> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(BadBytes::Value { what, value: value.into(), allowed: "0 or 1" }),
        }
    }

    /// The length of a list whose entries take at least `entry_bytes` each: no more than what is
    /// left can hold, so that no memory is reserved for a lie.
    pub fn count(&mut self, what: &'static str, entry_bytes: usize) -> Result<usize, BadBytes> {
        let count = self.u32(what)? as usize;
        let needed = count.saturating_mul(entry_bytes);
        let left = self.0.len();
        if needed > left { Err(BadBytes::Short { what, needed, left }) } else { Ok(count) }
    }

    /// A list of entries, each read by `entry`.
    pub fn list<T>(
        &mut self,
        what: &'static str,
        entry_bytes: usize,
        mut entry: impl FnMut(&mut Reader<'a>) -> Result<T, BadBytes>,
    ) -> Result<Vec<T>, BadBytes> {
        let count = self.count(what, entry_bytes)?;
        (0..count).map(|_| entry(self)).collect()
    }

    /// Text; what is not UTF-8 in it is replaced.
    pub fn text(&mut self, what: &'static str) -> Result<String, BadBytes> {
        let len = self.count(what, 1)?;
        self.bytes(what, len).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub fn id(&mut self) -> Result<ChunkId, BadBytes> {
        self.array("a chunk id").map(ChunkId::from_bytes)
    }

    pub fn ids(&mut self) -> Result<Vec<ChunkId>, BadBytes> {
        self.list("chunk ids", 32, Reader::id)
    }

    /// The lengths of a chunk's layers, as runs of layers of the same length.
    pub fn shape(&mut self) -> Result<ChunkShape, BadBytes> {
        let runs = self.list("runs of layers", 12, |reader| {
            Ok((reader.u32("layers of a run")?, reader.u64("bytes of a layer")?))
        })?;
        let layers = runs.iter().fold(0u64, |sum, (layers, _)| sum.saturating_add((*layers).into()));
        let bad = BadBytes::Value {
            what: "the layers of a chunk",
            value: layers,
            allowed: "1 to 4096, none empty",
        };
        if layers > MAX_LAYERS as u64 {
            return Err(bad);
        }
        let lengths = runs.iter().flat_map(|(layers, bytes)| std::iter::repeat_n(*bytes, *layers as usize));
        ChunkShape::new(lengths).map_err(|_| bad)
    }

    /// The CRC-32C of each layer.
    pub fn sums(&mut self) -> Result<Vec<u32>, BadBytes> {
        self.list("checksums", 4, |reader| reader.u32("a checksum"))
    }

    /// How urgent something is.
    pub fn class(&mut self) -> Result<Class, BadBytes> {
        let rank = self.u8("a class")?;
        let bad = BadBytes::Value { what: "a class", value: rank.into(), allowed: "0 to 3" };
        Class::ALL.get(usize::from(rank)).copied().ok_or(bad)
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<(), BadBytes> {
        if self.0.is_empty() { Ok(()) } else { Err(BadBytes::Long { left: self.0.len() }) }
    }
}

/// Writes behind what was written.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn bytes(mut self, bytes: &[u8]) -> Writer {
        self.0.extend_from_slice(bytes);
        self
    }
    pub fn u8(self, value: u8) -> Writer {
        self.bytes(&[value])
    }
    pub fn u16(self, value: u16) -> Writer {
        self.bytes(&value.to_le_bytes())
    }
    pub fn u32(self, value: u32) -> Writer {
        self.bytes(&value.to_le_bytes())
    }
    pub fn u64(self, value: u64) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    /// A list, each entry written by `entry`.
    pub fn list<T>(self, entries: &[T], entry: impl Fn(Writer, &T) -> Writer) -> Writer {
        let start = self.u32(u32::try_from(entries.len()).unwrap_or(u32::MAX));
        entries.iter().fold(start, entry)
    }
    pub fn text(self, text: &str) -> Writer {
        self.u32(u32::try_from(text.len()).unwrap_or(u32::MAX)).bytes(text.as_bytes())
    }

    pub fn ids(self, ids: &[ChunkId]) -> Writer {
        self.list(ids, |writer, id| writer.bytes(id.as_bytes()))
    }

    /// The CRC-32C of each layer.
    pub fn sums(self, sums: &[u32]) -> Writer {
        self.list(sums, |writer, sum| writer.u32(*sum))
    }

    /// How urgent something is.
    pub fn class(self, class: Class) -> Writer {
        self.u8(Class::ALL.iter().position(|one| *one == class).unwrap_or_default() as u8)
    }

    /// The lengths of a chunk's layers.
    pub fn shape(self, shape: &ChunkShape) -> Writer {
        let mut runs: Vec<(u32, u64)> = Vec::new();
        for extent in (0..shape.layers()).filter_map(|layer| shape.layer(layer)) {
            let bytes = extent.end - extent.start;
            match runs.last_mut() {
                Some((layers, same)) if *same == bytes => *layers += 1,
                _ => runs.push((1, bytes)),
            }
        }
        self.list(&runs, |writer, (layers, bytes)| writer.u32(*layers).u64(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_come_back_and_hostile_ones_reserve_nothing() {
        let shape = ChunkShape::new([5, 5, 5, 9, 5]).unwrap();
        let Writer(bytes) = Writer::default().shape(&shape);
        assert_eq!(Reader(&bytes).shape(), Ok(shape));
        for (layers, bytes) in [(0, 1), (1, 0), (4097, 1), (u32::MAX, u64::MAX)] {
            let Writer(hostile) = Writer::default().u32(2).u32(layers).u64(bytes).u32(layers).u64(bytes);
            assert!(matches!(Reader(&hostile).shape(), Err(BadBytes::Value { .. })), "{layers} of {bytes}");
        }
        let Writer(lie) = Writer::default().u32(u32::MAX);
        assert!(matches!(Reader(&lie).ids(), Err(BadBytes::Short { .. })));
    }
}
