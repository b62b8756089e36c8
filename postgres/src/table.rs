//! The table of counters and its statements: [`Table`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use tower_fixed_window::store::{CounterId, Counters, State, Write};
use tower_fixed_window::{Clock, Key, StoreError};

use crate::connection::{Link, Param};

/// How often a node deletes counters that have ended, and for how long these stay: a node may stand
/// still between its read and its write.
const BETWEEN_DELETIONS: u64 = 250;
const KEPT: u64 = 60_000;
/// How long a write waits for a row that somebody has locked, before it goes on without it: longer
/// than a statement of another node takes.
const LOCKED: &str = "20ms";
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
    insert_empty: String,
    swap_groups: String,
    delete_ended: String,
    reset: String,
}

impl Statements {
    /// None is prepared: a plan that the server kept from a time when the table was small would read
    /// all of it when it has grown. And a pooler may run each statement in another session.
    fn new(table: &str, commit: &str) -> Self {
        let row =
            |of: &str| format!("t.scope = {of}.scope AND t.key = {of}.key AND t.win = {of}.win");
        // A row that was inserted although there was something to compare it with: it had gone.
        let start = "CASE WHEN t.had_until IS NULL THEN t.start_ms END AS start_ms";
        // A look-up for each row, as a subquery with OFFSET or FOR UPDATE is not made a join.
        let read = format!(
            "SELECT c.start_ms, c.end_ms, c.used, c.until_ms, \
                 (extract(epoch FROM clock_timestamp()) * 1000)::bigint \
             FROM unnest($1, $2, $3) WITH ORDINALITY AS r(scope, key, win, i) \
             LEFT JOIN LATERAL (SELECT {start}, t.end_ms, t.used, t.until_ms \
                 FROM {table} t WHERE {by_row} OFFSET 0) c ON true \
             ORDER BY r.i",
            by_row = row("r")
        );
        // The primary key finds the rows, whatever the planner thinks of the table's size. Rows are
        // locked in the order of all nodes, each for as long as the statement takes.
        let swap = format!(
            "INSERT INTO {table} AS t (scope, key, win, start_ms, end_ms, used, until_ms, quota, \
                 had_start, had_end, had_used, had_until) \
             SELECT r.scope, r.key, r.win, r.start_ms, r.end_ms, r.used, r.until_ms, r.quota, \
                 r.had_start, r.had_end, r.had_used, r.had_until \
             FROM (SELECT set_config('synchronous_commit', '{commit}', true), \
                 set_config('lock_timeout', '{LOCKED}', true)) AS settings, \
                 unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) WITH ORDINALITY AS \
                 r(scope, key, win, had_start, had_end, had_used, had_until, \
                     start_ms, end_ms, used, until_ms, quota, i) ORDER BY r.i \
             ON CONFLICT (scope, key, win) DO UPDATE SET start_ms = excluded.start_ms, \
                 end_ms = excluded.end_ms, used = excluded.used, until_ms = excluded.until_ms, \
                 quota = excluded.quota, had_until = NULL \
             WHERE CASE WHEN excluded.had_until IS NULL \
                 THEN t.start_ms IS NULL OR t.had_until IS NOT NULL \
                 ELSE t.had_until IS NULL AND t.start_ms = excluded.had_start \
                     AND t.end_ms = excluded.had_end AND t.used = excluded.had_used \
                     AND t.until_ms = excluded.had_until END \
             RETURNING scope, key, win, had_until IS NULL"
        );
        let insert_empty = format!(
            "INSERT INTO {table} (scope, key, win, until_ms) \
             SELECT r.scope, r.key, r.win, $4 \
             FROM (SELECT set_config('lock_timeout', '{LOCKED}', true)) AS settings, \
                 unnest($1, $2, $3) AS r(scope, key, win) ORDER BY 1, 2, 3 \
             ON CONFLICT DO NOTHING"
        );
        // A row that another node writes at this moment is skipped, and its group is not written:
        // nobody waits for a lock with another one in his hands. Of the versions of a row, the lock
        // shows the last one, not that of the statement's snapshot.
        let swap_groups = format!(
            "WITH r AS MATERIALIZED (SELECT * FROM \
                 unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) WITH ORDINALITY AS \
                 r(scope, key, win, had_start, had_end, had_used, had_until, \
                     start_ms, end_ms, used, until_ms, quota, grp, i)), \
             locked AS MATERIALIZED (SELECT r.i, r.grp, t.is_there IS NOT NULL AND \
                 CASE WHEN r.had_until IS NULL THEN t.start_ms IS NULL \
                 ELSE coalesce(t.start_ms = r.had_start AND t.end_ms = r.had_end \
                     AND t.used = r.had_used AND t.until_ms = r.had_until, false) END AS is_same \
                 FROM r LEFT JOIN LATERAL (SELECT true AS is_there, {start}, t.end_ms, t.used, \
                     t.until_ms FROM {table} t WHERE {by_row} FOR UPDATE SKIP LOCKED) t ON true), \
             same AS MATERIALIZED (SELECT grp FROM locked GROUP BY grp HAVING bool_and(is_same)), \
             updated AS (UPDATE {table} t SET start_ms = r.start_ms, end_ms = r.end_ms, \
                 used = r.used, until_ms = r.until_ms, quota = r.quota, had_until = NULL \
                 FROM r JOIN same USING (grp) WHERE {by_row} RETURNING r.grp) \
             SELECT grp, set_config('synchronous_commit', '{commit}', true) FROM updated GROUP BY grp",
            by_row = row("r")
        );
        // The order is that of an index, so that no table is read for it.
        let delete_ended = format!(
            "DELETE FROM {table} t USING (SELECT scope, key, win FROM {table} \
                 WHERE until_ms < $1 ORDER BY until_ms LIMIT {DELETED} FOR UPDATE SKIP LOCKED) r WHERE {} RETURNING 1",
            row("r")
        );
        let reset = format!("DELETE FROM {table} WHERE scope = $1 AND key = $2");
        Self { read, swap, insert_empty, swap_groups, delete_ended, reset }
    }
}

