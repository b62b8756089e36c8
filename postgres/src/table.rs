//! The table of counters and its statements: [`Table`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use tower_fixed_window::store::{CounterId, Counters, State, Write};
use tower_fixed_window::{Clock, Key, StoreError};

use crate::connection::{Failure, Link, Param};

/// How often a node deletes counters that have ended, and for how long these stay: a node may stand
/// still between its read and its write.
const BETWEEN_DELETIONS: u64 = 250;
const KEPT: u64 = 60_000;
/// Deleted in one statement.
const DELETED: usize = 1_000;

#[derive(Clone)]
pub(crate) struct Table {
    pub(crate) link: Arc<Link>,
    clock: Option<Arc<dyn Clock>>,
    statements: Arc<Statements>,
    /// When counters that have ended are deleted again, by the server's clock.
    next_deletion: Arc<AtomicU64>,
}

struct Statements {
    read: String,
    swap: String,
    swap_groups: String,
    delete_ended: String,
    reset: String,
}

impl Statements {
    /// `of`: the schema and a point, or nothing. What takes the planner long is in the functions of
    /// the schema.
    fn new(of: &str, commit: &str) -> Self {
        let commit = format!("set_config('synchronous_commit', '{commit}', true)");
        let arrays = "$1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12";
        Self {
            read: format!("SELECT * FROM {of}tfw_read($1, $2, $3)"),
            swap: format!("SELECT {of}tfw_swap({arrays}), {commit}"),
            swap_groups: format!("SELECT {of}tfw_swap_groups({arrays}, $13), {commit}"),
            // The order is that of an index, so that no table is read for it.
            delete_ended: format!(
                "DELETE FROM {of}tfw_counters t USING (SELECT scope, key, win \
                     FROM {of}tfw_counters WHERE until_ms < $1 \
                     ORDER BY until_ms LIMIT {DELETED} FOR UPDATE SKIP LOCKED) r \
                 WHERE t.scope = r.scope AND t.key = r.key AND t.win = r.win RETURNING 1"
            ),
            reset: format!("DELETE FROM {of}tfw_counters WHERE scope = $1 AND key = $2"),
        }
    }
}

impl Table {
    pub(crate) fn new(
        link: Link,
        schema: &str,
        waits_for_disk: bool,
        clock: Option<Arc<dyn Clock>>,
    ) -> Self {
        let commit = if waits_for_disk { "on" } else { "off" };
        Self {
            link: Arc::new(link),
            clock,
            statements: Arc::new(Statements::new(schema, commit)),
            next_deletion: Arc::default(),
        }
    }

    /// As often as it is due, while counters are used. Nobody waits for it. A test's clock may step
    /// back to before the end of what would be deleted.
    fn delete_ended(&self, now: u64) {
        if self.clock.is_some() {
            return;
        }
        let next = self.next_deletion.load(Relaxed);
        // A clock that has stepped back makes it due, too.
        let is_due = now >= next || next - now > BETWEEN_DELETIONS;
        let of_this = || {
            let after = now.saturating_add(BETWEEN_DELETIONS);
            self.next_deletion.compare_exchange(next, after, Relaxed, Relaxed).is_ok()
        };
        if is_due && of_this() {
            let this = self.clone();
            tokio::spawn(async move {
                let ended = now.saturating_sub(KEPT) as i64;
                let ended: Param<'_> = (&ended, Type::INT8);
                let deleted = this.link.ask(&this.statements.delete_ended, &[ended]).await;
                if deleted.is_ok_and(|deleted| deleted.len() == DELETED) {
                    this.next_deletion.store(0, Relaxed);
                }
            });
        }
    }
}

/// The columns that name rows.
struct Names<'a> {
    scopes: Vec<&'a str>,
    keys: Vec<String>,
    windows: Vec<&'a str>,
}

impl<'a> Names<'a> {
    fn of(counters: impl Iterator<Item = &'a CounterId> + Clone) -> Self {
        Self {
            scopes: counters.clone().map(|counter| &*counter.scope).collect(),
            keys: counters.clone().map(|counter| counter.key.readable().to_string()).collect(),
            windows: counters.map(|counter| &*counter.window).collect(),
        }
    }

    fn params(&self) -> [Param<'_>; 3] {
        [
            (&self.scopes, Type::TEXT_ARRAY),
            (&self.keys, Type::TEXT_ARRAY),
            (&self.windows, Type::TEXT_ARRAY),
        ]
    }
}

