//! Addresses of HTTP services that the node asks: `http://host:port` and nothing else. This file must never know which
//! services there are.

use http::Uri;
use http::uri::{Parts, PathAndQuery, Scheme};

/// Reads an address; a slash at its end is allowed.
pub(crate) fn parse(text: &str) -> Option<Uri> {
    let parts = text.parse::<Uri>().ok()?.into_parts();
    let is_bare = parts.path_and_query.as_ref().is_none_or(|path| path == "/");
    (parts.scheme == Some(Scheme::HTTP) && is_bare).then_some(())?;
    parts.authority.as_ref()?.port()?;
    Uri::from_parts(parts).ok()
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
        for bad in
            ["127.0.0.1:2379", "https://a:1", "http://a", "http://a:1/path", "http://", "", "http://a b"]
        {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
