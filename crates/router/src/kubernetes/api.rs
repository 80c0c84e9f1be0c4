//! Requests to the API server of a Kubernetes cluster, with what a pod is given for them: a token,
//! which is read anew for each request because it expires, and the certificate of the server.

use super::objects::Status;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What Kubernetes mounts into a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

const CONNECT: Duration = Duration::from_secs(5);
/// From a request to the head of its answer, and for all of a list.
pub const ANSWER: Duration = Duration::from_secs(30);
/// An API server that is gone without a word is noticed after three probes.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// A list of some ten thousand pods.
const LIST_BYTES_MAX: usize = 256 << 20;
const STATUS_BYTES_MAX: usize = 64 << 10;

/// Where the API server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiPlace {
    /// That of the cluster in which this runs as a pod.
    Cluster,
    /// One that asks for no token, such as `kubectl proxy`.
    Open(String),
}

/// Why the API server has not said what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("KUBERNETES_SERVICE_HOST is not set: this is no pod; --kube-api names an API server")]
    NoCluster,
    #[error("API server '{0}' is not of the form http://HOST:PORT")]
    Url(String),
    #[error("{path}: {reason}")]
    Account { path: PathBuf, reason: String },
    #[error("TLS: {0}")]
    Tls(#[source] rustls::Error),
    #[error("API server {0}: {1}")]
    Unreachable(String, String),
    #[error("API server {0}: no answer within {ANSWER:?}")]
    Silent(String),
    #[error("API server answers {path} with {status}: {message}")]
    Refused { path: String, status: StatusCode, message: String },
    #[error("API server answers {path} with something else: {reason}")]
    Garbage { path: String, reason: String },
}

/// A client of one API server.
#[derive(Debug)]
pub struct Api {
    http: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    /// `https://HOST:PORT`.
    url: String,
    token: Option<PathBuf>,
}

impl Api {
    /// Connects when it is asked something.
    pub fn new(place: &ApiPlace) -> Result<Api, ApiError> {
        match place {
            ApiPlace::Open(url) => {
                let authority = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
                let authority = authority.and_then(|rest| rest.parse::<http::uri::Authority>().ok());
                let authority = authority.ok_or_else(|| ApiError::Url(url.clone()))?;
                Ok(Api {
                    http: client(RootCertStore::empty())?,
                    url: format!("http://{authority}"),
                    token: None,
                })
            }
            ApiPlace::Cluster => {
                let variable = |name| std::env::var(name).map_err(|_| ApiError::NoCluster);
                let (host, port) =
                    (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                let account = Path::new(ACCOUNT);
                let http = client(roots(&account.join("ca.crt"))?)?;
                Ok(Api { http, url: format!("https://{host}:{port}"), token: Some(account.join("token")) })
            }
        }
    }

    /// Asks for what is at a path; the head of the answer is good.
    pub async fn get(&self, path: &str) -> Result<hyper::Response<Incoming>, ApiError> {
        let mut request = Request::get(format!("{}{path}", self.url));
        if let Some(file) = &self.token {
            let bad = |reason: String| ApiError::Account { path: file.clone(), reason };
            let token = std::fs::read_to_string(file).map_err(|error| bad(error.to_string()))?;
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        let garbage = |reason: String| ApiError::Garbage { path: path.to_owned(), reason };
        let request = request.body(Empty::new()).map_err(|error| garbage(error.to_string()))?;
        let answer = tokio::time::timeout(ANSWER, self.http.request(request)).await;
        let answer = answer.map_err(|_| ApiError::Silent(self.url.clone()))?;
        let answer = answer.map_err(|error| ApiError::Unreachable(self.url.clone(), chain(&error)))?;
        if answer.status() == StatusCode::OK { Ok(answer) } else { Err(refusal(path, answer).await) }
    }

    /// All that is at a path.
    pub async fn list<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let garbage = |reason: String| ApiError::Garbage { path: path.to_owned(), reason };
        let body = self.get(path).await?.into_body();
        let body = tokio::time::timeout(ANSWER, Limited::new(body, LIST_BYTES_MAX).collect()).await;
        let body = body.map_err(|_| ApiError::Silent(self.url.clone()))?;
        let body = body.map_err(|error| garbage(error.to_string()))?.to_bytes();
        serde_json::from_slice(&body).map_err(|error| garbage(error.to_string()))
    }
}

/// Why a request was refused, by the body of the answer where that says it.
async fn refusal(path: &str, answer: hyper::Response<Incoming>) -> ApiError {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), STATUS_BYTES_MAX).collect();
    let body = tokio::time::timeout(CONNECT, body).await.ok().and_then(Result::ok);
    let said = body.and_then(|body| serde_json::from_slice::<Status>(&body.to_bytes()).ok());
    let message = said.map(|said| said.message).unwrap_or_default();
    ApiError::Refused { path: path.to_owned(), status, message }
}

fn client(roots: RootCertStore) -> Result<Client<HttpsConnector<HttpConnector>, Empty<Bytes>>, ApiError> {
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(ApiError::Tls)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT));
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE));
    tcp.set_keepalive_retries(Some(3));
    tcp.enforce_http(false);
    let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
    Ok(Client::builder(TokioExecutor::new()).build(https.wrap_connector(tcp)))
}

fn roots(path: &Path) -> Result<RootCertStore, ApiError> {
    let bad = |reason: String| ApiError::Account { path: path.to_owned(), reason };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))? {
        let certificate = certificate.map_err(|error| bad(error.to_string()))?;
        roots.add(certificate).map_err(|error| bad(error.to_string()))?;
    }
    if roots.is_empty() { Err(bad("there is no certificate in it".into())) } else { Ok(roots) }
}

/// An error with what is behind it.
fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_server_is_a_plain_address_and_a_pod_has_an_account() {
        let open = |url: &str| Api::new(&ApiPlace::Open(url.into())).map(|api| api.url);
        assert_eq!(open("http://127.0.0.1:8001/").unwrap(), "http://127.0.0.1:8001");
        for bad in ["127.0.0.1:8001", "https://api:443", "http://", "http://a/b"] {
            assert!(open(bad).unwrap_err().to_string().contains("http://HOST:PORT"), "{bad}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.crt");
        assert!(roots(&path).unwrap_err().to_string().contains("ca.crt"));
        std::fs::write(&path, "").unwrap();
        assert!(roots(&path).unwrap_err().to_string().contains("no certificate"));
    }
}
