//! Counters as bytes, with a version and a checksum. All numbers are little-endian.
//!
//! - 8 bytes: `tfwcount`
//! - 4: the version of the format, 2
//! - 4: the number of shards
//! - 8, 8: the seeds of the hash
//! - 8: what the hash makes of a few known keys: another hash would find nothing
//! - for each shard: the table of its own entries, the table of shared entries; then, 8 bytes each,
//!   the latest time that it has seen, and until when entries of a clock that was ahead may begin
//! - 1, 4: whether there are scopes that the list does not have, and how many it has
//! - for each scope: 16: the hash of its name; 1: whether it was charged under more quotas than the
//!   list has; 4: how many follow; each as 2 bytes for its length and the text that a configuration
//!   file would have
//! - 4: how many calendars there are; for each: a quota as above; 4: how many windows follow; each
//!   as 8, 8: its start and its end, which bind a process that has another edition of the zone data
//! - 8: when it was saved, in milliseconds since the epoch
//! - 8: FNV-1a (64 bits) of all bytes before
//!
//! A table is the number of its buckets (4 bytes), and for each bucket a bit for each of 16 entries
//! (2 bytes) and the entries with a bit. An entry has 8 bytes for each of: the key's hash, until
//! when it runs, the start of its window, and what is used (signed).

use std::io::{self, ErrorKind, Write};

use super::super::charged_quotas::{ChargedQuotas, NotedScope, NotedScopes};
use super::super::sharded::seeds::Seeds;
use super::super::sharded::{MAX_SHARDS, Sharded, share};
use super::super::table::{Bucket, Entry, WAYS};
use super::Memory;
use super::locked::ShardLock;
use super::shard::{Count, Shard};
use crate::quota::{Anchor, Calendar, FNV_1A, Quota, SavedWindows, Span, fnv_1a};
use crate::sync;
use crate::window::MAX;

const MAGIC: [u8; 8] = *b"tfwcount";
const VERSION: u32 = 2;
const CHUNK: usize = 1 << 16;

/// A charge waits for at most the copy of a shard. Returns the checksum of all but the time, which
/// comes last.
pub(super) fn write(memory: &Memory, seeds: Seeds, out: &mut impl Write) -> io::Result<u64> {
    let now = memory.time.now().at;
    let mut sum = FNV_1A;
    let mut bytes = Vec::with_capacity(CHUNK);
    let mut flush = |bytes: &mut Vec<u8>| {
        sum = fnv_1a(sum, bytes.iter().copied());
        let written = out.write_all(bytes);
        bytes.clear();
        written.map(|()| sum)
    };

    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((memory.shards.count as u32).to_le_bytes());
    for number in [seeds.own, seeds.shared, seeds.probe()] {
        bytes.extend(number.to_le_bytes());
    }
    let mut starts = None;
    let mut copies = [Vec::new(), Vec::new()];
    for shard in 0..memory.shards.count {
        let shard = memory.shards.at(shard).lock();
        copies.iter_mut().zip(shard.buckets()).for_each(|(copy, table)| table.clone_into(copy));
        let times = shard.times();
        drop(shard);
        copies.iter().for_each(|table| write_table(table, now, &mut starts, &mut bytes));
        times.iter().for_each(|time| bytes.extend(time.to_le_bytes()));
        flush(&mut bytes)?;
    }
    // After the entries, so that each copied entry's counter is among these.
    let counters = sync::lock(&memory.counters.noted).clone();
    write_counters(&counters, &mut bytes);
    write_windows(&counters, &memory.windows, (starts, now), &mut bytes);
    let content = flush(&mut bytes)?;
    bytes.extend(now.to_le_bytes());
    let sum = flush(&mut bytes)?;
    out.write_all(&sum.to_le_bytes())?;
    Ok(content)
}

/// The earliest and the latest start of a window, if there is any.
type Starts = Option<(i64, i64)>;

fn write_table(table: &[Bucket<Count>], now: i64, starts: &mut Starts, bytes: &mut Vec<u8>) {
    bytes.extend((table.len() as u32).to_le_bytes());
    for bucket in table {
        let running = |(way, entry): (usize, &Entry<Count>)| u16::from(entry.until > now) << way;
        let running = bucket.iter().enumerate().map(running).fold(0, |all, one| all | one);
        bytes.extend(running.to_le_bytes());
        for entry in bucket.iter().filter(|entry| entry.until > now) {
            let Entry { fingerprint, until, payload: Count { start, used } } = *entry;
            let (first, last) = starts.unwrap_or((start, start));
            *starts = Some((first.min(start), last.max(start)));
            bytes.extend(fingerprint.to_le_bytes());
            [until, start, used].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        }
    }
}

fn write_counters(NotedScopes { scopes, others, .. }: &NotedScopes, bytes: &mut Vec<u8>) {
    bytes.push((*others).into());
    bytes.extend((scopes.len() as u32).to_le_bytes());
    for (scope, NotedScope { quotas, others }) in scopes {
        scope.iter().for_each(|half| bytes.extend(half.to_le_bytes()));
        bytes.push((*others).into());
        bytes.extend((quotas.len() as u32).to_le_bytes());
        quotas.iter().for_each(|quota| write_quota(quota, bytes));
    }
}

