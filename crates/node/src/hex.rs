//! Ids as hexadecimal digits. This file knows the spelling; it must never know whose ids they are.

/// Lower-case hexadecimal digits.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

/// `N` bytes from `2 N` hexadecimal digits, as [`to_hex`] writes them.
pub(crate) fn from_hex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        for &digit in pair {
            let value = match digit {
                b'0'..=b'9' => digit - b'0',
                b'a'..=b'f' => digit - b'a' + 10,
                _ => return None,
            };
            *byte = *byte << 4 | value;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_stand_for_the_bytes_they_were_made_of(bytes: [u8; 16]) {
            prop_assert_eq!(from_hex::<16>(&to_hex(&bytes)), Some(bytes));
        }

        #[test]
        fn any_text_stands_for_bytes_or_none(text: String) {
            let _ = from_hex::<4>(&text);
        }
    }
}
