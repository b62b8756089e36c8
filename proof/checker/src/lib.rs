//! Checks what a rate limiter has let pass against what it promises, from outside: by the times at which
//! requests were sent and answered. See PROOF.md.

pub mod check;
pub mod history;
pub mod line;
pub mod several;
mod spans;
