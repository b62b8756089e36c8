//! TLS by every way to connect, in a process that has more than one provider of cryptography and has
//! chosen none (the feature `custom-provider` of rustls, among the dev-dependencies, stands for a crate
//! such as reqwest, which brings another one).

use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{Server, free_port, wait_for};
use redis::aio::MultiplexedConnection;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{Client, ConnectionAddr, TlsCertificates, TlsMode};
use rustls::CertificateError;
use rustls::crypto::CryptoProvider;
use tempfile::TempDir;
use tower_fixed_window::{Limiter, OnStoreFailure, Quota};
use tower_fixed_window_redis::RedisStore;

const INVALID: &str = "Redis can't be reached (TLS failed: InvalidCertificate ";

/// A certificate that nobody has signed, for this machine.
pub(crate) struct Certificate {
    dir: TempDir,
    pem: String,
}

impl Certificate {
    /// `(year, year)`: from when, and until when.
    pub(crate) fn of(years: (i32, i32)) -> Self {
        Self::for_hosts(&["localhost", "127.0.0.1"], years)
    }

    fn for_hosts(hosts: &[&str], years: (i32, i32)) -> Self {
        let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(hosts).expect("names");
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let key = rcgen::KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("cert.pem"), &pem).expect("it is written");
        std::fs::write(dir.path().join("key.pem"), key.serialize_pem()).expect("it is written");
        Self { dir, pem }
    }

    fn path(&self, name: &str) -> String {
        let path: PathBuf = self.dir.path().join(name);
        path.display().to_string()
    }

    /// A server that speaks nothing else.
    pub(crate) fn server(&self, port: u16, options: &[&str]) -> Option<Server> {
        let (port, cert, key) = (port.to_string(), self.path("cert.pem"), self.path("key.pem"));
        let tls = [
            ["--tls-port", &port],
            ["--tls-cert-file", &cert],
            ["--tls-key-file", &key],
            ["--tls-ca-cert-file", &cert],
            ["--tls-auth-clients", "no"],
            ["--tls-replication", "yes"],
        ];
        Server::on(0, &[options, &tls.concat()].concat())
    }

    fn certificates(&self) -> TlsCertificates {
        TlsCertificates { client_tls: None, root_cert: Some(self.pem.clone().into_bytes()) }
    }

    pub(crate) fn client(&self, port: u16) -> Client {
        let url = format!("rediss://localhost:{port}/");
        Client::build_with_tls(url, self.certificates()).expect("an address")
    }

    /// Asks a server past the store, over TLS.
    async fn ask<T: redis::FromRedisValue>(&self, port: u16, command: &[&str]) -> Option<T> {
        let connection = self.client(port).get_multiplexed_async_connection().await;
        redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection.ok()?).await.ok()
    }
}

fn limiter(store: RedisStore) -> Limiter {
    Quota::per_day(1_000).name("tls").store(store.on_failure(OnStoreFailure::Deny))
}

