//! The fields of a JSON object as positions in its bytes. It knows where values begin and end and
//! of what type they are; it builds nothing, recurses nowhere and reads each byte once.
//!
//! Of valid JSON it finds exactly the fields of the outermost object. Of other bytes it either says
//! where they stop being JSON or, for faults deep inside a value, passes them on: who really parses
//! the value will say so.

use memchr::{memchr, memchr2};
use std::borrow::Cow;
use std::ops::Range;

/// The type of a JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Null,
    /// `true` or `false`
    Boolean,
    Number,
    String,
    Array,
    Object,
}

/// A value: its type and the bytes it takes, without the space around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    pub kind: Kind,
    pub at: Range<usize>,
    /// An array or object in which [`is_media_key`] or [`may_be_data_url`] holds of a string.
    pub has_media: bool,
}

/// The bytes are no JSON object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} at byte {at}")]
pub struct SyntaxError {
    /// What should have been there.
    pub expected: &'static str,
    pub at: usize,
}

/// The fields of the object that `bytes` consists of, in order.
pub fn fields(bytes: &[u8]) -> Fields<'_> {
    Fields { bytes, at: 0, state: State::Before }
}

/// The value that begins at `at`, after space, or `None` if there is none.
pub fn value_at(bytes: &[u8], at: usize) -> Option<Value> {
    Fields { bytes, at, state: State::Inside }.value().ok()
}

/// Does a part of a chat message that is not text have this field? The text is without its quotes.
pub fn is_media_key(text: &[u8]) -> bool {
    match text.len() {
        // Anthropic's images and documents.
        6 => text == b"source",
        9 => matches!(text, b"image_url" | b"video_url" | b"audio_url"),
        11 => text == b"input_audio",
        12 => matches!(text, b"image_embeds" | b"audio_embeds"),
        _ => false,
    }
}

/// Is this the beginning of a `data:` URL that is long enough to matter? The text is without its
/// quotes.
pub fn may_be_data_url(text: &[u8]) -> bool {
    text.len() >= 256 && text.starts_with(b"data:")
}

