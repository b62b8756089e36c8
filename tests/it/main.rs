//! x
mod options;
mod queue;
mod support;
