//! This crate beside its peers: see README.md. What is measured is in [`layers`] and [`stores`], and
//! how, in a module for each kind of number.

pub mod batch;
pub mod counting;
pub mod edge;
pub mod http;
pub mod keys;
pub mod layers;
pub mod memory;
pub mod report;
pub mod stores;
pub mod timing;
