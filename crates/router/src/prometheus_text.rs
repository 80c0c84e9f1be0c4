//! Lines of a page for Prometheus, as names, labels and values. The page comes from another process
//! and may hold anything: what is not there is empty or absent.

/// A line that is no comment.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    pub name: &'a [u8],
    /// Labels and value, as they are written.
    rest: &'a [u8],
}

/// All samples of a page.
pub fn samples(page: &[u8]) -> impl Iterator<Item = Sample<'_>> {
    let lines = page.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    lines.filter(|line| !line.is_empty() && !line.starts_with(b"#")).map(Sample::of)
}

impl<'a> Sample<'a> {
    /// A line, whatever it is.
    pub fn of(line: &'a [u8]) -> Sample<'a> {
        let end = line.iter().position(|byte| b"{ \t".contains(byte)).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        Sample { name, rest }
    }

    /// The value behind the labels; a time may follow it.
    pub fn value(&self) -> &'a [u8] {
        let after = match self.rest.first() {
            Some(b'{') => Labels(&self.rest[1..]).end(),
            _ => self.rest,
        };
        let mut words = after.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        words.next().unwrap_or_default()
    }

    /// The value as a number.
    pub fn number(&self) -> Option<f64> {
        std::str::from_utf8(self.value()).ok()?.parse().ok()
    }

    pub fn label(&self, name: &[u8]) -> Option<&'a [u8]> {
        self.labels().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Names and values of the labels.
    pub fn labels(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        Labels(self.rest.strip_prefix(b"{").unwrap_or_default())
    }
}

/// The labels of a sample, from behind the opening brace. Values are as they are written, with
/// their escapes.
struct Labels<'a>(&'a [u8]);

impl<'a> Iterator for Labels<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.0.trim_ascii_start();
        let text = text.strip_prefix(b",").unwrap_or(text).trim_ascii_start();
        let equals = text.iter().position(|&byte| byte == b'=').filter(|_| !text.starts_with(b"}"));
        let Some(equals) = equals else {
            self.0 = text;
            return None;
        };
        let name = text[..equals].trim_ascii_end();
        let quoted = text[equals + 1..].trim_ascii_start().strip_prefix(b"\"")?;
        let mut escaped = false;
        let close = quoted.iter().position(|&byte| {
            let closes = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            closes
        })?;
        self.0 = &quoted[close + 1..];
        Some((name, &quoted[..close]))
    }
}

impl<'a> Labels<'a> {
    /// What follows the closing brace; nothing where there is none.
    fn end(mut self) -> &'a [u8] {
        self.by_ref().for_each(drop);
        self.0.strip_prefix(b"}").unwrap_or_default()
    }
}
