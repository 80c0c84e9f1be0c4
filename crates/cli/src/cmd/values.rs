//! Values of options: sizes in bytes, and times in seconds.

use forebay_kv::ChunkId;
use std::time::Duration;

/// A size above 0, as sizes are written everywhere.
pub fn size<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let bytes = forebay_transfer::size::parse(text)?;
    let some = T::try_from(bytes).ok().filter(|_| bytes > 0);
    some.ok_or_else(|| {
        format!("'{text}' is not allowed; allowed is {}, above 0", forebay_transfer::size::ALLOWED)
    })
}

/// A time above 0.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let duration = seconds_or_none(text).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| format!("'{text}' is not allowed: a number of seconds above 0"))
}

/// A time, or none.
pub fn seconds_or_none(text: &str) -> Result<Duration, String> {
    let duration = text.parse().ok().and_then(|number| Duration::try_from_secs_f64(number).ok());
    duration.ok_or_else(|| format!("'{text}' is not allowed: a number of seconds, 0 or more"))
}

/// A chunk's id, from hexadecimal.
pub fn chunk_id(text: &str) -> Result<ChunkId, String> {
    let allowed = format!("{text:?} is no chunk id; allowed are 64 hexadecimal digits");
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(allowed);
    }
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap_or_default();
    Ok(ChunkId::from_bytes(std::array::from_fn(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_powers_of_1024_or_refused_with_their_text() {
        assert_eq!((size("4MiB"), size("200000")), (Ok(4_u64 << 20), Ok(200_000_usize)));
        assert_eq!((size("256M"), size("1.5GiB")), (Ok(256_u64 << 20), Ok(3_usize << 29)));
        assert_eq!((size("100G"), size("64K"), size("7B")), (Ok(100_u64 << 30), Ok(64_u64 << 10), Ok(7_u64)));
        for bad in ["100GB", "12Q", "iB", "G", "", "-1", "0", "0.3", "1e30", "nan", "inf", "x"] {
            let refused = size::<u64>(bad).unwrap_err();
            assert!(refused.contains(&format!("'{bad}'")) && refused.contains("powers of 1024"), "{refused}");
        }
    }

    #[test]
    fn seconds_are_read_or_refused_with_their_text() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e300", "x", ""] {
            assert!(seconds(bad).unwrap_err().contains("not allowed"), "{bad}");
            assert_eq!(seconds_or_none(bad).is_ok(), bad == "0", "{bad}");
        }
    }

    #[test]
    fn a_chunk_id_is_64_hexadecimal_digits() {
        let text = format!("0a{}ff", "00".repeat(30));
        let bytes = *chunk_id(&text).unwrap().as_bytes();
        assert_eq!((bytes[0], bytes[1], bytes[31]), (10, 0, 255));
        for wrong in ["", "0a", &text[1..], &text.replace('a', "é")] {
            assert!(chunk_id(wrong).unwrap_err().contains("64 hexadecimal digits"), "{wrong}");
        }
    }
}
