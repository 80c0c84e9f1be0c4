//! Little-endian numbers and bytes behind their length, read from somebody who may be lying.

/// Takes fields off the front of bytes that may be too short for them.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length of two bytes, then as many bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.take(len.into())
    }

    /// A text as [`bytes`](Reader::bytes). What is not UTF-8 is shown as such: texts are for
    /// people.
    pub fn text(&mut self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

pub(crate) fn parse_text(body: &[u8]) -> Option<String> {
    let mut reader = Reader(body);
    let text = reader.text()?;
    reader.0.is_empty().then_some(text)
}

/// Appends a length of two bytes, then as many of `bytes` as `bytes_max` allows.
pub(crate) fn put_bytes(bytes: &[u8], bytes_max: u16, out: &mut Vec<u8>) {
    let len = bytes.len().min(bytes_max.into());
    out.extend((len as u16).to_le_bytes());
    out.extend(&bytes[..len]);
}
