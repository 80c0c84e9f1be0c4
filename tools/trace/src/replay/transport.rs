//! Connections to servers over HTTP and HTTPS, and which certificates are trusted.

use super::error::{ReplayError, chain};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// An idle connection is closed after this long.
const IDLE_CONNECTION: Duration = Duration::from_secs(60);

/// A page that is read whole, such as one of metrics, may take this long, and be this large.
const PAGE_TIMEOUT: Duration = Duration::from_secs(2);
const PAGE_BYTES_MAX: usize = 4 << 20;

/// A pool of connections.
#[derive(Debug, Clone)]
pub struct Transport {
    pub(super) http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Certificates that are trusted.
    pub(super) roots: usize,
}

impl Transport {
    /// Connects within `connect`. Trusts the certificates in `ca`, a PEM file, or without it those
    /// that the system trusts.
    pub fn new(ca: Option<&Path>, connect: Duration) -> Result<Transport, ReplayError> {
        let roots = match ca {
            Some(path) => read_roots(path)?,
            None => system_roots(),
        };
        let trusted = roots.len();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(ReplayError::Tls)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect));
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_CONNECTION)
            .build(connector);
        Ok(Transport { http, roots: trusted })
    }

    /// The text of the page at `path` of a server, or why there is none.
    pub async fn page(&self, server: &Uri, path: &str, headers: &HeaderMap) -> Result<String, String> {
        match timeout(PAGE_TIMEOUT, self.whole_page(server, path, headers)).await {
            Ok(page) => page,
            Err(_) => Err(format!("no answer within {} s", PAGE_TIMEOUT.as_secs())),
        }
    }

    async fn whole_page(&self, server: &Uri, path: &str, headers: &HeaderMap) -> Result<String, String> {
        let url = format!("{}{path}", server.to_string().trim_end_matches('/'));
        let mut request = Request::get(url).body(Full::default()).map_err(|error| error.to_string())?;
        request.headers_mut().extend(headers.clone());
        let response = self.http.request(request).await.map_err(|error| chain(&error))?;
        if response.status() != StatusCode::OK {
            return Err(response.status().to_string());
        }
        let body = Limited::new(response.into_body(), PAGE_BYTES_MAX).collect().await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        String::from_utf8(body.into()).map_err(|error| error.to_string())
    }
}

fn read_roots(path: &Path) -> Result<RootCertStore, ReplayError> {
    let bad = |reason: String| ReplayError::Ca { path: path.to_owned(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))? {
        let certificate = certificate.map_err(|error| bad(error.to_string()))?;
        roots.add(certificate).map_err(|error| bad(error.to_string()))?;
    }
    if roots.is_empty() { Err(bad("there is no certificate in it".into())) } else { Ok(roots) }
}

/// What the system trusts, as far as it can be read: a store without certificates trusts nobody.
fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}
