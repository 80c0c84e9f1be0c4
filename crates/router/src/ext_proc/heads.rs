//! Heads of requests and answers, as Envoy says them: names in lower case, and with a colon what is
//! no header.

use super::api::{HeaderMap as Said, HeaderValue as SaidValue};
use bytes::Bytes;
use http::request::Parts as Head;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri};

/// A head that no request, or no answer, may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is '{value}', which is not allowed")]
pub struct BadHead {
    pub name: &'static str,
    pub value: String,
}

impl BadHead {
    fn new(name: &'static str, value: &[u8]) -> BadHead {
        BadHead { name, value: String::from_utf8_lossy(value).into_owned() }
    }
}

/// The head of a request.
pub fn of_request(said: Said) -> Result<Head, BadHead> {
    let mut head = Request::new(()).into_parts().0;
    for SaidValue { key, value, raw_value } in said.headers {
        let value = bytes_of(value, raw_value);
        match &key[..] {
            ":method" => {
                let method = Method::from_bytes(&value);
                head.method = method.map_err(|_| BadHead::new(":method", &value))?;
            }
            ":path" => {
                let uri = Uri::from_maybe_shared(value.clone());
                head.uri = uri.map_err(|_| BadHead::new(":path", &value))?;
            }
            _ => append(&mut head.headers, &key, value),
        }
    }
    Ok(head)
}

/// The head of an answer.
pub fn of_answer(said: Said) -> Result<(StatusCode, HeaderMap), BadHead> {
    let mut status = None;
    let mut headers = HeaderMap::new();
    for SaidValue { key, value, raw_value } in said.headers {
        let value = bytes_of(value, raw_value);
        if key == ":status" {
            status = Some(StatusCode::from_bytes(&value).map_err(|_| BadHead::new(":status", &value))?);
        } else {
            append(&mut headers, &key, value);
        }
    }
    let status = status.ok_or_else(|| BadHead::new(":status", b""))?;
    Ok((status, headers))
}

fn bytes_of(value: String, raw_value: Bytes) -> Bytes {
    if raw_value.is_empty() { value.into() } else { raw_value }
}

/// What is no header of HTTP is not looked at; Envoy passes it on.
fn append(headers: &mut HeaderMap, key: &str, value: Bytes) {
    let name = HeaderName::from_bytes(key.as_bytes());
    let value = HeaderValue::from_maybe_shared(value);
    if let (Ok(name), Ok(value)) = (name, value) {
        headers.append(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(headers: &[(&str, &[u8])]) -> Said {
        let value = |&(key, value): &(&str, &[u8])| SaidValue {
            key: key.to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value),
        };
        Said { headers: headers.iter().map(value).collect() }
    }

    #[test]
    fn a_head_is_read_and_what_no_head_may_have_is_named() {
        let head = of_request(said(&[
            (":method", b"POST"),
            (":path", b"/v1/completions?a=b"),
            (":authority", b"h"),
            ("x-session-id", b"s"),
            ("bad name", b"x"),
            ("cookie", b"a"),
            ("cookie", b"b"),
        ]));
        let head = head.unwrap();
        assert_eq!(
            (head.method, head.uri.path(), head.uri.query()),
            (Method::POST, "/v1/completions", Some("a=b"))
        );
        assert_eq!((head.headers.len(), head.headers.get_all("cookie").iter().count()), (3, 2));
        let bad = of_request(said(&[(":path", b"no path at all")])).unwrap_err();
        assert_eq!(bad.to_string(), ":path is 'no path at all', which is not allowed");
        let in_text = SaidValue { key: ":status".into(), value: "429".into(), raw_value: Bytes::new() };
        assert_eq!(of_answer(Said { headers: vec![in_text] }).unwrap().0, 429);
        assert_eq!(of_answer(said(&[])).unwrap_err().name, ":status");
    }
}
