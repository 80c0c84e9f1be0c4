//! Which trace a piece of work belongs to, as W3C's Trace Context writes it. Pure.

/// The span that a piece of work is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: [u8; 16],
    pub span: [u8; 8],
    /// Whether whoever began the trace records it.
    pub sampled: bool,
}

/// Length of a `traceparent` of version 00, and what those of later versions begin with.
const LEN: usize = 55;
const SAMPLED: u8 = 1;

impl TraceContext {
    /// Reads a `traceparent`; `None` if it must be ignored. Of a later version than 00 it takes
    /// what that version has.
    pub fn parse(text: &str) -> Option<TraceContext> {
        let (known, rest) = text.as_bytes().split_at_checked(LEN)?;
        let [version] = bytes(&known[..2])?;
        let is_long_enough = match version {
            0 => rest.is_empty(),
            0xFF => false,
            _ => rest.first().is_none_or(|next| *next == b'-'),
        };
        let is_split = [2, 35, 52].iter().all(|&at| known[at] == b'-');
        let (trace, span, [flags]) = (bytes(&known[3..35])?, bytes(&known[36..52])?, bytes(&known[53..])?);
        let is_named = trace != [0; 16] && span != [0; 8];
        let sampled = flags & SAMPLED != 0;
        (is_long_enough && is_split && is_named).then_some(TraceContext { trace, span, sampled })
    }

    /// It as a `traceparent`.
    pub fn traceparent(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("00-{}-{}-{:02x}", hex(&self.trace), hex(&self.span), u8::from(self.sampled))
    }
}

/// Bytes from two digits each, which must be lower case.
fn bytes<const COUNT: usize>(digits: &[u8]) -> Option<[u8; COUNT]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; COUNT];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks().0) {
        let [high, low] = *pair;
        *byte = digit(high)? << 4 | digit(low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_as_the_standard_says() {
        let read = TraceContext::parse(GOOD).unwrap();
        assert_eq!((read.trace[0], read.trace[15], read.span[0], read.sampled), (0x0A, 0x9C, 0xB7, true));
        assert_eq!(read.traceparent(), GOOD);
        let not_sampled = TraceContext::parse(&GOOD.replace("-01", "-00")).unwrap();
        assert!(!not_sampled.sampled && not_sampled.traceparent().ends_with("-00"));
        assert!(TraceContext::parse(&GOOD.replace("-01", "-09")).unwrap().sampled, "other flags are left");
        assert!(!TraceContext::parse(&GOOD.replace("-01", "-fe")).unwrap().sampled);
        // Of a version that comes after this one.
        for later in [GOOD.replacen("00", "cc", 1), GOOD.replacen("00", "cc", 1) + "-what.the-future-has"] {
            assert_eq!(TraceContext::parse(&later), Some(read), "{later}");
        }
    }

    #[test]
    fn what_the_standard_does_not_allow_is_ignored() {
        for bad in [
            "",
            "00",
            &GOOD[..54],
            &format!("{GOOD}-more"),
            &format!("{GOOD} "),
            &GOOD.replacen("00", "ff", 1),
            &(GOOD.replacen("00", "cc", 1) + "x"),
            &GOOD.to_uppercase(),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GOOD.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GOOD.replace("-b7", "_b7"),
            &GOOD.replace("b7ad", "b7ag"),
            &GOOD.replace("-01", "-é"),
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_ignored(text in "\\PC{0,80}", at in 0..55usize, with in any::<char>()) {
            let _ = TraceContext::parse(&text);
            let damaged: String = GOOD.chars().enumerate().map(|(i, c)| if i == at { with } else { c }).collect();
            let _ = TraceContext::parse(&damaged);
        }
    }
}
