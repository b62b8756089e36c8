//! The table of counters and its statements: [`Table`].

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio_postgres::types::Type;
use tower_fixed_window::store::{CounterId, Counters, State, Write};
use tower_fixed_window::{Clock, Key, StoreError};

use crate::connection::{Link, Param};

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
    insert_empty: String,
    write: String,
    delete_ended: String,
    reset: String,
}

impl Statements {
    /// None is prepared: a plan that the server kept from a time when the table was small would read
    /// all of it when it has grown. And an unnamed statement passes PgBouncer.
    fn new(table: &str, commit: &str) -> Self {
        let row =
            |of: &str| format!("t.scope = {of}.scope AND t.key = {of}.key AND t.win = {of}.win");
        // A look-up for each row, as a subquery with OFFSET or FOR UPDATE is not made a join.
        let read = format!(
            "SELECT c.start_ms, c.end_ms, c.used, c.until_ms, \
                 (extract(epoch FROM clock_timestamp()) * 1000)::bigint \
             FROM unnest($1, $2, $3) WITH ORDINALITY AS r(scope, key, win, i) \
             LEFT JOIN LATERAL (SELECT t.start_ms, t.end_ms, t.used, t.until_ms FROM {table} t \
                 WHERE {} OFFSET 0) c ON true \
             ORDER BY r.i",
            row("r")
        );
        let insert_empty = format!(
            "INSERT INTO {table} (scope, key, win, until_ms) \
             SELECT r.scope, r.key, r.win, $4 \
             FROM unnest($1, $2, $3) WITH ORDINALITY AS r(scope, key, win, i) ORDER BY r.i \
             ON CONFLICT DO NOTHING"
        );
        // A row that another node writes at this moment is skipped, and its group is not written:
        // nobody waits for a lock, and so for nobody's deadlock. Of the versions of a row, the lock
        // shows the last one, not that of the statement's snapshot. A group of several counters is
        // written only if all have a row to lock; of those that have none, one node's INSERT wins.
        let write = format!(
            "WITH r AS MATERIALIZED (SELECT * FROM \
                 unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) WITH ORDINALITY AS \
                 r(scope, key, win, grp, had_start, had_end, had_used, had_until, \
                     start_ms, end_ms, used, until_ms, quota, i)), \
             locked AS MATERIALIZED (SELECT r.i, r.grp, t.until_ms IS NOT NULL AS is_there, \
                 CASE WHEN r.had_until IS NULL THEN t.start_ms IS NULL \
                 ELSE coalesce(t.start_ms = r.had_start AND t.end_ms = r.had_end \
                     AND t.used = r.had_used AND t.until_ms = r.had_until, false) END AS is_same \
                 FROM r LEFT JOIN LATERAL (SELECT t.start_ms, t.end_ms, t.used, t.until_ms FROM {table} t \
                     WHERE {by_row} FOR UPDATE SKIP LOCKED) t ON true), \
             good AS MATERIALIZED (SELECT grp FROM locked GROUP BY grp \
                 HAVING bool_and(is_same) AND (count(*) = 1 OR bool_and(is_there))), \
             updated AS (UPDATE {table} t SET start_ms = r.start_ms, end_ms = r.end_ms, used = r.used, \
                 until_ms = r.until_ms, quota = r.quota \
                 FROM r JOIN locked USING (i) JOIN good ON good.grp = r.grp \
                 WHERE is_there AND {by_row} RETURNING r.grp), \
             inserted AS (INSERT INTO {table} (scope, key, win, start_ms, end_ms, used, until_ms, quota) \
                 SELECT r.scope, r.key, r.win, r.start_ms, r.end_ms, r.used, r.until_ms, r.quota \
                 FROM r JOIN locked USING (i) JOIN good ON good.grp = r.grp \
                 WHERE NOT is_there ORDER BY r.i ON CONFLICT DO NOTHING RETURNING scope, key, win) \
             SELECT grp, set_config('synchronous_commit', '{commit}', true) FROM updated \
             UNION SELECT r.grp, '' FROM r JOIN inserted USING (scope, key, win)",
            by_row = row("r")
        );
        // The order is that of an index, so that no table is read for it.
        let delete_ended = format!(
            "DELETE FROM {table} t USING (SELECT scope, key, win FROM {table} \
                 WHERE until_ms < $1 ORDER BY until_ms LIMIT {DELETED} FOR UPDATE SKIP LOCKED) r WHERE {} RETURNING 1",
            row("r")
        );
        let reset = format!("DELETE FROM {table} WHERE scope = $1 AND key = $2");
        Self { read, insert_empty, write, delete_ended, reset }
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
            let start: Option<i64> = row.try_get(0).map_err(unreadable)?;
            let mut state = State::default();
            if let Some(start) = start {
                state.start = start;
                state.end = row.try_get(1).map_err(unreadable)?;
                state.used = row.try_get(2).map_err(unreadable)?;
                state.until = row.try_get(3).map_err(unreadable)?;
            }
            states.push(start.map(|_| state));
            let read_at: i64 = row.try_get(4).map_err(unreadable)?;
            now = now.max(read_at.max(0) as u64);
        }
        let now = self.clock.as_ref().map_or(now, |clock| clock.now_ms());
        self.delete_ended(now);
        Ok((now, states))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<Vec<bool>, StoreError> {
        let writes = || groups.iter().flatten();
        let latest = writes().map(|write| write.state.until).max().unwrap_or_default();
        // Rows to lock, for groups of several counters.
        let missing = groups.iter().filter(|group| group.len() > 1).flatten();
        let missing = missing.filter(|write| write.had.is_none()).map(|write| &write.counter);
        let missing = Names::of(missing);
        if !missing.scopes.is_empty() {
            let [scopes, keys, windows] = missing.params();
            let params = [scopes, keys, windows, (&latest, Type::INT8)];
            self.link.write(&self.statements.insert_empty, &params).await?;
        }

        let names = Names::of(writes().map(|write| &write.counter));
        let places = groups.iter().zip(0..);
        let places: Vec<i32> = places.flat_map(|(group, i)| group.iter().map(move |_| i)).collect();
        const COLUMNS: [fn(&State) -> i64; 4] =
            [|state| state.start, |state| state.end, |state| state.used, |state| state.until];
        let had = COLUMNS.map(|of| -> Vec<Option<i64>> {
            writes().map(|write| write.had.as_ref().map(of)).collect()
        });
        let new =
            COLUMNS.map(|of| -> Vec<i64> { writes().map(|write| of(&write.state)).collect() });
        let quotas: Vec<_> = writes().map(|write| write.quota.to_string()).collect();
        let mut params: Vec<Param<'_>> = names.params().into();
        params.push((&places, Type::INT4_ARRAY));
        params.extend(had.iter().map(|column| -> Param<'_> { (column, Type::INT8_ARRAY) }));
        params.extend(new.iter().map(|column| -> Param<'_> { (column, Type::INT8_ARRAY) }));
        params.push((&quotas, Type::TEXT_ARRAY));
        let rows = match self.link.write(&self.statements.write, &params).await {
            // Nothing was written.
            Err(failure) if failure.is_conflict() => return Ok(vec![false; groups.len()]),
            answer => answer?,
        };
        let written = rows.iter().map(|row| row.try_get::<_, i32>(0));
        let written: HashSet<i32> = written.collect::<Result<_, _>>().map_err(unreadable)?;
        Ok((0..groups.len() as i32).map(|group| written.contains(&group)).collect())
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        let key = key.readable().to_string();
        let params: [Param<'_>; 2] = [(&scope, Type::TEXT), (&key, Type::TEXT)];
        self.link.write(&self.statements.reset, &params).await?;
        Ok(())
    }
}

fn unreadable(error: tokio_postgres::Error) -> StoreError {
    StoreError::with_source("the table of counters has other columns than it should have", error)
}
