//! A table that reads and writes counters, of which `Shared` makes a store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tower_fixed_window::store::{CounterId, Counters, Shared, State, Write};
use tower_fixed_window::{Clock, Key, ManualClock, StoreError};
use tower_fixed_window_conformance::conformance;

#[derive(Clone)]
struct Table {
    clock: ManualClock,
    rows: Arc<Mutex<HashMap<CounterId, State>>>,
}

impl Table {
    fn new(clock: ManualClock) -> Self {
        Self { clock, rows: Arc::default() }
    }
}

impl Counters for Table {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let order =
            |of: &CounterId| (of.scope.clone(), of.key.as_bytes().to_vec(), of.window.clone());
        assert!(counters.is_sorted_by(|one, other| order(one) < order(other)), "distinct, sorted");
        tokio::task::yield_now().await;
        let rows = self.rows.lock().expect("no panic");
        Ok((self.clock.now_ms(), counters.iter().map(|of| rows.get(of).copied()).collect()))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<Vec<bool>, StoreError> {
        assert!(groups.iter().all(|group| !group.is_empty()), "something to write");
        tokio::task::yield_now().await;
        let mut rows = self.rows.lock().expect("no panic");
        let swap = |group: &Vec<Write>| {
            let is_unchanged = |write: &Write| rows.get(&write.counter).copied() == write.had;
            let is_unchanged = group.iter().all(is_unchanged);
            if is_unchanged {
                rows.extend(group.iter().map(|write| (write.counter.clone(), write.state)));
            }
            is_unchanged
        };
        Ok(groups.iter().map(swap).collect())
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        let is_other = |of: &CounterId| *of.scope != *scope || of.key != *key;
        self.rows.lock().expect("no panic").retain(|counter, _| is_other(counter));
        Ok(())
    }
}

#[test]
fn a_table_passes_the_suite() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let new = |clock| {
        let table = Table::new(clock);
        [table.clone(), table].map(Shared::around)
    };
    conformance(new, |job| runtime.block_on(job));
}
