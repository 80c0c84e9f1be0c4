//! Authorities, and agents that have certificates of them.
#![allow(dead_code, reason = "each test binary uses a part")]

use forebay_net::{AgentConfig, TlsConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::sync::Arc;

/// Signs certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// An agent that trusts this authority and shows a certificate of `signer`.
    pub fn config(&self, name: &str, signer: &Authority) -> AgentConfig {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().signed_by(&key, &signer.0).unwrap();
        let pems = (certificate.pem(), key.serialize_pem(), self.0.pem());
        let tls = TlsConfig::from_pem(pems.0.as_bytes(), pems.1.as_bytes(), pems.2.as_bytes()).unwrap();
        AgentConfig { tls: Some(Arc::new(tls)), ..AgentConfig::named(name) }
    }
}
