//! The table of counters and its statements: [`Table`].

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio_postgres::types::{FromSql, Type};
use tokio_postgres::{Config, Row, SimpleQueryMessage};
use tower_fixed_window::store::{CounterId, Counters, State, Write};
use tower_fixed_window::{Clock, Key, StoreError};

use crate::connection::{Failure, Link, Param, lock};

/// How often a node deletes counters that have ended, and for how long these stay: a node may stand
/// still between its read and its write.
const BETWEEN_DELETIONS: Duration = Duration::from_millis(250);
const KEPT: u64 = 60_000;
/// How long nothing is deleted after a deletion that failed: it may have read much in vain.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Deleted in one statement: charges wait behind it.
const DELETED: usize = 250;
const HOUR: u64 = 3_600_000;
const TEXTS: Type = Type::TEXT_ARRAY;

#[derive(Clone)]
pub(crate) struct Table {
    pub(crate) link: Arc<Link>,
    /// The schema and a point, or nothing where the search path finds the table.
    pub(crate) of: String,
    /// `synchronous_commit` of charges.
    pub(crate) commit: &'static str,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    /// When counters that have ended are deleted again, the end of those that were deleted last, and
    /// when this went over all of them.
    pub(crate) deletion: Arc<Mutex<(Option<Instant>, u64, u64)>>,
}

impl Table {
    pub(crate) fn new(config: Config) -> Self {
        let (of, clock, deletion) = Default::default();
        Self { link: Arc::new(Link::new(config)), of, commit: "off", clock, deletion }
    }

    /// The same for stores of one table, as far as that is known.
    pub(crate) fn identity(&self) -> String {
        let config = &self.link.config;
        let database = config.get_dbname().or(config.get_user());
        // Without a schema the search path finds the table: it may be another one for each user.
        let path = self.of.is_empty().then(|| (config.get_user(), config.get_options()));
        let addresses = (config.get_hostaddrs(), config.get_ports());
        format!("{:?}", (&self.link.server, addresses, database, &self.of, path))
    }

    /// The time of an answer. As often as it is due, what has ended before is deleted, and nobody
    /// waits for it. A test's clock may step back to before the end of what would be deleted.
    fn time(&self, of_server: i64) -> u64 {
        let (now, mut deletion) = (of_server.max(0) as u64, lock(&self.deletion));
        if self.clock.is_none() && deletion.0.is_none_or(|due| due <= Instant::now()) {
            deletion.0 = Some(Instant::now() + AFTER_FAILURE);
            tokio::spawn(self.clone().delete_ended_before(now.saturating_sub(KEPT)));
        }
        self.clock.as_ref().map_or(now, |clock| clock.now_ms())
    }

    /// While a transaction stays open elsewhere, the index keeps each row that was deleted, so this
    /// does not walk it from its start, but once an hour for rows that were locked, and not for
    /// long. The order is that of the index, so that no table is read for it. A time that ends with
    /// the statement is reported by one that follows, which must not be a charge's: without a time
    /// of its own, the last one meets each such report.
    async fn delete_ended_before(self, to: u64) {
        let (_, since, all_at) = *lock(&self.deletion);
        let from = if to.abs_diff(all_at) < HOUR { since.min(to) } else { 0 };
        let of = &self.of;
        let sql = format!(
            "SET LOCAL statement_timeout = 50; SET LOCAL synchronous_commit = off; \
             SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; \
             DELETE FROM {of}tfw_counters WHERE ctid = ANY (ARRAY( \
                 SELECT ctid FROM {of}tfw_counters WHERE until_ms >= {from} AND until_ms < {to} \
                 ORDER BY until_ms LIMIT {DELETED} FOR UPDATE SKIP LOCKED)) RETURNING until_ms; \
             SET LOCAL statement_timeout = 0; SET LOCAL statement_timeout = 0"
        );
        let Ok(answer) = self.link.run(&sql).await else { return };
        let ends = Vec::<u64>::from_iter(answer.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0)?.parse().ok(),
            _ => None,
        }));
        let last = ends.iter().max().filter(|_| ends.len() == DELETED);
        let due = last.is_none().then(|| Instant::now() + BETWEEN_DELETIONS);
        let all_at = if from == 0 { to } else { all_at };
        *lock(&self.deletion) = (due, *last.unwrap_or(&to), all_at);
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
            keys: counters.clone().map(|counter| text(&counter.key)).collect(),
            windows: counters.map(|counter| &*counter.window).collect(),
        }
    }

    fn params(&self) -> [Param<'_>; 3] {
        [(&self.scopes, TEXTS), (&self.keys, TEXTS), (&self.windows, TEXTS)]
    }
}

