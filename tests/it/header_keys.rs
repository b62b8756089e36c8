//! Headers as keys, whatever is in them, and requests that no key is asked of.

use tower_fixed_window::MissingKey;
use tower_fixed_window::key::{key_fn, matched_path};

use crate::client_ip::request;
use crate::prelude::*;

fn key(extractor: &impl KeyExtractor, lines: &[(&str, &[u8])]) -> Result<Key, MissingKey> {
    let mut key = Key::default();
    extractor.extract(&request("192.0.2.7", lines), &mut key).map(|()| key)
}

/// The key of a request with these `x-api-key` headers.
fn api_key(values: &[&[u8]]) -> Result<Key, MissingKey> {
    let lines: Vec<_> = values.iter().map(|value| ("x-api-key", *value)).collect();
    key(&header("x-api-key"), &lines)
}

/// Values of a header that can't be used, and what the client is told of them.
const UNUSABLE: [(&[&str], &str); 5] = [
    (&[""], "an empty x-api-key header"),
    (&["", ""], "more than one x-api-key header"),
    (&["a", "b"], "more than one x-api-key header"),
    (&["a", "a"], "more than one x-api-key header"),
    (&["a", ""], "more than one x-api-key header"),
];

#[test]
fn a_missing_header_differs_from_one_that_can_t_be_used() {
    assert_eq!(api_key(&[]).expect_err("no key").to_string(), "the x-api-key header");
    for (values, told) in UNUSABLE {
        let bytes: Vec<_> = values.iter().map(|value| value.as_bytes()).collect();
        assert_eq!(api_key(&bytes), Err(MissingKey::unusable(told)), "{values:?}");
    }
}

/// The number of a tenant, as an app may read it.
struct Tenant;

impl KeyExtractor for Tenant {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        // This much is appended even if the rest fails.
        key.append(&Key::from("tenant"));
        let value = parts.headers.get("x-tenant").ok_or(MissingKey::client("a tenant"))?;
        let tenant = value.to_str().ok().and_then(|text| text.parse::<u64>().ok());
        key.append(&Key::from(tenant.ok_or(MissingKey::unusable("a tenant that is no number"))?));
        Ok(())
    }
}

/// S29: `.or(..)` is for what is missing. What is there and can't be used is refused, or a client
/// would choose by what it is counted, while the app reads one of the values.
#[test]
fn whatever_the_extractor_a_fallback_is_for_what_is_missing_only() {
    type Lines = &'static [(&'static str, &'static [u8])];
    fn either(first: impl KeyExtractor) -> Box<dyn KeyExtractor> {
        Box::new(first.or(Key::from("fallback")))
    }
    let by_header = || header("x-api-key");
    let boxed = || Box::new(by_header()) as Box<dyn KeyExtractor>;
    let twice: Lines = &[("x-api-key", b"a"), ("x-api-key", b"b")];
    let empty: Lines = &[("x-api-key", b"")];
    let credentials: Lines = &[("authorization", b"Bearer t"), ("authorization", b"Bearer u")];
    let no_number: Lines = &[("x-tenant", b"seven")];
    for (name, extractor, unusable) in [
        ("a header", either(by_header()), &[twice, empty][..]),
        ("credentials", either(header("authorization")), &[credentials]),
        ("a boxed one", either(boxed()), &[twice, empty]),
        ("a shared one", either(Arc::new(boxed())), &[twice, empty]),
        ("a hashed one", either(by_header().hashed("secret")), &[twice, empty]),
        ("one behind another", either(extension::<User>().or(by_header())), &[twice, empty]),
        ("one before another", either(by_header().or(extension::<User>())), &[twice, empty]),
        ("a tuple", either((peer_ip(), by_header())), &[twice, empty]),
        (
            "a tuple of tuples",
            either((peer_ip(), (Key::from(1_u64), by_header()))),
            &[twice, empty],
        ),
        ("one of the app's", either(Tenant), &[no_number]),
        ("a closure", either(key_fn(|_| None)), &[]),
        ("an extension", either(extension::<User>()), &[]),
    ] {
        assert_eq!(key(&extractor, &[]), Ok(Key::from("fallback")), "{name}");
        for lines in unusable {
            let error = key(&extractor, lines).expect_err(name);
            assert_eq!(error, MissingKey::unusable(error.to_string()), "{name}: {lines:?}");
        }
    }
    // The others find a key for any header: that of the last address that can be trusted, that of
    // no route.
    let proxied = || client_ip().trusting(["192.0.2.7"]);
    for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
        for value in ["", "unknown", "for=", "\""] {
            let lines = [(header, value.as_bytes()), (header, value.as_bytes())];
            let found = key(&either(proxied().from_header(header)), &lines);
            assert_eq!(found, key(&peer_ip(), &[]), "{header}: {value:?}");
        }
    }
    assert_eq!(key(&either(matched_path()), twice), Ok(Key::from("")));
}

