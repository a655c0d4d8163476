//! TLS 1.2 and 1.3 for JSON-RPC over HTTP (RFC 8446), with a certificate from files. Control context.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

/// Timeout of a TLS handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Handshakes in progress, at most. One more replaces the oldest.
pub(super) const HANDSHAKES_MAX: usize = 64;

/// The TLS configuration of the server.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// Why TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or has other contents.
    #[error("cannot read {what} from {path}: {source}")]
    File {
        /// The expected contents.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: pem::Error,
    },
    /// All users may read the key.
    #[error("other users can read {0}: remove their rights with chmod o=")]
    Exposed(PathBuf),
    /// The two files do not match, or are not usable.
    #[error("{certificate} and {key} cannot be used for TLS: {source}")]
    Unfit {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its private key, both as PEM.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let failed = |what, path: &Path, source| TlsError::File { what, path: path.to_owned(), source };
        let chain =
            CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(|e| failed("a certificate", certificate, e))?;
        let rights =
            std::fs::metadata(key).map_err(|e| failed("a key", key, pem::Error::Io(e)))?.permissions();
        if rights.mode() & 0o007 != 0 {
            return Err(TlsError::Exposed(key.to_owned()));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| failed("a private key", key, e))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
        let mut config = config.map_err(|source| TlsError::Unfit {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            source,
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Does the TLS handshake with a client, within [`HANDSHAKE_TIME`].
    async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let agreed = tokio::time::timeout(HANDSHAKE_TIME, self.0.accept(stream)).await;
        agreed.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Handshakes in progress. Their clients do not count as served, so that silent clients cannot block others.
#[derive(Default)]
pub(super) struct Handshakes {
    running: JoinSet<io::Result<TlsStream<TcpStream>>>,
    /// In the order of their starts.
    order: VecDeque<AbortHandle>,
}

impl Handshakes {
    /// Starts a handshake. Needs a tokio `LocalSet`.
    pub fn begin(&mut self, tls: Tls, stream: TcpStream) {
        self.order.retain(|handshake| !handshake.is_finished());
        if self.order.len() >= HANDSHAKES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            oldest.abort();
        }
        let handshake = async move { tls.accept(stream).await };
        self.order.push_back(self.running.spawn_local(handshake));
    }

    /// Waits for the end of a handshake; returns the connection if the handshake succeeded. `None` if none is in progress.
    pub async fn next(&mut self) -> Option<Option<TlsStream<TcpStream>>> {
        Some(match self.running.join_next().await? {
            Ok(Ok(stream)) => Some(stream),
            Ok(Err(error)) => {
                tracing::info!(%error, "TLS handshake with an HTTP RPC client failed");
                None
            }
            // A newer handshake has replaced this one.
            Err(_) => None,
        })
    }
}

#[cfg(test)]
mod tests;