/// Iterator of [`fields`]. An error is the last item.
#[derive(Debug)]
pub struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Before,
    Inside,
    Ended,
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(Cow<'a, str>, Value), SyntaxError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.field().transpose();
        if !matches!(next, Some(Ok(_))) {
            self.state = State::Ended;
        }
        next
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Result<Option<(Cow<'a, str>, Value)>, SyntaxError> {
        match self.state {
            State::Ended => return Ok(None),
            State::Before => {
                self.expect(b'{', "a JSON object")?;
                if self.peek() == Some(b'}') {
                    return self.end();
                }
                self.state = State::Inside;
            }
            State::Inside => {
                if self.peek() == Some(b'}') {
                    return self.end();
                }
                self.expect(b',', "a comma or the end of the object")?;
            }
        }
        if self.peek() != Some(b'"') {
            return self.fail("a field name");
        }
        let name = self.at;
        self.skip_string()?;
        let key = self.key(name..self.at)?;
        self.expect(b':', "a colon")?;
        let value = self.value()?;
        Ok(Some((key, value)))
    }

    /// After the closing brace only space may follow.
    fn end(&mut self) -> Result<Option<(Cow<'a, str>, Value)>, SyntaxError> {
        self.at += 1;
        match self.peek() {
            None => Ok(None),
            Some(_) => self.fail("the end of the text"),
        }
    }

    /// A field name without its quotes. Escapes in it are rare, and JSON allows them.
    fn key(&self, at: Range<usize>) -> Result<Cow<'a, str>, SyntaxError> {
        let start = at.start;
        let quoted = &self.bytes[at];
        let name = if memchr(b'\\', quoted).is_some() {
            serde_json::from_slice(quoted).ok().map(Cow::Owned)
        } else {
            std::str::from_utf8(&quoted[1..quoted.len() - 1]).ok().map(Cow::Borrowed)
        };
        name.ok_or(SyntaxError { expected: "a field name", at: start })
    }

    fn value(&mut self) -> Result<Value, SyntaxError> {
        let first = self.peek();
        let start = self.at;
        let mut has_media = false;
        let kind = match first {
            Some(b'"') => {
                self.skip_string()?;
                Kind::String
            }
            Some(b'{') => {
                has_media = self.skip_nested()?;
                Kind::Object
            }
            Some(b'[') => {
                has_media = self.skip_nested()?;
                Kind::Array
            }
            Some(_) => self.skip_scalar()?,
            None => return self.fail("a value"),
        };
        Ok(Value { kind, at: start..self.at, has_media })
    }

    /// Skips a string whose opening quote is the current byte.
    fn skip_string(&mut self) -> Result<(), SyntaxError> {
        self.at += 1;
        while let Some(next) = memchr2(b'"', b'\\', self.rest()) {
            let escape = self.rest()[next] == b'\\';
            self.at += next + 1 + usize::from(escape);
            if !escape {
                return Ok(());
            }
        }
        self.at = self.bytes.len();
        self.fail("the end of a string")
    }

    /// Skips an array or object whose opening bracket is the current byte, by counting brackets
    /// outside of strings. Returns [`Value::has_media`].
    fn skip_nested(&mut self) -> Result<bool, SyntaxError> {
        let mut depth = 0_usize;
        let mut has_media = false;
        while let Some(next) = position_of_structure(self.rest()) {
            self.at += next;
            match self.bytes[self.at] {
                b'"' => {
                    let start = self.at + 1;
                    self.skip_string()?;
                    let text = &self.bytes[start..self.at - 1];
                    has_media |= is_media_key(text) || may_be_data_url(text);
                    continue;
                }
                b'[' | b'{' => depth += 1,
                _ => depth -= 1,
            }
            self.at += 1;
            if depth == 0 {
                return Ok(has_media);
            }
        }
        self.at = self.bytes.len();
        self.fail("the end of an array or object")
    }

    fn skip_scalar(&mut self) -> Result<Kind, SyntaxError> {
        let rest = self.rest();
        let ends = |byte: &u8| matches!(byte, b',' | b'}' | b' ' | b'\t' | b'\n' | b'\r');
        let word = &rest[..rest.iter().position(ends).unwrap_or(rest.len())];
        let kind = match word {
            b"null" => Kind::Null,
            b"true" | b"false" => Kind::Boolean,
            _ if serde_json::from_slice::<serde_json::Number>(word).is_ok() => Kind::Number,
            _ => return self.fail("a value"),
        };
        self.at += word.len();
        Ok(kind)
    }

    /// The next byte that is not space.
    fn peek(&mut self) -> Option<u8> {
        let space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at += self.rest().iter().take_while(|byte| space(byte)).count();
        self.bytes.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), SyntaxError> {
        if self.peek() != Some(byte) {
            return self.fail(expected);
        }
        self.at += 1;
        Ok(())
    }

    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    fn fail<T>(&self, expected: &'static str) -> Result<T, SyntaxError> {
        Err(SyntaxError { expected, at: self.at })
    }
}