fn write_quota(quota: &Quota, bytes: &mut Vec<u8>) {
    let text = quota.to_string();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn write_windows(
    counters: &NotedScopes,
    saved: &SavedWindows,
    (starts, now): (Starts, i64),
    bytes: &mut Vec<u8>,
) {
    let mut calendars: Vec<(&Quota, Calendar)> = Vec::new();
    for quota in counters.scopes.values().flat_map(|scope| &scope.quotas) {
        if let Anchor::Calendar(of) = quota.anchor
            && calendars.iter().all(|(_, other)| *other != of)
        {
            calendars.push((quota, of));
        }
    }
    bytes.extend((calendars.len() as u32).to_le_bytes());
    for (quota, calendar) in calendars {
        write_quota(quota, bytes);
        let windows = starts.map(|(first, last)| saved.all(calendar, first..=last, now));
        let windows = windows.unwrap_or_default();
        bytes.extend((windows.len() as u32).to_le_bytes());
        for Span { start, end } in windows {
            [start, end].iter().for_each(|at| bytes.extend(at.to_le_bytes()));
        }
    }
}

fn broken(reason: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason.into())
}

/// Fills the memory, if the file is whole. Returns the seeds, and when it was saved.
pub(super) fn read(bytes: &[u8], memory: &mut Memory, now: i64) -> io::Result<(Seeds, i64)> {
    let Some((bytes, sum)) = bytes.split_last_chunk().filter(|(bytes, _)| !bytes.is_empty()) else {
        return Err(broken("it is cut short"));
    };
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        return Err(broken("it is not a file of counts"));
    };
    let mut input = Input(rest);
    match input.u32().map_err(|_| broken("it is cut short"))? {
        VERSION if u64::from_le_bytes(*sum) == fnv_1a(FNV_1A, bytes.iter().copied()) => {}
        VERSION => return Err(broken("it is cut short or damaged")),
        other => return Err(broken(format!("it has version {other} of the format"))),
    }
    let count = input.u32()? as usize;
    if !count.is_power_of_two() || count > MAX_SHARDS {
        return Err(broken("its number of shards is not possible"));
    }
    let seeds = Seeds { own: input.u64()?, shared: input.u64()? };
    if input.u64()? != seeds.probe() {
        return Err(broken("another version of this crate, which hashes keys otherwise, wrote it"));
    }
    let max_buckets = share(memory.max_keys, count);
    let mut shards = Vec::new();
    for _ in 0..count {
        let (own, overflow) = (input.buckets(now)?, input.buckets(now)?);
        let times = [input.number()?, input.number()?];
        shards.push(Shard::restored(times, own, overflow, max_buckets, now));
    }
    // A table that holds more than this store is made for keeps its size.
    let buckets = shards.iter().map(Shard::needed_buckets).fold(max_buckets, usize::max);
    let (counters, windows) = (input.counters()?, input.windows()?);
    let at = input.number()?;
    if !input.0.is_empty() {
        return Err(broken("it ends too late"));
    }
    memory.shards = Sharded::seeded(shards.into_iter().map(ShardLock::from), seeds);
    (memory.buckets, memory.counters, memory.windows) = (buckets, counters, windows);
    Ok((seeds, at))
}

fn too_early() -> io::Error {
    broken("it ends too early")
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or_else(too_early)?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn number(&mut self) -> io::Result<i64> {
        let number = self.bytes().map(i64::from_le_bytes)?;
        let is_possible = (-MAX..=MAX).contains(&number);
        is_possible.then_some(number).ok_or_else(|| broken("a number in it is not possible"))
    }

    fn buckets(&mut self, now: i64) -> io::Result<Vec<Bucket<Count>>> {
        let mut buckets = Vec::new();
        for _ in 0..self.u32()? {
            let running = self.bytes().map(u16::from_le_bytes)?;
            let mut bucket = Bucket::<Count>::default();
            for way in (0..WAYS).filter(|way| running >> way & 1 == 1) {
                let fingerprint = self.u64()?.max(1);
                let [until, start, used] = [self.number()?, self.number()?, self.number()?];
                // The arithmetic builds on that.
                if start >= until {
                    return Err(broken("a number in it is not possible"));
                }
                if until > now {
                    bucket[way] = Entry { fingerprint, until, payload: Count { start, used } };
                }
            }
            buckets.push(bucket);
        }
        Ok(buckets)
    }

    fn counters(&mut self) -> io::Result<ChargedQuotas> {
        let mut noted = NotedScopes::default();
        noted.others = self.flag()?;
        for _ in 0..self.u32()? {
            let (scope, mut others) = ([self.u64()?, self.u64()?], self.flag()?);
            for _ in 0..self.u32()? {
                match self.quota()? {
                    Some(quota) => _ = noted.add_counter(scope, &quota),
                    None => others = true,
                }
            }
            if others {
                noted.scopes.entry(scope).or_default().others = true;
            }
        }
        Ok(noted.into())
    }

    fn windows(&mut self) -> io::Result<SavedWindows> {
        let mut saved = SavedWindows::default();
        for _ in 0..self.u32()? {
            let quota = self.quota()?;
            for _ in 0..self.u32()? {
                let window = Span { start: self.number()?, end: self.number()? };
                if window.start >= window.end {
                    return Err(broken("a number in it is not possible"));
                }
                if let Some(Quota { anchor: Anchor::Calendar(calendar), .. }) = quota {
                    saved.add(calendar, window);
                }
            }
        }
        Ok(saved)
    }

    fn flag(&mut self) -> io::Result<bool> {
        self.bytes().map(|flag: [u8; 1]| flag != [0])
    }

    /// `None`: a time zone in it is not known here.
    fn quota(&mut self) -> io::Result<Option<Quota>> {
        let len = self.bytes().map(u16::from_le_bytes)?.into();
        let (text, rest) = self.0.split_at_checked(len).ok_or_else(too_early)?;
        self.0 = rest;
        Ok(str::from_utf8(text).ok().and_then(|text| text.parse().ok()))
    }
}
