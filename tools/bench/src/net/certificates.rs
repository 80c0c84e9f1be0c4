//! An authority and a certificate that live as long as a benchmark.

use crate::output::Error;
use forebay_net::tcp::TlsConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CERTIFICATE: &str = "certificate.pem";
const KEY: &str = "key.pem";
const AUTHORITY: &str = "authority.pem";

/// Certificates in a directory of their own. Removed when this is dropped.
pub struct Certificates(PathBuf);

impl Certificates {
    pub fn make() -> Result<Certificates, Error> {
        let directory = std::env::temp_dir().join(format!("forebay-bench-net-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let made = Certificates(directory);
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let certificate =
            CertificateParams::new(vec!["localhost".to_owned()])?.signed_by(&key, &authority)?;
        for (name, text) in
            [(AUTHORITY, authority.pem()), (CERTIFICATE, certificate.pem()), (KEY, key.serialize_pem())]
        {
            std::fs::write(made.0.join(name), text)?;
        }
        Ok(made)
    }

    pub fn directory(&self) -> &Path {
        &self.0
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        // What is left behind is of no use to anybody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What an end speaks with.
pub fn load(directory: &Path) -> Result<Arc<TlsConfig>, Error> {
    let read = |name| std::fs::read(directory.join(name));
    Ok(Arc::new(TlsConfig::from_pem(&read(CERTIFICATE)?, &read(KEY)?, &read(AUTHORITY)?)?))
}
