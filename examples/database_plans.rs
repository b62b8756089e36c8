//! `cargo run --example database_plans`
//!
//! Plans from a database: the authentication layer looks up the customer and the plan, and caches
//! them for a minute. The limit reads the plan from the request, without waiting.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get};
use tower_fixed_window::key::extension;
use tower_fixed_window::{FixedWindowLayer, Key, Limit, Plan, Quota};

const KEEP: Duration = Duration::from_secs(60);

#[derive(Clone)]
struct Customer {
    id: u64,
    plan: Plan,
}

impl From<&Customer> for Key {
    fn from(customer: &Customer) -> Key {
        Key::from(customer.id)
    }
}

/// A table of customers: id, token, and the plan as text.
struct Database(Vec<(u64, &'static str, String)>);

impl Database {
    async fn customer(&self, token: &str) -> Result<Option<Customer>, StatusCode> {
        println!("a query");
        let Some((id, _, plan)) = self.0.iter().find(|row| row.1 == token) else { return Ok(None) };
        // An unreadable plan is an error here, and must not become "unlimited".
        let plan = plan.parse().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        Ok(Some(Customer { id: *id, plan }))
    }
}

struct Customers {
    database: Database,
    /// Holds only tokens that exist, so the cache is never larger than the table.
    known: Mutex<HashMap<String, (Instant, Customer)>>,
}

impl Customers {
    async fn find(&self, token: &str) -> Result<Customer, StatusCode> {
        let known = self.known.lock().unwrap().get(token).cloned();
        if let Some((at, customer)) = known
            && at.elapsed() < KEEP
        {
            return Ok(customer);
        }
        let customer = self.database.customer(token).await?.ok_or(StatusCode::UNAUTHORIZED)?;
        let entry = (Instant::now(), customer.clone());
        self.known.lock().unwrap().insert(token.to_owned(), entry);
        Ok(customer)
    }
}

async fn authenticate(
    State(customers): State<Arc<Customers>>,
    mut request: Request,
    next: Next,
) -> Result<Response, StatusCode> {
    let header = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let token = header.and_then(|header| header.strip_prefix("Bearer "));
    let customer = customers.find(token.ok_or(StatusCode::UNAUTHORIZED)?).await?;
    request.extensions_mut().insert(customer);
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").ok();
    let addr = std::env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".into());

    let row = |id, token, plan: &str| {
        let plan = limit.as_ref().map_or(plan.into(), |limit| format!("{limit}/minute"));
        (id, token, plan)
    };
    let database = Database(vec![
        row(1, "ann", "10/minute, 1_000/month"),
        row(2, "bob", "5000 per hour"),
        (3, "ours", "unlimited".into()),
    ]);
    let customers = Arc::new(Customers { database, known: Mutex::default() });

    let api = Limit::by_plan(|parts, _key| match parts.extensions.get::<Customer>() {
        Some(customer) => customer.plan,
        None => Plan::from(Quota::per_minute(0)),
    });
    let api = FixedWindowLayer::new(api.name("api").key(extension::<Customer>()));
    // In axum, the layer added last is the outermost: authentication runs first, then the limit.
    let app = Router::new()
        .route("/", get(async || "hello\n"))
        .layer(api)
        .layer(middleware::from_fn_with_state(customers, authenticate));

    let listener = tokio::net::TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    for token in ["ann", "bob", "ours"] {
        println!("try: curl -i http://{addr}/ -H 'authorization: Bearer {token}'");
    }
    axum::serve(listener, app).await?;
    Ok(())
}
