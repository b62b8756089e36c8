//! Why a request is refused: [`Reason`], with its HTTP status, gRPC code and metric.

use http::StatusCode;

use crate::decision::Decision;
use crate::key::MissingKey;
use crate::observe::Outcome;

/// Why a request was refused: [`Rejection::reason`](crate::Rejection::reason).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The limit is reached: 429, or the status of the layer.
    #[doc(alias = "quota exceeded")]
    RateLimited(Decision),
    /// The request has no key: 400 if the client left something out, 500 if the server is
    /// configured wrongly.
    MissingKey(MissingKey),
    /// The store failed, and the layer is set to refuse then: 503.
    StoreFailed,
    /// The queue was closed while the request was waiting in it: 503.
    QueueClosed,
}

/// How a [`Reason`] is answered and counted.
pub(crate) struct Consequences {
    /// The status, unless the layer sets another one for this reason.
    pub(crate) status: StatusCode,
    pub(crate) grpc: GrpcCode,
    /// `true` if the same request may pass later.
    pub(crate) may_retry: bool,
    /// The outcome that metrics count.
    pub(crate) outcome: Option<Outcome>,
}

/// Codes of gRPC's specification.
#[derive(Clone, Copy)]
pub(crate) enum GrpcCode {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
}

impl Reason {
    pub(crate) fn decision(&self) -> Option<&Decision> {
        match self {
            Self::RateLimited(decision) => Some(decision),
            _ => None,
        }
    }

    /// Returns the part of the key that the client left out.
    pub(crate) fn missing_from_client(&self) -> Option<&MissingKey> {
        match self {
            Self::MissingKey(missing) if missing.is_client() => Some(missing),
            _ => None,
        }
    }

    pub(crate) fn consequences(&self) -> Consequences {
        use GrpcCode::{Internal, InvalidArgument, ResourceExhausted, Unavailable};

        let (status, grpc, may_retry, outcome) = match self {
            Self::RateLimited(_) => (429, ResourceExhausted, true, Some(Outcome::Refused)),
            Self::MissingKey(missing) if missing.is_client() => {
                (400, InvalidArgument, false, Some(Outcome::MissingKey))
            }
            Self::MissingKey(_) => (500, Internal, false, Some(Outcome::MissingKey)),
            Self::StoreFailed => (503, Unavailable, true, Some(Outcome::FailedClosed)),
            Self::QueueClosed => (503, Unavailable, true, None),
        };
        let status = StatusCode::from_u16(status).expect("one of these");
        Consequences { status, grpc, may_retry, outcome }
    }
}
