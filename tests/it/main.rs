//! What the layer promises over HTTP: one module for each promise.

mod options;
mod queue;
mod speech;
mod support;
