//! HTTP services that are asked: their addresses, `http://host:port` and nothing else, and the
//! one client that posts JSON to them.

use bytes::Bytes;
use http::uri::{Parts, PathAndQuery, Scheme};
use http::{Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::time::Duration;

/// What may be written.
pub const ALLOWED: &str = "http://host:port, without a user (https is not spoken)";

/// Reads an address; a slash at its end is allowed.
pub fn parse(text: &str) -> Option<Uri> {
    let parts = text.parse::<Uri>().ok()?.into_parts();
    let is_bare = parts.path_and_query.as_ref().is_none_or(|path| path == "/");
    (parts.scheme == Some(Scheme::HTTP) && is_bare).then_some(())?;
    let authority = parts.authority.as_ref().filter(|authority| !authority.as_str().contains('@'))?;
    authority.port()?;
    Uri::from_parts(parts).ok()
}

/// An address without a user and password, for messages.
pub fn without_user(text: &str) -> String {
    match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://(user)@{host}"),
        _ => text.to_owned(),
    }
}

/// The address of something that the service has.
fn with_path(endpoint: &Uri, path: &'static str) -> Uri {
    let mut parts = Parts::from(endpoint.clone());
    parts.path_and_query = Some(PathAndQuery::from_static(path));
    // A path in place of another leaves an address an address.
    Uri::from_parts(parts).unwrap_or_else(|_| endpoint.clone())
}

/// Posts JSON, over one connection to each service that it keeps.
#[derive(Debug, Clone)]
pub struct Poster(Client<HttpConnector, Full<Bytes>>);

impl Poster {
    /// `limit`: how long a connection may take to come about.
    pub fn new(limit: Duration) -> Poster {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(limit));
        connector.set_nodelay(true);
        Poster(Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build(connector))
    }

    /// Sends a body and waits for the answer's head, without a limit of its own. An error is in
    /// words.
    pub async fn post(
        &self,
        endpoint: &Uri,
        path: &'static str,
        header: Option<(&'static str, &'static str)>,
        body: String,
    ) -> Result<Response<Incoming>, String> {
        let request =
            http::Request::post(with_path(endpoint, path)).header("content-type", "application/json");
        let request = match header {
            Some((name, value)) => request.header(name, value),
            None => request,
        };
        let request = request.body(Full::from(body)).map_err(|error| error.to_string())?;
        self.0.request(request).await.map_err(|error| chain(&error))
    }
}

/// An error with its causes: hyper's own text names only the outermost.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
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
