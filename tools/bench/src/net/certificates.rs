//! An authority and a certificate that live as long as a benchmark.

use crate::output::Error;
use forebay_net::tcp::TlsConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const CERTIFICATE: &str = "certificate.pem";
const KEY: &str = "key.pem";
const AUTHORITY: &str = "authority.pem";

/// Certificates in a directory of their own. Removed when this is dropped.
pub struct Certificates(TempDir);

impl Certificates {
    pub fn make() -> Result<Certificates, Error> {
        let made = Certificates(tempfile::tempdir()?);
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let certificate =
            CertificateParams::new(vec!["localhost".to_owned()])?.signed_by(&key, &authority)?;
        for (name, text) in
            [(AUTHORITY, authority.pem()), (CERTIFICATE, certificate.pem()), (KEY, key.serialize_pem())]
        {
            std::fs::write(made.directory().join(name), text)?;
        }
        Ok(made)
    }

    pub fn directory(&self) -> &Path {
        self.0.path()
    }
}

/// What an end speaks with.
pub fn load(directory: &Path) -> Result<Arc<TlsConfig>, Error> {
    let read = |name| std::fs::read(directory.join(name));
    Ok(Arc::new(TlsConfig::from_pem(&read(CERTIFICATE)?, &read(KEY)?, &read(AUTHORITY)?)?))
}
