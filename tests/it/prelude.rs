//! What most of these modules use: the crate under test, Tower and HTTP, and the tests' own helpers.

pub(crate) use std::convert::Infallible;
pub(crate) use std::net::SocketAddr;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::task::{Context, Poll, Waker};
pub(crate) use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) use axum::Router;
pub(crate) use axum::body::{Body, to_bytes};
pub(crate) use axum::routing::get as on_get;
pub(crate) use futures_util::FutureExt;
pub(crate) use http::request::Parts;
pub(crate) use http::{Request, Response, StatusCode};
pub(crate) use tokio::time::sleep;
pub(crate) use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
pub(crate) use tower_fixed_window::key::{PeerAddr, client_ip, extension, header, peer_ip};
pub(crate) use tower_fixed_window::testing::block_on;
pub(crate) use tower_fixed_window::{
    Decision, EmptyBody, FixedWindowLayer, GitHubBody, Grpc, Headers, Key, KeyExtractor, Limit,
    Limiter, Limits, Line, ManualClock, MemoryStore, OnStoreFailure, Plan, Quota, Quotas,
    RateLimitEndpoint, Reject, StoreError, TrueCost,
};

pub(crate) use crate::support::*;
