//! Authorities, and agents that have certificates of them.
#![allow(dead_code, reason = "each test binary uses a part")]

use forebay_net::{AgentConfig, TlsConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::sync::Arc;

/// Signs certificates.
pub struct Authority(pub CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// TLS of who trusts this authority and has a certificate of `signer`, changed as the test
    /// likes.
    pub fn node(&self, signer: &Authority, change: impl FnOnce(&mut CertificateParams)) -> Arc<TlsConfig> {
        let (mut params, key) = (CertificateParams::default(), KeyPair::generate().unwrap());
        change(&mut params);
        let certificate = params.signed_by(&key, &signer.0).unwrap();
        let pems = (certificate.pem(), key.serialize_pem(), self.0.pem());
        let config = TlsConfig::from_pem(pems.0.as_bytes(), pems.1.as_bytes(), pems.2.as_bytes());
        Arc::new(config.unwrap())
    }

    pub fn plain_node(&self) -> Arc<TlsConfig> {
        self.node(self, |_| {})
    }

    /// An agent that trusts this authority and shows a certificate of `signer`.
    pub fn config(&self, name: &str, signer: &Authority) -> AgentConfig {
        AgentConfig { tls: Some(self.node(signer, |_| {})), ..AgentConfig::named(name) }
    }
}
