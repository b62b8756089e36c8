//! Counters as bytes, with a version and a checksum. Each number has 8 bytes, the lowest first.
//!
//! - `tfwcount`, and the version of the format, 3
//! - the number of shards
//! - the seed of the hash, and what the hash makes of a few known keys by it: another hash would
//!   find nothing
//! - for each shard: the table of its own entries, and the table of overflow entries
//! - whether there are scopes that the list does not have, and how many it has
//! - for each scope: two for the hash of its name; whether it was charged under more quotas than the
//!   list has; how many follow
//! - for each quota: the length of the text that a configuration file would have, and the text; how
//!   many windows follow, if it is the first one on its calendar; each as its start and its end,
//!   which bind a process that has another edition of the zone data
//! - when it was saved, in milliseconds since the epoch
//! - FNV-1a (64 bits) of all bytes before
//!
//! A table is the number of its buckets, and for each bucket a number with a bit for each of 16
//! entries, and the entries with a bit. An entry is the key's hash, the start of its window, until
//! when it runs, and what is used.

use std::collections::HashSet;
use std::io::{self, ErrorKind, Write};

use super::super::charged_quotas::{NotedScope, NotedScopes};
use super::super::sharded::{MAX_SHARDS, Sharded, seeds, share};
use super::super::table::{Bucket, Entry, WAYS};
use super::Memory;
use super::locked::ShardLock;
use super::shard::Shard;
use crate::quota::{Anchor, FNV_1A, Quota, SavedWindows, Span, fnv_1a};
use crate::sync;
use crate::window::MAX;

const MAGIC: [u8; 8] = *b"tfwcount";
const VERSION: u64 = 3;

/// A charge waits for at most the copy of a shard. Returns the checksum of all but the time, which
/// comes last.
pub(super) fn write(memory: &Memory, seed: u64, out: &mut impl Write) -> io::Result<u64> {
    let now = memory.time.now().at;
    let mut sum = FNV_1A;
    let mut bytes = Vec::from(MAGIC);
    let mut flush = |bytes: &mut Vec<u8>| {
        sum = fnv_1a(sum, bytes.iter().copied());
        let written = out.write_all(bytes);
        bytes.clear();
        written.map(|()| sum)
    };

    put(&mut bytes, [VERSION, memory.shards.count as u64, seed, seeds::probe(seed)]);
    // The earliest and the latest start of a window.
    let mut starts = (i64::MAX, i64::MIN);
    let mut copies = [Vec::new(), Vec::new()];
    for shard in memory.shards.iter() {
        let shard = shard.lock();
        copies.iter_mut().zip(shard.buckets()).for_each(|(copy, table)| table.clone_into(copy));
        drop(shard);
        copies.iter().for_each(|table| write_table(table, now, &mut starts, &mut bytes));
        flush(&mut bytes)?;
    }
    // After the entries, so that each copied entry's counter is among these.
    let charged = sync::lock(&memory.charged.noted).clone();
    write_charged(&charged, &memory.windows, (starts, now), &mut bytes);
    let content = flush(&mut bytes)?;
    put(&mut bytes, [now as u64]);
    let sum = flush(&mut bytes)?;
    out.write_all(&sum.to_le_bytes())?;
    Ok(content)
}

fn put(bytes: &mut Vec<u8>, numbers: impl IntoIterator<Item = u64>) {
    numbers.into_iter().for_each(|number| bytes.extend(number.to_le_bytes()));
}

fn write_table(table: &[Bucket], now: i64, starts: &mut (i64, i64), bytes: &mut Vec<u8>) {
    put(bytes, [table.len() as u64]);
    for bucket in table {
        let running = |(way, entry): (usize, &Entry)| u64::from(entry.until > now) << way;
        put(bytes, [bucket.iter().enumerate().map(running).sum()]);
        for entry in bucket.iter().filter(|entry| entry.until > now) {
            let Entry { fingerprint, until, start, used } = *entry;
            *starts = (starts.0.min(start), starts.1.max(start));
            put(bytes, [fingerprint, start as u64, until as u64, used as u64]);
        }
    }
}

fn write_charged(
    NotedScopes { scopes, others, .. }: &NotedScopes,
    saved: &SavedWindows,
    ((first, last), now): ((i64, i64), i64),
    bytes: &mut Vec<u8>,
) {
    let mut calendars = HashSet::new();
    put(bytes, [(*others).into(), scopes.len() as u64]);
    for (&[low, high], NotedScope { quotas, others }) in scopes {
        put(bytes, [low, high, (*others).into(), quotas.len() as u64]);
        for quota in quotas {
            let text = quota.to_string();
            put(bytes, [text.len() as u64]);
            bytes.extend(text.as_bytes());
            let windows = match quota.anchor {
                Anchor::Calendar(of) if calendars.insert(quota.identity()) => {
                    saved.all(of, first..=last, now)
                }
                _ => Vec::new(),
            };
            put(bytes, [windows.len() as u64]);
            for Span { start, end } in windows {
                put(bytes, [start as u64, end as u64]);
            }
        }
    }
}

