//! Images, sounds and films in chat messages. It knows where they stand in the JSON and puts short
//! stand-ins in their place.
//!
//! They come as `data:` URLs of megabytes or as addresses of a few bytes, and neither says anything
//! about tokens. For the prefix index each counts as a fixed number of bytes that identify it.

use crate::json::{self, Kind, is_media_key, may_be_data_url};
use crate::tokens::MEDIA_BYTES;
use memchr::{memchr, memchr2, memmem};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Where media stand in the JSON value of `messages`.
pub fn find(messages: &[u8]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(string) = next_string(messages, at) {
        at = string.end;
        let text = &messages[string.start + 1..string.end - 1];
        if is_media_key(text) {
            if let Some(value) =
                field_value(messages, at).filter(|value| text != b"source" || messages[value.start] == b'{')
            {
                at = value.end;
                found.push(value);
            }
        } else if may_be_data_url(text) && memmem::find(&text[..256], b";base64,").is_some() {
            found.push(string);
        }
    }
    found
}

/// The messages with [`MEDIA_BYTES`] bytes in place of each of the media.
pub fn with_stand_ins(messages: &[u8], media: &[Range<usize>]) -> Vec<u8> {
    let mut text = Vec::with_capacity(media.len() * MEDIA_BYTES);
    let mut at = 0;
    for place in media {
        text.extend_from_slice(&messages[at..place.start]);
        let identity = xxh3_64(&messages[place.clone()]).to_le_bytes();
        text.extend_from_slice(&identity.repeat(MEDIA_BYTES / identity.len()));
        at = place.end;
    }
    text.extend_from_slice(&messages[at..]);
    text
}

/// The next string, with its quotes.
fn next_string(json: &[u8], at: usize) -> Option<Range<usize>> {
    let start = at + memchr(b'"', json.get(at..)?)?;
    let mut end = start + 1;
    loop {
        end += memchr2(b'"', b'\\', json.get(end..)?)?;
        if json[end] == b'"' {
            return Some(start..end + 1);
        }
        end += 2;
    }
}

/// The value of the field whose name ends at `at`. `None` if that was no field name, or the value
/// is null.
fn field_value(json: &[u8], at: usize) -> Option<Range<usize>> {
    let rest = json[at..].trim_ascii_start();
    let value = rest.strip_prefix(b":").and_then(|value| json::value_at(json, json.len() - value.len()))?;
    (value.kind != Kind::Null).then_some(value.at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn data_url() -> String {
        format!("data:image/png;base64,{}", "iVBORw0KGgo".repeat(40))
    }

    fn found(json: &str) -> Vec<&str> {
        find(json.as_bytes()).into_iter().map(|at| &json[at]).collect()
    }

    #[test]
    fn media_of_all_forms_are_found_once_each_and_text_is_not() {
        let url = data_url();
        let object = format!(r#"{{"url": "{url}", "detail":"low"}}"#);
        let sound = r#"{"data":"UklGRg==","format":"wav"}"#;
        let table = [
            (r#"[{"role":"user","content":"image_url"}]"#.to_owned(), vec![]),
            (r#"[{"content":[{"type":"text","text":"data: {} \"image_url\": 7"}]}]"#.into(), vec![]),
            (r#"[{"type":"image_url","image_url":null,"uuid":"a"}]"#.into(), vec![]),
            (format!(r#"[{{"type":"image_url","image_url" : {object}}},1]"#), vec![&object[..]]),
            (r#"[{"image_url":{"url":"http://h/a.png"}}]"#.into(), vec![r#"{"url":"http://h/a.png"}"#]),
            (format!(r#"[{{"type":"input_audio","input_audio":{sound}}}]"#), vec![sound]),
            (r#"[{"type":"image","source":{"data":"iVBO"}}]"#.into(), vec![r#"{"data":"iVBO"}"#]),
            (r#"[{"source":"a book"}]"#.into(), vec![]),
            (format!(r#"[{{"file":{{"file_data":"{url}"}}}}]"#), vec![&url[..]]),
            (format!(r#"[{{"content":"data: {}"}}]"#, "event ".repeat(80)), vec![]),
        ];
        for (json, wanted) in &table {
            let found: Vec<&str> = found(json).into_iter().map(|text| text.trim_matches('"')).collect();
            assert_eq!(&found, wanted, "{json}");
            let body = format!(r#"{{"messages":{json}}}"#);
            let value = json::fields(body.as_bytes()).next().unwrap().unwrap().1;
            assert!(value.has_media || wanted.is_empty(), "the first pass must see it: {json}");
        }
    }

    #[test]
    fn a_stand_in_has_a_fixed_length_and_identifies_what_it_stands_for() {
        let message = |image: &str| format!(r#"[{{"image_url":"{image}"}},"and text"]"#).into_bytes();
        let stand_in = |image: &str| {
            let json = message(image);
            with_stand_ins(&json, &find(&json))
        };
        let (small, large) = (stand_in("a"), stand_in(&data_url()));
        assert_eq!((small.len(), large.len()), (message("").len() - 2 + MEDIA_BYTES, small.len()));
        assert_eq!(small, stand_in("a"));
        assert_ne!(small, stand_in("b"));
        assert!(small.ends_with(br#"},"and text"]"#));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            words in prop::collection::vec(
                prop::sample::select(vec!["\"", "\\", "image_url", ":", "{", "}", "x", " "]), 0..30),
        ) {
            let json = words.concat();
            let media = find(json.as_bytes());
            prop_assert!(media.windows(2).all(|pair| pair[0].end <= pair[1].start));
            with_stand_ins(json.as_bytes(), &media);
        }
    }
}
