//! Who may speak TLS with this node, and for which nodes a certificate speaks. TLS 1.3 only, both
//! ends show a certificate.
//!
//!
//! Authorities are the deployment's own: whoever holds a certificate that they signed is a peer, at
//! whatever address. A certificate that has names of the form `forebay:<node id in hex>` (URIs of
//! its subject alternative name) speaks for those nodes only; one without speaks for any.

use super::greeting::{Refusal, RefusalCode};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::net::SocketAddr;
use std::sync::Arc;
use thiserror::Error;

/// What a name of a node starts with.
const NODE_SCHEME: &str = "forebay:";

/// Why there is no TLS.
#[derive(Debug, Error)]
pub enum TlsError {
    #[error("{what}: {why}")]
    Pem { what: &'static str, why: String },
    #[error("{what}: none found; at least one is needed")]
    Missing { what: &'static str },
    #[error("certificate and key: {0}")]
    Unfit(#[from] rustls::Error),
}

/// A node's certificate, its key, and whom it trusts. For both ends of flows.
pub struct TlsConfig {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl std::fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsConfig").finish_non_exhaustive()
    }
}

impl TlsConfig {
    /// From the contents of PEM files: this node's certificate with what leads to its authority,
    /// its key, and the certificates of the authorities whose peers are let in.
    pub fn from_pem(certificates: &[u8], key: &[u8], authorities: &[u8]) -> Result<TlsConfig, TlsError> {
        let chain = certificates_of("certificates", certificates)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(bad_pem("key"))?;
        let mut roots = RootCertStore::empty();
        for authority in certificates_of("authorities", authorities)? {
            roots.add(authority).map_err(bad_pem("authorities"))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let owners = Arc::new(Owners { roots: Arc::clone(&roots), provider: Arc::clone(&provider) });
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(owners)
            .with_client_auth_cert(chain.clone(), key.clone_key())?;
        // Every flow shows its certificate anew.
        client.resumption = Resumption::disabled();
        let askers = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(bad_pem("authorities"))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(askers)
            .with_single_cert(chain, key)?;
        server.send_tls13_tickets = 0;
        Ok(TlsConfig { client: Arc::new(client), server: Arc::new(server) })
    }

    pub(super) fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    pub(super) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }
}

fn bad_pem<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> TlsError {
    move |error| TlsError::Pem { what, why: error.to_string() }
}

fn certificates_of(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates =
        CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().map_err(bad_pem(what))?;
    if certificates.is_empty() { Err(TlsError::Missing { what }) } else { Ok(certificates) }
}

/// Whom an asking end speaks to: whoever an authority signed. Addresses come and go, so they are in
/// no certificate; which node it is, is compared with the greeting.
#[derive(Debug)]
struct Owners {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Owners {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Whether plain text to or from this address leaves the machine.
pub fn is_beyond_loopback(address: SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}

/// The nodes that a peer may say it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpeaksFor {
    Anybody,
    /// These, by id in lower-case hex. May be none.
    Only(Vec<String>),
}

impl SpeaksFor {
    /// The nodes that a certificate names. One that cannot be read names none.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> SpeaksFor {
        let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else {
            return SpeaksFor::Only(Vec::new());
        };
        let names = parsed.valid_uri_names().filter_map(|name| name.strip_prefix(NODE_SCHEME));
        let names: Vec<String> = names.map(str::to_ascii_lowercase).collect();
        if names.is_empty() { SpeaksFor::Anybody } else { SpeaksFor::Only(names) }
    }

    /// Whether a peer may say that it is this node.
    pub(crate) fn check(&self, node: &[u8; 16]) -> Result<(), Refusal> {
        let hex: String = node.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            SpeaksFor::Only(names) if !names.contains(&hex) => {
                let text = format!("the certificate speaks for other nodes, not for {NODE_SCHEME}{hex}");
                Err(Refusal { code: RefusalCode::Certificate, text })
            }
            _ => Ok(()),
        }
    }
}