#[test]
fn a_missing_header_falls_back_and_leaves_no_partial_key() {
    let either = header("x-api-key").or(peer_ip());
    let address = key(&peer_ip(), &[]);
    assert_eq!(key(&either, &[]), address);
    assert_eq!(key(&either, &[("x-api-key", b"a")]), Ok(Key::secret("a")));
    // The first of two parts leaves nothing behind if the second one fails.
    let both = (header("x-api-key"), header("x-app")).or(peer_ip());
    assert_eq!(key(&both, &[("x-api-key", b"a")]), address);
    // A key that another extractor has begun is kept.
    let mut app_and_address = Key::secret("a");
    app_and_address.append(&address.expect("there is a peer"));
    assert_eq!(key(&(header("x-app"), either), &[("x-app", b"a")]), Ok(app_and_address));
}

#[test]
fn different_header_bytes_are_different_keys() {
    let mut seen = std::collections::HashSet::new();
    let long = vec![b'a'; 64 << 10];
    for value in [
        &b"a"[..],
        b"A",
        b"a,b",
        b"a b",
        b"\xff\xfe",
        b"\xc3\xbc",
        "\u{ff}".as_bytes(),
        &long,
        &long[1..],
        &[b'\xff'; 64 << 10],
    ] {
        let found = api_key(&[value]).expect("a key");
        assert_eq!(found, Key::secret(value));
        assert!(found.as_bytes().len() <= 34, "it is hashed, whatever its length");
        seen.insert(found);
    }
    assert_eq!(seen.len(), 10);
}

#[test]
fn one_credential_is_one_count_however_it_is_spelled() {
    for name in ["authorization", "proxy-authorization"] {
        let by = |value: &str| key(&header(name), &[(name, value.as_bytes())]);
        let expected = Ok(Key::secret("bearer t"));
        for value in ["Bearer t", "bearer t", "BEARER t", "Bearer  t", "Bearer \t t", " Bearer t "]
        {
            assert_eq!(by(value), expected, "{value:?}");
        }
        // The credential itself is what it is.
        for value in ["Bearer T", "Bearer t t", "Basic t", "Bearert", "t"] {
            assert_ne!(by(value), expected, "{value:?}");
        }
        assert_ne!(by("Bearer t t"), by("Bearer t  t"));
        assert_ne!(by("T"), by("t"), "without a scheme all of it is the credential");
        assert_eq!(by("T"), Ok(Key::secret("T")));
    }
    assert_ne!(api_key(&[b"Bearer t"]), api_key(&[b"bearer t"]), "not a header of credentials");
}

/// HTTP/1 servers take it off, HTTP/2 servers don't.
#[test]
fn space_around_a_value_is_no_part_of_it() {
    for value in ["a", " a", "a ", "\t a \t"] {
        assert_eq!(api_key(&[value.as_bytes()]), Ok(Key::secret("a")), "{value:?}");
    }
    assert!(api_key(&[b" \t "]).is_err());
}

#[tokio::test]
async fn each_skip_exempts_only_the_requests_it_matches() {
    let client = client_ip().trusting(["10.0.0.0/8"]);
    let layer = per_minute(0, Mood::Now)
        .skip(|parts| parts.uri.path() == "/health")
        .skip(client.is_in(["192.0.2.0/24"]))
        .skip_preflight();
    let service = layer.layer(service_fn(inner));
    let ask = async |method: &str, path: &str, peer: &str, lines: &[(&str, &[u8])]| {
        let mut parts = request(peer, lines);
        parts.method = method.parse().expect("a method");
        parts.uri = path.parse().expect("a path");
        let Ok(response) = service.clone().oneshot(Request::from_parts(parts, Body::empty())).await;
        assert!(response.status() == 429 || limit_headers(&response).is_empty());
        response.status().as_u16()
    };
    assert_eq!(ask("GET", "/health", "203.0.113.9", &[]).await, 200);
    assert_eq!(ask("GET", "/", "192.0.2.7", &[]).await, 200);
    assert_eq!(ask("GET", "/", "10.0.0.1", &[("x-forwarded-for", b"192.0.2.7")]).await, 200);
    let preflight: &[(&str, &[u8])] =
        &[("origin", b"https://shop.example"), ("access-control-request-method", b"POST")];
    assert_eq!(ask("OPTIONS", "/", "203.0.113.9", preflight).await, 200);

    assert_eq!(ask("GET", "/", "203.0.113.9", &[]).await, 429);
    assert_eq!(ask("GET", "/health/", "203.0.113.9", &[]).await, 429);
    assert_eq!(ask("GET", "/", "203.0.113.9", &[("x-forwarded-for", b"192.0.2.7")]).await, 429);
    assert_eq!(ask("GET", "/", "10.0.0.1", &[("x-forwarded-for", b"192.0.2.7, ?")]).await, 429);
    // An OPTIONS request that is no preflight is a request.
    for part in [&preflight[..0], &preflight[..1], &preflight[1..]] {
        assert_eq!(ask("OPTIONS", "/", "203.0.113.9", part).await, 429);
    }
    assert_eq!(ask("POST", "/", "203.0.113.9", preflight).await, 429);
}