impl Counters for Table {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let names = Names::of(counters.iter());
        let row = self.link.ask_again(&self.statements.read, &names.params()).await?;
        let row = row.first();
        let now = column::<i64>(row, 0)?.max(0) as u64;
        let mut columns = Vec::with_capacity(4);
        for place in 1..=4 {
            columns.push(column::<Vec<Option<i64>>>(row, place)?);
        }
        let state = |place: usize| {
            let mut state = State::default();
            let fields =
                [&mut state.start, &mut state.end, &mut state.used, &mut state.until].into_iter();
            for (field, column) in fields.zip(&columns) {
                *field = (*column.get(place)?)?;
            }
            Some(state)
        };
        let states = (0..counters.len()).map(state).collect();
        let now = self.clock.as_ref().map_or(now, |clock| clock.now_ms());
        self.delete_ended(now);
        Ok((now, states))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<Vec<bool>, StoreError> {
        let mut written = vec![false; groups.len()];
        let of = |is_alone: bool| {
            let groups = groups.iter().enumerate().filter(move |(_, g)| (g.len() == 1) == is_alone);
            groups.flat_map(|(place, group)| group.iter().map(move |w| (place, w)))
        };
        let (alone, together): (Vec<_>, Vec<_>) = (of(true).collect(), of(false).collect());
        if !alone.is_empty() {
            self.swap(&alone, &mut written).await?;
        }
        if !together.is_empty() {
            self.swap_groups(&together, &mut written).await?;
        }
        Ok(written)
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        let key = key.readable().to_string();
        let params: [Param<'_>; 2] = [(&scope, Type::TEXT), (&key, Type::TEXT)];
        self.link.ask_again(&self.statements.reset, &params).await?;
        Ok(())
    }
}

impl Table {
    /// Writes rows, each by itself.
    async fn swap(
        &self,
        writes: &[(usize, &Write)],
        written: &mut [bool],
    ) -> Result<(), StoreError> {
        let columns = Columns::of(writes);
        match self.link.ask(&self.statements.swap, &columns.params()).await {
            // Nothing was written. A client that has locked a row holds up no other one.
            Err(failure) if failure.is_locked() => self.swap_groups(writes, written).await,
            answer => note_written(answer, writes, written),
        }
    }

    /// Writes groups of rows, each as a whole or not at all.
    async fn swap_groups(
        &self,
        writes: &[(usize, &Write)],
        written: &mut [bool],
    ) -> Result<(), StoreError> {
        let columns = Columns::of(writes);
        let groups: Vec<_> = writes.iter().map(|(group, _)| *group as i32).collect();
        let mut params = columns.params();
        params.push((&groups, Type::INT4_ARRAY));
        let answer = self.link.ask(&self.statements.swap_groups, &params).await;
        note_written(answer, writes, written)
    }
}

/// The answer has the places of the rows that were written.
fn note_written(
    answer: Result<Vec<Row>, Failure>,
    writes: &[(usize, &Write)],
    written: &mut [bool],
) -> Result<(), StoreError> {
    let rows = match answer {
        // Nothing was written, and it is decided anew.
        Err(failure) if failure.is_conflict() || failure.is_locked() => return Ok(()),
        answer => answer?,
    };
    let places: Option<Vec<i32>> = column(rows.first(), 0)?;
    for place in places.unwrap_or_default() {
        if let Some((group, _)) = writes.get(place as usize - 1) {
            written[*group] = true;
        }
    }
    Ok(())
}

/// The columns of rows to write: their names, what was read, and what is new.
struct Columns<'a> {
    names: Names<'a>,
    quotas: Vec<String>,
    had: [Vec<i64>; 4],
    new: [Vec<i64>; 4],
}

impl<'a> Columns<'a> {
    fn of(writes: &[(usize, &'a Write)]) -> Self {
        const STATE: [fn(&State) -> i64; 4] =
            [|state| state.start, |state| state.end, |state| state.used, |state| state.until];
        let writes = || writes.iter().map(|(_, write)| *write);
        Self {
            names: Names::of(writes().map(|write| &write.counter)),
            quotas: writes().map(|write| write.quota.to_string()).collect(),
            // No state ends before 1970: below zero, there was none.
            had: STATE.map(|of| writes().map(|write| write.had.as_ref().map_or(-1, of)).collect()),
            new: STATE.map(|of| writes().map(|write| of(&write.state)).collect()),
        }
    }

    fn params(&self) -> Vec<Param<'_>> {
        let mut params: Vec<Param<'_>> = self.names.params().into();
        params.push((&self.quotas, Type::TEXT_ARRAY));
        let numbers = self.had.iter().chain(&self.new);
        params.extend(numbers.map(|column| -> Param<'_> { (column, Type::INT8_ARRAY) }));
        params
    }
}

fn column<'a, T: FromSql<'a>>(row: Option<&'a Row>, place: usize) -> Result<T, StoreError> {
    let other = "the functions of tfw_counters are another version's: call `create_schema()`";
    let row = row.ok_or_else(|| StoreError::new(other))?;
    row.try_get(place).map_err(|error| StoreError::with_source(other, error))
}