fn broken(reason: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason.into())
}

/// Fills the memory, if the file is whole. Returns the seed, and when it was saved.
pub(super) fn read(bytes: &[u8], memory: &mut Memory, now: i64) -> io::Result<(u64, i64)> {
    let Some((bytes, sum)) = bytes.split_last_chunk().filter(|(bytes, _)| !bytes.is_empty()) else {
        return Err(broken("it is cut short"));
    };
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        return Err(broken("it is not a file of counts"));
    };
    let mut input = Input(rest);
    match input.u64().map_err(|_| broken("it is cut short"))? {
        VERSION if u64::from_le_bytes(*sum) == fnv_1a(FNV_1A, bytes.iter().copied()) => {}
        VERSION => return Err(broken("it is cut short or damaged")),
        // Older files have four bytes for it.
        other => return Err(broken(format!("it has version {} of the format", other as u32))),
    }
    let count = input.u64()? as usize;
    if !count.is_power_of_two() || count > MAX_SHARDS {
        return Err(broken("its number of shards is not possible"));
    }
    let seed = input.u64()?;
    if input.u64()? != seeds::probe(seed) {
        return Err(broken("another version of this crate, which hashes keys otherwise, wrote it"));
    }
    let max_buckets = share(memory.max_keys, count);
    let mut shards = Vec::new();
    for _ in 0..count {
        let (own, overflow) = (input.buckets(now)?, input.buckets(now)?);
        shards.push(Shard::restored(own, overflow, max_buckets, now));
    }
    // A table that holds more than this store is made for keeps its size.
    let buckets = shards.iter().map(Shard::needed_buckets).fold(max_buckets, usize::max);
    let (charged, windows) = input.charged()?;
    let at = input.number()?;
    if !input.0.is_empty() {
        return Err(broken("it ends too late"));
    }
    memory.shards = Sharded::seeded(shards.into_iter().map(ShardLock::from), seed);
    (memory.buckets, memory.charged, memory.windows) = (buckets, charged.into(), windows);
    Ok((seed, at))
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes(&mut self, len: usize) -> io::Result<&[u8]> {
        let split = self.0.split_at_checked(len);
        let (bytes, rest) = split.ok_or_else(|| broken("it ends too early"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        let bytes = self.bytes(8)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn number(&mut self) -> io::Result<i64> {
        let number = self.u64()? as i64;
        let is_possible = (-MAX..=MAX).contains(&number);
        is_possible.then_some(number).ok_or_else(|| broken("a number in it is not possible"))
    }

    fn span(&mut self) -> io::Result<Span> {
        let span = Span { start: self.number()?, end: self.number()? };
        // The arithmetic builds on that.
        let is_possible = span.start < span.end;
        is_possible.then_some(span).ok_or_else(|| broken("a number in it is not possible"))
    }

    fn buckets(&mut self, now: i64) -> io::Result<Vec<Bucket>> {
        let mut buckets = Vec::new();
        for _ in 0..self.u64()? {
            let running = self.u64()?;
            let mut bucket = Bucket::default();
            for way in (0..WAYS).filter(|way| running >> way & 1 == 1) {
                let fingerprint = self.u64()?.max(1);
                let (Span { start, end: until }, used) = (self.span()?, self.number()?);
                if until > now {
                    bucket[way] = Entry { fingerprint, until, start, used };
                }
            }
            buckets.push(bucket);
        }
        Ok(buckets)
    }

    fn charged(&mut self) -> io::Result<(NotedScopes, SavedWindows)> {
        let (mut noted, mut windows) = (NotedScopes::default(), SavedWindows::default());
        noted.others = self.u64()? > 0;
        for _ in 0..self.u64()? {
            let (scope, mut others) = ([self.u64()?, self.u64()?], self.u64()? > 0);
            for _ in 0..self.u64()? {
                let len = self.u64()? as usize;
                let text = str::from_utf8(self.bytes(len)?).unwrap_or_default();
                // Its time zone may not be known here.
                let quota = text.parse::<Quota>().ok();
                for _ in 0..self.u64()? {
                    let window = self.span()?;
                    if let Some(Quota { anchor: Anchor::Calendar(calendar), .. }) = quota {
                        windows.add(calendar, window);
                    }
                }
                match quota {
                    Some(quota) => _ = noted.add(scope, &quota),
                    None => others = true,
                }
            }
            if others {
                noted.scopes.entry(scope).or_default().others = true;
            }
        }
        Ok((noted, windows))
    }
}
