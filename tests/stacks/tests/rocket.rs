//! Rocket has requests and responses of its own: a request guard asks a `Limiter`, and a fairing
//! sets the headers.

use http::HeaderMap;
use rocket::fairing::AdHoc;
use rocket::http::Status;
use rocket::request::{FromRequest, Outcome};
use rocket::{Build, Request, Response, Rocket, get, routes};
use tower_fixed_window::{Headers, Limiter, Quota};

struct Limited;

#[rocket::async_trait]
impl<'r> FromRequest<'r> for Limited {
    type Error = &'static str;

    async fn from_request(request: &'r Request<'_>) -> Outcome<Self, Self::Error> {
        let (Some(limiter), Some(peer)) = (request.rocket().state::<Limiter>(), request.remote())
        else {
            return Outcome::Error((Status::InternalServerError, "no limiter or no peer"));
        };
        let Ok(decision) = limiter.check(peer.ip()).await else {
            return Outcome::Error((Status::ServiceUnavailable, "the store failed"));
        };
        // For the fairing.
        request.local_cache(|| Some(limiter.headers(&decision, Headers::GitHub)));
        match decision.into_result() {
            Ok(()) => Outcome::Success(Limited),
            Err(_) => Outcome::Error((Status::TooManyRequests, "rate limit exceeded")),
        }
    }
}

fn set_headers(request: &Request<'_>, response: &mut Response<'_>) {
    for (name, value) in request.local_cache(|| None::<HeaderMap>).iter().flatten() {
        let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
        response.set_raw_header(name.as_str().to_owned(), value);
    }
}

#[get("/")]
fn hello(_limited: Limited) -> &'static str {
    "hello\n"
}

fn app() -> Rocket<Build> {
    rocket::build()
        .manage(Limiter::new(Quota::per_hour(2).from_first_request()))
        .attach(AdHoc::on_response("rate limit headers", |request, response| {
            Box::pin(async move { set_headers(request, response) })
        }))
        .mount("/", routes![hello])
}

#[tokio::test]
async fn the_third_request_is_refused() {
    use tower_fixed_window_stacks::{assert_limited, get};

    let (lifted, mut liftoff) = tokio::sync::mpsc::unbounded_channel();
    let config =
        rocket::Config { port: 0, log_level: rocket::config::LogLevel::Off, ..Default::default() };
    let app = app().configure(config).attach(AdHoc::on_liftoff("started", move |app| {
        Box::pin(async move {
            let config = app.config();
            lifted.send((config.address, config.port).into()).expect("the test waits");
        })
    }));
    tokio::spawn(app.launch());
    let addr = liftoff.recv().await.expect("it starts");
    assert_limited(async || get(addr).await).await;
}