/// Waits until Redis answers, since the server may still be starting.
async fn wait_until_joined(store: RedisStore) {
    let (limiter, start) = (limiter(store), Instant::now());
    while let Err(error) = limiter.check("ann").await {
        assert!(start.elapsed() < Duration::from_secs(20), "{error:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn every_way_to_connect_works_beside_another_crypto_provider() {
    for way in ["new", "client", "connecting", "cluster", "sentinel", "plain"] {
        let this = std::env::current_exe().expect("this program");
        // Each way has its own process, since the provider that one way chooses would serve the
        // others.
        let status = Command::new(this)
            .args(["--exact", "tls::connects_one_way", "--ignored", "--nocapture"])
            .env("TLS_WAY", way)
            .status();
        assert!(status.expect("it runs").success(), "{way}");
    }
}

#[tokio::test]
#[ignore = "started by another test"]
async fn connects_one_way() {
    let Ok(way) = std::env::var("TLS_WAY") else { return };
    let certificate = Certificate::of((2020, 2100));
    let port = free_port();
    let start = |options: &[&str]| certificate.server(port, options);
    match &way[..] {
        "new" => {
            let Some(_server) = start(&[]) else { return };
            let store = RedisStore::new(format!("rediss://localhost:{port}/")).expect("an address");
            let start = Instant::now();
            loop {
                let error = limiter(store.clone()).check("ann").await.expect_err("not trusted");
                // The connection got as far as the certificate.
                if error.to_string() == format!("{INVALID}UnknownIssuer)") {
                    return;
                }
                assert!(start.elapsed() < Duration::from_secs(20), "{error:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        "client" => {
            let Some(_server) = start(&[]) else { return };
            wait_until_joined(RedisStore::from_client(certificate.client(port))).await;
        }
        "connecting" => {
            let Some(_server) = start(&[]) else { return };
            let client = certificate.client(port);
            let connect = move || {
                let client = client.clone();
                async move { client.get_multiplexed_async_connection().await }
            };
            wait_until_joined(RedisStore::connecting(connect)).await;
        }
        "cluster" => {
            let Some(_server) = start(&["--cluster-enabled", "yes", "--tls-cluster", "yes"]) else {
                return;
            };
            let node = certificate.client(port).get_connection_info().clone();
            let store = RedisStore::cluster([node]).expect("an address");
            // The cluster has to come up without questions, since asking needs a provider.
            let slots = ["CLUSTER", "ADDSLOTSRANGE", "0", "16383"];
            let _ = limiter(store.clone()).check("ann").await;
            while certificate.ask::<String>(port, &slots).await.is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            wait_until_joined(store).await;
        }
        "sentinel" => {
            let (Some(_master), sentinel_port) = (start(&[]), free_port()) else { return };
            let Some(_sentinel) = certificate.server(sentinel_port, &["--sentinel"]) else {
                return;
            };
            let (pem, master) = (certificate.pem.clone(), port.to_string());
            let store = RedisStore::sentinel([sentinel_port], move |sentinel| {
                let certificates = || TlsCertificates {
                    client_tls: None,
                    root_cert: Some(pem.clone().into_bytes()),
                };
                let address = ConnectionAddr::TcpTls {
                    host: "localhost".to_owned(),
                    port: sentinel,
                    insecure: false,
                    tls_params: None,
                };
                SentinelClientBuilder::new([address], "mymaster", SentinelServerType::Master)?
                    .set_client_to_sentinel_certificates(certificates())
                    .set_client_to_redis_tls_mode(TlsMode::Secure)
                    .set_client_to_redis_certificates(certificates())
                    .build()
            });
            let store = store.expect("an address");
            let _ = limiter(store.clone()).check("ann").await;
            let monitor = ["SENTINEL", "MONITOR", "mymaster", "127.0.0.1", &master, "1"];
            while certificate.ask::<String>(sentinel_port, &monitor).await.is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            wait_until_joined(store).await;
        }
        // Without TLS, the store makes no choice for the app.
        "plain" => {
            let Some(server) = Server::start() else { return };
            wait_until_joined(RedisStore::new(server.url()).expect("an address")).await;
            assert!(CryptoProvider::get_default().is_none());
        }
        way => panic!("{way}"),
    }
}

#[tokio::test]
async fn the_error_says_what_is_wrong_with_a_certificate() {
    for (host, years, told) in [
        ("localhost", (2020, 2021), "Expired"),
        ("localhost", (2100, 2101), "NotValidYet"),
        ("example.org", (2020, 2100), "NotValidForName"),
    ] {
        let (certificate, port) = (Certificate::for_hosts(&[host], years), free_port());
        let Some(_server) = certificate.server(port, &[]) else { return };
        wait_for("the server", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        // A handshake on a busy machine takes longer than the usual deadline.
        let store =
            RedisStore::from_client(certificate.client(port)).deadline(Duration::from_secs(20));
        let error = limiter(store).check("ann").await.expect_err(told);
        assert_eq!(error.to_string(), format!("{INVALID}{told})"));
    }
}

/// The app's closure can check that. The client library takes no lists of revoked certificates.
#[tokio::test]
async fn the_error_says_that_a_certificate_was_revoked() {
    let other = CertificateError::Other(rustls::OtherError(std::sync::Arc::new(std::fmt::Error)));
    for (error, told) in [(CertificateError::Revoked, "Revoked"), (other, "Error")] {
        let store = RedisStore::connecting(move || {
            let error = rustls::Error::InvalidCertificate(error.clone());
            async { Err::<MultiplexedConnection, _>(io::Error::other(error).into()) }
        });
        let limiter = limiter(store.deadline(Duration::from_secs(20)));
        let error = limiter.check("ann").await.expect_err("it was refused");
        assert_eq!(error.to_string(), format!("{INVALID}{told})"));
    }
}
