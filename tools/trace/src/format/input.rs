//! Opens what a trace is read from: a file, or standard input, compressed or not. Its first bytes
//! are kept, so that a format can be told from them although a pipe gives them only once.

use super::error::TraceError;
use super::unsupported;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

/// How much is looked at to tell a format.
pub(super) const DETECT_BYTES: usize = 64 << 10;
/// How much is looked at where only the kind of file matters.
pub(super) const KIND_BYTES: usize = 512;

pub(super) type Bytes = Box<dyn BufRead + Send>;

/// Bytes of a trace whose beginning has been looked at.
pub(super) struct Input {
    /// The beginning, or all of it where it is shorter than what was asked for.
    pub beginning: Vec<u8>,
    rest: Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    Gzip,
    Zstandard,
}

impl Input {
    /// Opens a file, or standard input where the path is `-`.
    pub(super) fn open(path: &Path) -> Result<Input, TraceError> {
        if path == Path::new("-") {
            return Input::new(path, Box::new(BufReader::new(io::stdin())), DETECT_BYTES);
        }
        let file = File::open(path).map_err(|source| TraceError::Io { file: path.into(), source })?;
        Input::new(path, Box::new(BufReader::new(file)), DETECT_BYTES)
    }

    /// Looks at the first bytes of `raw`, which errors call `name`, and unpacks it where they say
    /// that it is compressed.
    pub(super) fn new(name: &Path, raw: Bytes, beginning_bytes: usize) -> Result<Input, TraceError> {
        let failed = |source| TraceError::Io { file: name.into(), source };
        let input = Input::looked_at(raw, beginning_bytes).map_err(failed)?;
        let input = match Compression::of(&input.beginning) {
            None => input,
            Some(compression) => {
                let unpacked = compression.unpack(input.into_bytes()).map_err(failed)?;
                let input = Input::looked_at(unpacked, beginning_bytes).map_err(failed)?;
                if Compression::of(&input.beginning).is_some() {
                    return Err(unsupported::COMPRESSED_TWICE.error(name));
                }
                input
            }
        };
        unsupported::of_bytes(&input.beginning).map_or(Ok(input), |unsupported| Err(unsupported.error(name)))
    }

    /// All bytes, from the first one on.
    pub(super) fn into_bytes(self) -> Bytes {
        Box::new(Cursor::new(self.beginning).chain(self.rest))
    }

    fn looked_at(mut rest: Bytes, beginning_bytes: usize) -> io::Result<Input> {
        let mut beginning = Vec::new();
        rest.by_ref().take(beginning_bytes as u64).read_to_end(&mut beginning)?;
        Ok(Input { beginning, rest })
    }
}

impl Compression {
    fn of(beginning: &[u8]) -> Option<Compression> {
        match beginning {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            // A frame, or a frame to be skipped, which parallel compressors write first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                Some(Compression::Zstandard)
            }
            _ => None,
        }
    }

    fn unpack(self, packed: Bytes) -> io::Result<Bytes> {
        Ok(match self {
            Compression::Gzip => Box::new(BufReader::new(MultiGzDecoder::new(packed))),
            Compression::Zstandard => {
                Box::new(BufReader::new(zstd::stream::read::Decoder::with_buffer(packed)?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{BufReader, DETECT_BYTES, Input, Path, Read};
    use flate2::{Compression, write::GzEncoder};
    use std::io::{self, Write};

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zstandard(text: &[u8]) -> Vec<u8> {
        zstd::encode_all(text, 1).unwrap()
    }

    /// Gives three bytes at a time, as a slow pipe does.
    struct Trickle(io::Cursor<Vec<u8>>);

    impl Read for Trickle {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let most = into.len().min(3);
            self.0.read(&mut into[..most])
        }
    }

    fn read(raw: &[u8]) -> Result<Vec<u8>, String> {
        let raw = Box::new(BufReader::new(Trickle(io::Cursor::new(raw.to_vec()))));
        let input = Input::new(Path::new("t"), raw, DETECT_BYTES).map_err(|error| error.to_string())?;
        let mut all = Vec::new();
        input.into_bytes().read_to_end(&mut all).map_err(|error| error.to_string())?;
        Ok(all)
    }

    #[test]
    fn nothing_is_lost_whether_packed_or_not() {
        for length in [0, 1, 3, DETECT_BYTES - 1, DETECT_BYTES, 3 * DETECT_BYTES + 7] {
            let text: Vec<u8> = (0..length).map(|index| b'a' + (index / 100 % 23) as u8).collect();
            assert_eq!(read(&text).unwrap(), text, "{length}");
            assert_eq!(read(&gzip(&text)).unwrap(), text, "{length}");
            assert_eq!(read(&zstandard(&text)).unwrap(), text, "{length}");
        }
    }

    #[test]
    fn several_members_and_frames_are_read_to_the_last() {
        assert_eq!(read(&[gzip(b"one"), gzip(b""), gzip(b"two")].concat()).unwrap(), b"onetwo");
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9].to_vec();
        assert_eq!(read(&[skipped, zstandard(b"one"), zstandard(b"two")].concat()).unwrap(), b"onetwo");
    }

    #[test]
    fn what_was_cut_off_or_damaged_is_an_error_and_not_the_end() {
        let text: Vec<u8> = (0..200_000u32).flat_map(|number| mixed(number).to_le_bytes()).collect();
        for packed in [gzip(&text), zstandard(&text)] {
            assert_eq!(read(&packed).unwrap(), text);
            assert!(read(&packed[..packed.len() - 1]).is_err());
            assert!(read(&packed[..packed.len() / 2]).is_err());
        }
        let mut damaged = gzip(&text);
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0x40;
        assert!(read(&damaged).is_err());
    }

    fn mixed(number: u32) -> u32 {
        number.wrapping_mul(2_654_435_761).rotate_left(13) ^ number
    }

    #[test]
    fn what_is_compressed_twice_is_named() {
        let error = read(&gzip(&zstandard(b"text"))).unwrap_err();
        assert!(error.contains("compressed twice"), "{error}");
    }
}
