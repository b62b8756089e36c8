//! Sets up rustls, and describes its errors.

use std::io;

use redis::{Client, ConnectionAddr};
use rustls::crypto::{CryptoProvider, ring};
use rustls::{CertificateError, Error};

pub(crate) fn is_used_by(client: &Client) -> bool {
    matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. })
}

/// Chooses rustls' cryptography, unless the app has. Without a choice, rustls panics if the app's
/// dependencies bring several.
pub(crate) fn install_provider() {
    if CryptoProvider::get_default().is_none() {
        // Another thread may have been faster.
        let _ = ring::default_provider().install_default();
    }
}

/// Returns why this process has refused a connection.
pub(crate) fn describe_refusal(error: &io::Error) -> Option<&'static str> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    let Error::InvalidCertificate(error) = error else { return Some("the TLS handshake failed") };
    Some(match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet"
        }
        CertificateError::UnknownIssuer => "its certificate is not signed by a trusted authority",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another name"
        }
        CertificateError::Revoked => "its certificate was revoked",
        _ => "its certificate is not valid",
    })
}
