//! TLS with a certificate that the system trusts, or does not.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use harness::{Postgres, free_port, give};
use tower_fixed_window_postgres::PostgresStore;

/// What a process of the test does: it trusts what the variable `SSL_CERT_FILE` names.
#[tokio::test]
#[ignore = "a process of the test below"]
async fn client() {
    let Ok(url) = std::env::var("TFW_TLS_OF") else { return };
    let store = PostgresStore::new(&url).expect("an address").deadline(Duration::from_secs(20));
    match store.create_tables().await {
        Ok(()) => println!("answer: {:?}", store.ping().await),
        Err(error) => println!("error: {error}"),
    }
}

fn ask(url: &str, trusted: &Path) -> String {
    let client = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "tls::client", "--ignored", "--nocapture"])
        .env("TFW_TLS_OF", url)
        .env("SSL_CERT_FILE", trusted)
        .env_remove("SSL_CERT_DIR")
        .output();
    let text = String::from_utf8(client.expect("it runs").stdout).expect("text");
    let said = text.lines().find_map(|line| {
        let at = line.find("answer: ").or_else(|| line.find("error: "))?;
        Some(line[at..].to_owned())
    });
    said.unwrap_or_else(|| panic!("it says something: {text}"))
}

#[test]
fn a_certificate_that_is_trusted_and_one_that_is_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let names = ["localhost", "127.0.0.1"].map(str::to_owned);
    let params = rcgen::CertificateParams::new(names).expect("names");
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("it is written");
        path
    };
    let [(cert, key), (other, _)] = ["its", "other"].map(|name| {
        let key = rcgen::KeyPair::generate().expect("a key");
        let cert = params.clone().self_signed(&key).expect("a certificate").pem();
        (file(&format!("{name}.pem"), cert), file(&format!("{name}.key"), key.serialize_pem()))
    });
    give(&key);
    // The server's user enters it.
    let open = Command::new("chmod").args(["755"]).arg(dir.path()).status();
    assert!(open.is_ok_and(|status| status.success()));
    let settings = [
        "ssl=on",
        &format!("ssl_cert_file={}", cert.display()),
        &format!("ssl_key_file={}", key.display()),
    ];
    let Some(server) = Postgres::with(&settings) else { return };
    let url = |port| format!("postgres://postgres@localhost:{port}/postgres?sslmode=require");
    assert_eq!(ask(&url(server.port), &cert), "answer: Ok(())");
    let untrusted = ask(&url(server.port), &other);
    assert!(untrusted.starts_with("error: no connection to Postgres: "), "{untrusted}");
    assert!(!untrusted.contains("127.0.0.1"), "{untrusted}");
    assert!(ask(&url(free_port()), &cert).starts_with("error: no connection to Postgres"));
    // One without TLS is not asked in plain text.
    let Some(plain) = Postgres::start() else { return };
    let refused = ask(&url(plain.port), &cert);
    assert!(refused.starts_with("error: no connection to Postgres: "), "{refused}");
}
