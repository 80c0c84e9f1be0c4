//! Addresses of HTTP services that the node asks: `http://host:port` and nothing else. This file must never know which
//! services there are.

use http::Uri;
use http::uri::{Parts, PathAndQuery, Scheme};

/// What may be written.
pub(crate) const ALLOWED: &str = "http://host:port, without a user (https is not spoken)";

/// Reads an address; a slash at its end is allowed.
pub(crate) fn parse(text: &str) -> Option<Uri> {
    let parts = text.parse::<Uri>().ok()?.into_parts();
    let is_bare = parts.path_and_query.as_ref().is_none_or(|path| path == "/");
    (parts.scheme == Some(Scheme::HTTP) && is_bare).then_some(())?;
    let authority = parts.authority.as_ref().filter(|authority| !authority.as_str().contains('@'))?;
    authority.port()?;
    Uri::from_parts(parts).ok()
}

/// An address without a user and password, for messages.
pub(crate) fn without_user(text: &str) -> String {
    match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://(user)@{host}"),
        _ => text.to_owned(),
    }
}

/// The address of something that the service has.
pub(crate) fn with_path(endpoint: &Uri, path: &'static str) -> Uri {
    let mut parts = Parts::from(endpoint.clone());
    parts.path_and_query = Some(PathAndQuery::from_static(path));
    // A path in place of another leaves an address an address.
    Uri::from_parts(parts).unwrap_or_else(|_| endpoint.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_plain_http_with_host_and_port() {
        for good in ["http://127.0.0.1:2379", "http://127.0.0.1:2379/", "http://[::1]:2379"] {
            let endpoint = parse(good).unwrap();
            let whole = format!("{}/v3/watch", good.trim_end_matches('/'));
            assert_eq!(with_path(&endpoint, "/v3/watch").to_string(), whole);
        }
        for bad in [
            "127.0.0.1:2379",
            "https://a:1",
            "http://a",
            "http://a:1/path",
            "http://",
            "",
            "http://a b",
            "http://u:p@a:1",
        ] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