impl Counters for Table {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let names = Names::of(counters.iter());
        let row = self.read_row(&names).await?;
        let row = row.first();
        let now = self.time(column(row, 0)?);
        let column = |place| column::<Vec<Option<i64>>>(row, place);
        let columns = [column(1)?, column(2)?, column(3)?, column(4)?];
        let state = |place: usize| {
            let number = |of: usize| columns[of].get(place).copied().flatten();
            let mut state = State::default();
            (state.start, state.end) = (number(0)?, number(1)?);
            (state.used, state.until) = (number(2)?, number(3)?);
            Some(state)
        };
        let states = (0..counters.len()).map(state).collect();
        Ok((now, states))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<(u64, Vec<Option<u64>>), StoreError> {
        let each = groups.iter().enumerate();
        let mut rows = Vec::from_iter(each.flat_map(|(i, of)| of.iter().map(move |row| (i, row))));
        rows.sort_by_key(|&(_, write)| order(&write.counter));
        let (mut answer, mut tries) = (self.swap(&rows, |of| groups[of].len() > 1).await, 0..2);
        // Nothing was written. A client that has locked a row holds up no other one: it is skipped.
        while answer.as_ref().is_err_and(Failure::is_locked) && tries.next().is_some() {
            answer = self.swap(&rows, |_| true).await;
        }
        let written: Vec<i64> = match answer {
            // Nothing was written, and it is decided anew, unless the table is locked.
            Err(failure) if failure.is_conflict() => Vec::new(),
            // The time, the places of the rows that were written, and what others had taken of each.
            answer => column(answer?.first(), 0)?,
        };
        let mut done = vec![None; groups.len()];
        let Some((now, written)) = written.split_first() else { return Ok((0, done)) };
        let (places, more) = written.split_at(written.len() / 2);
        for (place, more) in places.iter().zip(more) {
            if let Some((of, _)) = rows.get(*place as usize - 1) {
                done[*of] = Some(*more as u64);
            }
        }
        Ok((self.time(*now), done))
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        // A reset that was done late would take the counts of others with it. So the connection is
        // checked before, and it is sent once, or again if nothing was done. Charges go over the same
        // connection, and wait for none of the pauses.
        self.read_row(&Names::of([].iter())).await?;
        // A deadline that is missed would be the server's failure, however far it is.
        let ends = Instant::now() + (self.link.patience() / 4).min(Duration::from_millis(60));
        let (key, sql) = (text(key), format!("SELECT {}tfw_reset($1, $2)", self.of));
        loop {
            match self.link.ask(&sql, &[(&scope, Type::TEXT), (&key, Type::TEXT)]).await {
                Err(of) if !of.is_locked() && !of.is_conflict() => return Err(of.into()),
                Err(of) if ends <= Instant::now() => return Err(StoreError::from(of).of_key()),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                Ok(_) => return Ok(()),
            }
        }
    }
}

impl Table {
    async fn read_row(&self, names: &Names<'_>) -> Result<Vec<Row>, Failure> {
        let sql = format!("SELECT * FROM {}tfw_read($1, $2, $3)", self.of);
        self.link.ask_again(&sql, &names.params()).await
    }

    async fn swap(
        &self,
        rows: &[(usize, &Write)],
        is_group: impl Fn(usize) -> bool,
    ) -> Result<Vec<Row>, Failure> {
        let names = Names::of(rows.iter().map(|(_, write)| &write.counter));
        let quotas: Vec<_> = rows.iter().map(|(_, write)| write.quota.to_string()).collect();
        let group = |(of, _): &(usize, _)| is_group(*of).then_some(*of as i32);
        let mut groups: Vec<_> = rows.iter().map(group).collect();
        groups.truncate(groups.iter().rposition(Option::is_some).map_or(0, |last| last + 1));
        // No state ends before 1970: below zero, there was none.
        let had = |write: &Write| write.had.as_ref().map_or([0, 0, 0, -1], numbers);
        let had = |write: &Write| had(write).into_iter().chain([write.room as i64]);
        let had: Vec<_> = rows.iter().flat_map(|(_, write)| had(write)).collect();
        let new: Vec<_> = rows.iter().flat_map(|(_, write)| numbers(&write.state)).collect();
        let mut params = Vec::from(names.params());
        params.push((&quotas, TEXTS));
        params.push((&groups, Type::INT4_ARRAY));
        params.extend([&had, &new].map(|numbers| -> Param<'_> { (numbers, Type::INT8_ARRAY) }));
        let sql = format!(
            "SELECT {}tfw_write($1, $2, $3, $4, $5, $6, $7), \
             set_config('synchronous_commit', '{}', true)",
            self.of, self.commit
        );
        self.link.ask(&sql, &params).await
    }
}

/// An index takes no row of more than 2,704 bytes. No other key begins as a hash does.
fn text(key: &Key) -> String {
    let text = key.readable();
    if text.len() <= 2_000 { text } else { format!("#{}", Key::secret(text).readable()) }
}

fn numbers(state: &State) -> [i64; 4] {
    [state.start, state.end, state.used, state.until]
}

/// In which all nodes lock rows.
fn order(counter: &CounterId) -> (&str, &[u8], &str) {
    (&counter.scope, counter.key.as_bytes(), &counter.window)
}

fn column<'a, T: FromSql<'a>>(row: Option<&'a Row>, place: usize) -> Result<T, StoreError> {
    let other = "the functions of tfw_counters are another version's: call `create_tables()`";
    let row = row.ok_or_else(|| StoreError::new(other))?;
    row.try_get(place).map_err(|error| StoreError::with_source(other, error))
}