impl Table {
    pub(crate) fn new(
        link: Link,
        table: &str,
        waits_for_disk: bool,
        clock: Option<Arc<dyn Clock>>,
    ) -> Self {
        let commit = if waits_for_disk { "on" } else { "off" };
        Self {
            link: Arc::new(link),
            clock,
            statements: Arc::new(Statements::new(table, commit)),
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
                let deleted = this.link.write(&this.statements.delete_ended, &[ended]).await;
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
        let rows = self.link.read(&self.statements.read, &names.params()).await?;
        let mut states = Vec::with_capacity(rows.len());
        let mut now = 0;
        for row in &rows {
            let start: Option<i64> = column(row, 0)?;
            let mut state = State::default();
            if let Some(start) = start {
                (state.start, state.end) = (start, column(row, 1)?);
                (state.used, state.until) = (column(row, 2)?, column(row, 3)?);
            }
            states.push(start.map(|_| state));
            now = now.max(column::<i64>(row, 4)?.max(0) as u64);
        }
        let now = self.clock.as_ref().map_or(now, |clock| clock.now_ms());
        self.delete_ended(now);
        Ok((now, states))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<Vec<bool>, StoreError> {
        let mut written = vec![false; groups.len()];
        let of = |is_alone: bool| {
            groups.iter().enumerate().filter(move |(_, g)| (g.len() == 1) == is_alone)
        };
        let alone: Vec<_> = of(true).map(|(place, group)| (place, &group[0])).collect();
        let together = of(false).flat_map(|(place, group)| group.iter().map(move |w| (place, w)));
        let together: Vec<_> = together.collect();
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
        self.link.write(&self.statements.reset, &params).await?;
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
        let rows = match self.link.write(&self.statements.swap, &columns.params()).await {
            // Nothing was written. A client that has locked a row holds up no other one.
            Err(failure) if failure.is_locked() => return self.swap_groups(writes, written).await,
            Err(failure) if failure.is_conflict() => return Ok(()),
            answer => answer?,
        };
        // In the order of the writes, without those that were not made.
        let mut writes = writes.iter().zip(&columns.names.keys);
        for row in &rows {
            let (scope, key, win, is_written): (&str, &str, &str, bool) =
                (column(row, 0)?, column(row, 1)?, column(row, 2)?, column(row, 3)?);
            let is_this = |((_, write), of): &(&(usize, &Write), &String)| {
                (&*write.counter.scope, of.as_str(), &*write.counter.window) == (scope, key, win)
            };
            if let Some(((place, _), _)) = writes.find(is_this) {
                written[*place] = is_written;
            }
        }
        Ok(())
    }

    /// Writes groups of rows, each as a whole or not at all.
    async fn swap_groups(
        &self,
        writes: &[(usize, &Write)],
        written: &mut [bool],
    ) -> Result<(), StoreError> {
        // Each row has to be there, to be locked.
        let missing = writes.iter().map(|(_, write)| *write).filter(|write| write.had.is_none());
        let missing = Names::of(missing.map(|write| &write.counter));
        if !missing.scopes.is_empty() {
            let until = writes.iter().map(|(_, write)| write.state.until).max().unwrap_or_default();
            let [scopes, keys, windows] = missing.params();
            let params = [scopes, keys, windows, (&until, Type::INT8)];
            match self.link.write(&self.statements.insert_empty, &params).await {
                Err(failure) if failure.is_locked() || failure.is_conflict() => return Ok(()),
                answer => _ = answer?,
            }
        }
        let columns = Columns::of(writes);
        let places: Vec<_> = writes.iter().map(|(place, _)| *place as i32).collect();
        let mut params = columns.params();
        params.push((&places, Type::INT4_ARRAY));
        let rows = match self.link.write(&self.statements.swap_groups, &params).await {
            Err(failure) if failure.is_conflict() => return Ok(()),
            answer => answer?,
        };
        for row in &rows {
            let place: i32 = column(row, 0)?;
            if let Some(written) = written.get_mut(place as usize) {
                *written = true;
            }
        }
        Ok(())
    }
}

/// The columns of rows to write: their names, what was read, and what is new.
struct Columns<'a> {
    names: Names<'a>,
    had: [Vec<Option<i64>>; 4],
    new: [Vec<i64>; 4],
    quotas: Vec<String>,
}

impl<'a> Columns<'a> {
    fn of(writes: &[(usize, &'a Write)]) -> Self {
        const STATE: [fn(&State) -> i64; 4] =
            [|state| state.start, |state| state.end, |state| state.used, |state| state.until];
        let writes = || writes.iter().map(|(_, write)| *write);
        Self {
            names: Names::of(writes().map(|write| &write.counter)),
            had: STATE.map(|of| writes().map(|write| write.had.as_ref().map(of)).collect()),
            new: STATE.map(|of| writes().map(|write| of(&write.state)).collect()),
            quotas: writes().map(|write| write.quota.to_string()).collect(),
        }
    }

    fn params(&self) -> Vec<Param<'_>> {
        let mut params: Vec<Param<'_>> = self.names.params().into();
        params.extend(self.had.iter().map(|column| -> Param<'_> { (column, Type::INT8_ARRAY) }));
        params.extend(self.new.iter().map(|column| -> Param<'_> { (column, Type::INT8_ARRAY) }));
        params.push((&self.quotas, Type::TEXT_ARRAY));
        params
    }
}

fn column<'a, T: FromSql<'a>>(row: &'a Row, place: usize) -> Result<T, StoreError> {
    row.try_get(place).map_err(|error| {
        StoreError::with_source("the table tfw_counters has other columns than it should", error)
    })
}
