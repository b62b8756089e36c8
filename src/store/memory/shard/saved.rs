//! The parts of a shard that a file keeps: its tables, bucket by bucket, and its times.

use super::super::super::table::{Bucket, Table};
use super::{Count, PER_OVERFLOW, Shard};

#[derive(Clone, Copy)]
pub(in crate::store::memory) enum Part {
    Own,
    Overflow,
}

#[derive(Clone, Copy)]
pub(in crate::store::memory) struct Times {
    pub(in crate::store::memory) latest: i64,
    pub(in crate::store::memory) stepped_back_at: i64,
}

impl Shard {
    pub(in crate::store::memory) fn buckets(&self, part: Part) -> &[Bucket<Count>] {
        match part {
            Part::Own => self.table.buckets(),
            Part::Overflow => self.overflow.buckets(),
        }
    }

    pub(in crate::store::memory) fn times(&self) -> Times {
        Times { latest: self.latest, stepped_back_at: self.stepped_back_at }
    }

    pub(in crate::store::memory) fn restored(
        Times { latest, stepped_back_at }: Times,
        own: Vec<Bucket<Count>>,
        shared: Vec<Bucket<Count>>,
        max_buckets: usize,
        now: i64,
    ) -> Self {
        if own.is_empty() {
            return Self::default();
        }
        let table = Table::restored(own, max_buckets, now);
        // The number of shared entries selects a key's entry, so it must not change while one runs.
        let buckets = shared.len();
        let shared = Table::restored(shared, buckets, now);
        let overflow_until = shared.last_end();
        let overflow = if overflow_until > 0 { shared } else { Table::default() };
        let mut restored =
            Self { table, overflow, overflow_until, overflowed: 0, latest, stepped_back_at };
        restored.prepare_overflow();
        restored
    }

    /// The smallest bound on buckets under which a shard may have tables of this size.
    pub(in crate::store::memory) fn needed_buckets(&self) -> usize {
        let [own, shared] = [Part::Own, Part::Overflow].map(|part| self.buckets(part).len());
        own.max((shared * PER_OVERFLOW).saturating_sub(PER_OVERFLOW - 1))
    }
}
