//! A look at every state of a model.

use std::fmt;
use std::hash::Hash;
use std::time::{Duration, Instant};

use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// A model whose safeties can be left out.
pub trait Breakable: Model {
    /// The promise that is broken by what is left out.
    fn breaks(&self) -> Option<&'static str>;
}

/// The result of a search.
#[derive(Debug)]
pub struct Looked {
    pub states: usize,
    /// The longest of the shortest paths to a state, in steps.
    pub depth: usize,
    pub took: Duration,
    /// The promises that don't hold, each with the steps that break it.
    pub broken: Vec<(&'static str, Vec<String>)>,
    /// The states that should be reached and never are.
    pub never: Vec<&'static str>,
}

/// Visits every state, or with a fault, stops at the first broken promise.
pub fn look<M>(model: &M) -> Looked
where
    M: Breakable<State: fmt::Debug + Hash + Clone + PartialEq + Send + Sync, Action: Clone>,
    M: Clone + Send + Sync + 'static,
    M::Action: fmt::Debug + PartialEq + Send + Sync,
{
    let began = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (enough, threads) = match model.breaks() {
        // A single thread, so that the path is always the same.
        Some(promise) => (HasDiscoveries::AnyOf([promise].into()), 1),
        None => (HasDiscoveries::AnyFailures, cores),
    };
    let checker = model.clone().checker().threads(threads).finish_when(enough);
    let checker = checker.spawn_bfs().join();
    let found = checker.discoveries();
    let (mut broken, mut never) = (Vec::new(), Vec::new());
    for property in model.properties() {
        let way = found.get(property.name);
        match property.expectation {
            Expectation::Sometimes if way.is_none() => never.push(property.name),
            Expectation::Sometimes => {}
            _ => broken.extend(way.map(|way| {
                let steps =
                    way.clone().into_actions().iter().map(|step| format!("{step:?}")).collect();
                (property.name, steps)
            })),
        }
    }
    Looked {
        states: checker.unique_state_count(),
        depth: checker.max_depth(),
        took: began.elapsed(),
        broken,
        never,
    }
}
