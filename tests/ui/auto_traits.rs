//! The auto traits of the public types: a line for each type.

use std::panic::{RefUnwindSafe, UnwindSafe};

use tower_fixed_window::key::*;
use tower_fixed_window::store::*;
use tower_fixed_window::*;

/// Tells whether a type has a trait: an associated constant of the type hides that of a trait.
macro_rules! has {
    ($type:ty: $trait:path) => {{
        #[allow(dead_code)]
        struct Is<T>(T);
        #[allow(dead_code)]
        impl<T: $trait> Is<T> {
            const YES: bool = true;
        }
        #[allow(dead_code)]
        trait No {
            const YES: bool = false;
        }
        impl<T> No for T {}
        if <Is<$type>>::YES { concat!(" ", stringify!($trait)) } else { "" }
    }};
}

macro_rules! table {
    ($($type:ty,)*) => {
        [$((
            stringify!($type),
            [
                has!($type: Send),
                has!($type: Sync),
                has!($type: Unpin),
                has!($type: UnwindSafe),
                has!($type: RefUnwindSafe),
            ].concat(),
        )),*]
    };
}

/// The types that exist without features.
pub(crate) fn table() -> String {
    let table = table![
        Account<'static>,
        Adjust<'static>,
        Calendar,
        Charge<'static>,
        CostMeter,
        Decision,
        EmptyBody,
        FixedWindow<()>,
        FixedWindowLayer,
        GitHubBody,
        Grpc,
        Headers,
        Key,
        Limit,
        Limiter,
        Limits,
        Line<'static>,
        ManualClock,
        MemoryStore,
        MissingKey,
        NearLimit<'static>,
        OnStoreFailure,
        OwnedAdjust,
        OwnedCharge,
        ParseQuotaError,
        PeerAddr,
        Plan,
        ProblemJson,
        Quota,
        Quotas,
        RateLimitEndpoint,
        RateLimited,
        Reason,
        Receipt,

        Refused,
        RefusedKey,
        RefusedRoute,
        Rejection<'static>,
        Remote,
        Reply<()>,
        ResponseFuture<RateLimitEndpoint, (), ProblemJson>,
        Scope,
        State,
        StoreError,
        SystemClock,
        TrueCost,
        Usage,
        Weekday,
        Windows,
    ];
    table.map(|(name, traits)| format!("{name}:{traits}\n")).concat()
}

#[allow(dead_code)]
fn main() {
    print!("{}", table());
}
