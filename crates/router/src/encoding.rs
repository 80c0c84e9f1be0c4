//! Content codings of answers. The router asks engines for plain answers; what comes compressed all
//! the same is made plain as it passes, so that usage can be read in it and events are not held
//! back.

use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::{HeaderMap, HeaderValue, header};
use std::io::{self, Write};

/// What one piece of an answer may become. A piece has about 64 KiB; text becomes ten times as
/// long.
const MAX_DECODED_BYTES: usize = 16 * 1024 * 1024;

/// How a body is coded, by its `content-encoding`.
#[derive(Debug)]
pub enum Coding {
    Plain,
    /// In a way that is made plain here.
    Known(Box<Decoder>),
    /// In another way: the body passes unread.
    Unknown,
}

impl Coding {
    /// The coding that the headers of an answer name.
    pub fn of(headers: &HeaderMap) -> Coding {
        let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
        let (Some(coding), more) = (codings.next(), codings.next().is_some()) else { return Coding::Plain };
        match Decoder::named(coding) {
            _ if more => Coding::Unknown,
            Some(decoder) => Coding::Known(Box::new(decoder)),
            None if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity") => Coding::Plain,
            None => Coding::Unknown,
        }
    }
}

/// Makes a body plain, piece by piece: what can be made of the bytes so far comes out at once.
pub struct Decoder(Stream);

enum Stream {
    Gzip(MultiGzDecoder<Bounded>),
    Zlib(ZlibDecoder<Bounded>),
    Raw(DeflateDecoder<Bounded>),
    /// `deflate` means zlib's format, and some send the bare one: the first byte tells.
    Deflate,
    Zstd(Box<zstd::stream::write::Decoder<'static, Bounded>>),
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str(match self.0 {
            Stream::Gzip(_) => "gzip",
            Stream::Zlib(_) | Stream::Raw(_) | Stream::Deflate => "deflate",
            Stream::Zstd(_) => "zstd",
        })
    }
}

impl Decoder {
    fn named(coding: &HeaderValue) -> Option<Decoder> {
        let coding = coding.to_str().ok()?.trim().to_ascii_lowercase();
        let stream = match &coding[..] {
            "gzip" | "x-gzip" => Stream::Gzip(MultiGzDecoder::new(Bounded::default())),
            "deflate" => Stream::Deflate,
            "zstd" => Stream::Zstd(Box::new(zstd::stream::write::Decoder::new(Bounded::default()).ok()?)),
            _ => return None,
        };
        Some(Decoder(stream))
    }

    /// What the next bytes of the body say. An error: they are not coded as the headers say, or
    /// become more than a piece may.
    pub fn decode(&mut self, bytes: &[u8]) -> io::Result<Bytes> {
        let Some(first) = bytes.first() else { return Ok(Bytes::new()) };
        if let Stream::Deflate = self.0 {
            let is_zlib = first & 0x0f == 8;
            self.0 = match is_zlib {
                true => Stream::Zlib(ZlibDecoder::new(Bounded::default())),
                false => Stream::Raw(DeflateDecoder::new(Bounded::default())),
            };
        }
        match &mut self.0 {
            Stream::Gzip(decoder) => all(decoder, bytes, MultiGzDecoder::get_mut),
            Stream::Zlib(decoder) => all(decoder, bytes, ZlibDecoder::get_mut),
            Stream::Raw(decoder) => all(decoder, bytes, DeflateDecoder::get_mut),
            Stream::Zstd(decoder) => all(&mut **decoder, bytes, zstd::stream::write::Decoder::get_mut),
            Stream::Deflate => Ok(Bytes::new()),
        }
    }
}

/// Writes `bytes` to a decoder and takes what has come out behind it.
fn all<D: Write>(decoder: &mut D, bytes: &[u8], out: fn(&mut D) -> &mut Bounded) -> io::Result<Bytes> {
    decoder.write_all(bytes)?;
    decoder.flush()?;
    Ok(std::mem::take(&mut out(decoder).0).into())
}

/// Bytes up to a limit.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_DECODED_BYTES {
            let message = format!("a piece becomes more than {MAX_DECODED_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

    const PIECES: [&str; 3] = ["data: {\"a\":1}\n\n", "data: {\"a\":2}\n\n", "data: [DONE]\n\n"];

    fn coding(name: &'static str) -> Coding {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(name));
        Coding::of(&headers)
    }

    /// The pieces as an encoder writes them that flushes after each.
    fn encoded<E: Write>(mut encoder: E, out: fn(&mut E) -> &mut Vec<u8>) -> Vec<Vec<u8>> {
        let mut piece = |text: &str| {
            encoder.write_all(text.as_bytes()).unwrap();
            encoder.flush().unwrap();
            std::mem::take(out(&mut encoder))
        };
        PIECES.iter().map(|text| piece(text)).collect()
    }

    #[test]
    fn each_piece_of_a_compressed_stream_is_plain_as_soon_as_it_came() {
        let level = Compression::default();
        let zstd = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
        for (name, pieces) in [
            ("gzip", encoded(GzEncoder::new(Vec::new(), level), GzEncoder::get_mut)),
            ("deflate", encoded(ZlibEncoder::new(Vec::new(), level), ZlibEncoder::get_mut)),
            ("deflate", encoded(DeflateEncoder::new(Vec::new(), level), DeflateEncoder::get_mut)),
            ("ZSTD", encoded(zstd, zstd::stream::write::Encoder::get_mut)),
        ] {
            let Coding::Known(mut decoder) = coding(name) else { panic!("{name}") };
            for (piece, text) in pieces.iter().zip(PIECES) {
                assert_eq!(decoder.decode(piece).unwrap(), text, "{name}");
            }
        }
    }

    #[test]
    fn what_is_not_coded_as_it_says_is_an_error_and_other_codings_are_left_alone() {
        for name in ["gzip", "zstd"] {
            let Coding::Known(mut decoder) = coding(name) else { panic!("{name}") };
            assert!(decoder.decode(b"data: plain text, whatever the headers say\n\n").is_err(), "{name}");
        }
        assert!(matches!(coding("identity"), Coding::Plain));
        assert!(matches!(Coding::of(&HeaderMap::new()), Coding::Plain));
        for name in ["br", "gzip, zstd", "compress"] {
            assert!(matches!(coding(name), Coding::Unknown), "{name}");
        }
    }

    #[test]
    fn a_piece_that_would_become_huge_is_an_error() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&vec![0; MAX_DECODED_BYTES + 1]).unwrap();
        let bomb = encoder.finish().unwrap();
        let Coding::Known(mut decoder) = coding("gzip") else { panic!() };
        assert!(decoder.decode(&bomb).is_err());
    }
}