/// The position of the first quote or bracket.
fn position_of_structure(bytes: &[u8]) -> Option<usize> {
    // `[` and `{`, `]` and `}` differ in one bit only.
    let is_structure = |byte: u8| byte == b'"' || byte | 0x20 == b'{' || byte | 0x20 == b'}';
    // Lists of token ids are long stretches without either: whole pieces are tested without
    // branches (and so in vector registers), and only the piece that has one is searched.
    const PIECE: usize = 32;
    let mut pieces = bytes.chunks_exact(PIECE);
    let clean = |piece: &[u8]| !piece.iter().fold(false, |found, &byte| found | is_structure(byte));
    let skipped = pieces.by_ref().take_while(|piece| clean(piece)).count() * PIECE;
    bytes[skipped..].iter().position(|&byte| is_structure(byte)).map(|position| skipped + position)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value as Tree;

    fn all(bytes: &[u8]) -> Result<Vec<(String, Value)>, SyntaxError> {
        fields(bytes).map(|field| field.map(|(key, value)| (key.into_owned(), value))).collect()
    }

    pub fn any_json() -> impl Strategy<Value = Tree> {
        let leaf = prop_oneof![
            Just(Tree::Null),
            any::<bool>().prop_map(Tree::from),
            any::<i64>().prop_map(Tree::from),
            any::<i32>().prop_map(|number| Tree::from(f64::from(number) / 8.0)),
            ".*".prop_map(Tree::from),
        ];
        leaf.prop_recursive(3, 24, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Tree::from),
                prop::collection::btree_map(".*", inner, 0..5)
                    .prop_map(|map| Tree::Object(map.into_iter().collect())),
            ]
        })
    }

    fn kind_of(tree: &Tree) -> Kind {
        match tree {
            Tree::Null => Kind::Null,
            Tree::Bool(_) => Kind::Boolean,
            Tree::Number(_) => Kind::Number,
            Tree::String(_) => Kind::String,
            Tree::Array(_) => Kind::Array,
            Tree::Object(_) => Kind::Object,
        }
    }

    #[test]
    fn faults_are_named_with_their_place() {
        let table = [
            ("", "a JSON object", 0),
            ("  [1]", "a JSON object", 2),
            (r#"{"a":1"#, "a comma or the end of the object", 6),
            (r#"{"a":1,}"#, "a field name", 7),
            (r#"{"a" 1}"#, "a colon", 5),
            (r#"{"a":}"#, "a value", 5),
            (r#"{"a":tru}"#, "a value", 5),
            (r#"{"a":01}"#, "a value", 5),
            (r#"{"a":"x}"#, "the end of a string", 8),
            (r#"{"a":"x\"#, "the end of a string", 8),
            (r#"{"a":[1,{"b":2}"#, "the end of an array or object", 15),
            (r#"{} x"#, "the end of the text", 3),
        ];
        for (json, expected, at) in table {
            assert_eq!(all(json.as_bytes()), Err(SyntaxError { expected, at }), "{json}");
        }
    }

    #[test]
    fn deep_nesting_is_only_a_count() {
        let deep = format!(r#"{{"a":{}1{},"b":2}}"#, "[{\"x\":".repeat(300_000), "}]".repeat(300_000));
        let fields = all(deep.as_bytes()).unwrap();
        assert_eq!((fields.len(), &fields[1].0[..]), (2, "b"));
    }

    proptest! {
        #[test]
        fn fields_are_those_of_a_full_parse(
            object in prop::collection::btree_map(".*", any_json(), 0..8),
            pretty: bool,
        ) {
            let tree = Tree::Object(object.clone().into_iter().collect());
            let text = if pretty { serde_json::to_vec_pretty(&tree) } else { serde_json::to_vec(&tree) }.unwrap();
            let found = all(&text).unwrap();
            prop_assert_eq!(found.len(), object.len());
            for (key, value) in found {
                let wanted = &object[&key];
                prop_assert_eq!(value.kind, kind_of(wanted));
                let part: Tree = serde_json::from_slice(&text[value.at]).unwrap();
                prop_assert_eq!(&part, wanted);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_end(bytes: Vec<u8>) {
            let _ = all(&bytes);
            let _ = all(&[b"{\"a\":", &bytes[..]].concat());
        }

        #[test]
        fn broken_json_never_panics(
            object in prop::collection::btree_map(".{0,4}", any_json(), 0..5),
            cut in 0..400_usize,
            flip in (0..400_usize, any::<u8>()),
        ) {
            let mut text = serde_json::to_vec(&Tree::Object(object.into_iter().collect())).unwrap();
            text.truncate(cut);
            if let Some(byte) = text.get_mut(flip.0) {
                *byte = flip.1;
            }
            let _ = all(&text);
        }

        #[test]
        fn the_search_by_pieces_finds_the_first_quote_or_bracket(bytes in prop::collection::vec(0x20_u8..0x7f, 0..200)) {
            let slow = bytes.iter().position(|byte| b"\"[]{}".contains(byte));
            prop_assert_eq!(position_of_structure(&bytes), slow);
        }
    }
}
