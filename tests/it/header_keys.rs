//! Headers as keys, whatever is in them, and requests that no key is asked of.

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::key::{client_ip, header, peer_ip};
use tower_fixed_window::{FixedWindow, FixedWindowLayer, Key, KeyExtractor, MissingKey, Quota};

use crate::client_ip::request;
use crate::support::{Mood, limit_headers, per_minute};

fn key(extractor: &impl KeyExtractor, lines: &[(&str, &[u8])]) -> Result<Key, MissingKey> {
    let mut key = Key::default();
    extractor.extract(&request("192.0.2.7", lines), &mut key).map(|()| key)
}

/// The key of a request with these `x-api-key` headers.
fn api_key(values: &[&[u8]]) -> Result<Key, MissingKey> {
    let lines: Vec<_> = values.iter().map(|value| ("x-api-key", *value)).collect();
    key(&header("x-api-key"), &lines)
}

#[test]
fn a_missing_empty_or_repeated_header_is_a_client_error() {
    for values in [&[][..], &[""], &["", ""], &["a", "b"], &["a", "a"], &["a", ""]] {
        let bytes: Vec<_> = values.iter().map(|value| value.as_bytes()).collect();
        let error = api_key(&bytes).expect_err("no key");
        assert_eq!(error.to_string(), "exactly one x-api-key header", "{values:?}");
    }
}

#[test]
fn an_unusable_header_falls_back_and_leaves_no_partial_key() {
    let either = header("x-api-key").or(peer_ip());
    let address = key(&peer_ip(), &[]);
    for values in [&[][..], &[""], &["a", "b"]] {
        let lines: Vec<_> = values.iter().map(|value| ("x-api-key", value.as_bytes())).collect();
        assert_eq!(key(&either, &lines), address, "{values:?}");
    }
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

#[test]
fn a_header_value_never_collides_with_a_name_or_an_address() {
    let found = api_key(&[b"192.0.2.7"]).expect("a key");
    assert_ne!(found, Key::from("192.0.2.7"));
    assert_ne!(Ok(found), key(&peer_ip(), &[]));
}

async fn echo(_: Request<Body>) -> Result<Response<Body>, std::convert::Infallible> {
    Ok(Response::new(Body::empty()))
}

async fn call<S, J>(service: &FixedWindow<S, J>, request: Request<Body>) -> Response<Body>
where
    FixedWindow<S, J>: Clone
        + tower::Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>,
{
    let Ok(response) = service.clone().oneshot(request).await;
    response
}

#[tokio::test]
async fn an_unusable_header_gets_a_400_that_names_it() {
    let layer = FixedWindowLayer::new(Quota::per_minute(60).key(header("x-api-key")));
    let service = layer.layer(service_fn(echo));
    for values in [&[][..], &[""], &["a", "b"]] {
        let mut request = Request::new(Body::empty());
        for value in values {
            request.headers_mut().append("x-api-key", HeaderValue::from_static(value));
        }
        let response = call(&service, request).await;
        assert_eq!(response.status(), 400, "{values:?}");
        assert!(limit_headers(&response).is_empty());
        let body = axum::body::to_bytes(response.into_body(), 1_000).await.expect("a body");
        let text = std::str::from_utf8(&body).expect("JSON");
        assert!(text.contains("exactly one x-api-key header"), "{text}");
    }
}

#[tokio::test]
async fn each_skip_exempts_only_the_requests_it_matches() {
    let client = client_ip().trusting(["10.0.0.0/8"]);
    let layer = per_minute(0, Mood::Now)
        .skip(|parts| parts.uri.path() == "/health")
        .skip(client.is_in(["192.0.2.0/24"]))
        .skip_preflight();
    let service = layer.layer(service_fn(echo));
    let ask = async |method: &str, path: &str, peer: &str, lines: &[(&str, &[u8])]| {
        let mut parts = request(peer, lines);
        parts.method = method.parse().expect("a method");
        parts.uri = path.parse().expect("a path");
        let response = call(&service, Request::from_parts(parts, Body::empty())).await;
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
    assert_eq!(ask("OPTIONS", "/", "203.0.113.9", &[]).await, 429);
    assert_eq!(ask("POST", "/", "203.0.113.9", preflight).await, 429);
}
