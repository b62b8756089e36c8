//! A bounded table whose entries expire: a flat array of buckets. The entry of a 64-bit fingerprint
//! is in one of two buckets, so a look-up reads at most two. An expired entry is free: nothing has
//! to be swept.
//!
//! The table doubles when both buckets of a fingerprint are full of live entries, up to its largest
//! size.

use crate::window::State;

/// With two buckets to choose from, 16-way buckets hold as many keys as 10/11 of their entries with
/// few left over: of a million keys 0.05%, of ten thousand 0.13% (medians).
pub(super) const WAYS: usize = 16;
/// A key uses its first bucket without a look at the second, if this many of its entries are free.
/// By simulation, the table fills as well as if keys always compared both.
const SPARSE: u32 = 10;

#[derive(Clone, Copy, Default)]
pub(super) struct Entry {
    /// 0 if there is no entry.
    pub(super) fingerprint: u64,
    pub(super) until: i64,
    pub(super) start: i64,
    pub(super) used: i64,
}

pub(super) type Bucket = [Entry; WAYS];

#[derive(Default)]
pub(super) struct Table {
    buckets: Box<[Bucket]>,
    pub(super) max_buckets: usize,
}

/// The fingerprint is of the entry that is there or may be put there.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    /// The position in all buckets.
    index: usize,
    fingerprint: u64,
}

impl Slot {
    #[inline]
    pub(super) fn is(&self, other: &Slot) -> bool {
        self.index == other.index
    }
}

#[derive(Clone, Copy)]
pub(super) enum Found {
    /// An entry that may have expired.
    Entry(Slot),
    Free(Slot),
    Full,
}

impl Table {
    pub(super) fn new(buckets: usize, max_buckets: usize) -> Self {
        let bucket = [Entry::default(); WAYS];
        Self { buckets: vec![bucket; buckets].into(), max_buckets }
    }

    #[inline]
    pub(super) fn is_unallocated(&self) -> bool {
        self.buckets.is_empty()
    }

    pub(super) fn capacity(&self) -> usize {
        self.buckets.len() * WAYS
    }

    pub(super) fn may_grow(&self) -> bool {
        self.buckets.len() < self.max_buckets
    }

    /// Moves the live entries into twice as many buckets. Returns `false`, and keeps the table as
    /// it is for good, if it has its largest size, or if an entry found no place, which happens
    /// only in tables of a few buckets.
    #[cold]
    pub(super) fn grow(&mut self, now: i64) -> bool {
        let mut size = self.buckets.len();
        while size < self.max_buckets {
            // Sizes are halves of the largest, so that the last step is as large as the others.
            let mut next = self.max_buckets;
            while next.div_ceil(2) > size {
                next = next.div_ceil(2);
            }
            size = next;
            if let Some(larger) = self.moved(size, now) {
                *self = larger;
                return true;
            }
        }
        self.max_buckets = self.buckets.len();
        false
    }

    /// `None` if an entry found no place.
    fn moved(&self, buckets: usize, now: i64) -> Option<Self> {
        // Half of all entries are free, so a smaller reserve is enough. Entries in their first
        // bucket are found sooner.
        const PLENTY: u32 = 4;

        let mut larger = Self::new(buckets, self.max_buckets);
        // A bit for each free entry: one cache line to read instead of sixteen.
        let mut free = vec![u16::MAX; buckets];
        for entry in self.buckets.iter().flatten().filter(|entry| entry.until > now) {
            let ([a, b], first) = larger.choices(entry.fingerprint);
            let [room, other] = [a, b].map(|bucket| free[bucket].count_ones());
            let bucket = if room < PLENTY && other > room { b } else { a };
            let ways = free[bucket].rotate_right(first as u32);
            if ways == 0 {
                return None;
            }
            let way = (first + ways.trailing_zeros() as usize) % WAYS;
            free[bucket] &= !(1 << way);
            larger.buckets[bucket][way] = *entry;
        }
        Some(larger)
    }

    /// The entry may have expired.
    #[inline(always)]
    pub(super) fn entry_mut(&mut self, fingerprint: u64) -> Option<&mut Entry> {
        let ([first_bucket, _], first_way) = self.choices(fingerprint);
        let bucket = &self.buckets[first_bucket];
        let next_way = (first_way + 1) % WAYS;
        // Most entries are there.
        if bucket[first_way].fingerprint == fingerprint {
            Some(&mut self.buckets[first_bucket][first_way])
        } else if bucket[next_way].fingerprint == fingerprint {
            Some(&mut self.buckets[first_bucket][next_way])
        } else {
            self.search(fingerprint).map(|index| &mut self.buckets.as_flattened_mut()[index])
        }
    }

    #[inline(never)]
    fn search(&self, fingerprint: u64) -> Option<usize> {
        self.position(fingerprint, |_| false)
    }

    /// Free places that are `taken` are passed.
    #[inline(always)]
    pub(super) fn find(&self, fingerprint: u64, now: i64, taken: impl Fn(&Slot) -> bool) -> Found {
        match self.entry(fingerprint, &taken) {
            Some(slot) => Found::Entry(slot),
            None => self.choose_free(fingerprint, now, taken),
        }
    }

    /// The entry may have expired.
    #[inline(always)]
    pub(super) fn entry(&self, fingerprint: u64, taken: impl Fn(&Slot) -> bool) -> Option<Slot> {
        let slot = |index| Slot { index, fingerprint };
        self.position(fingerprint, |index| taken(&slot(index))).map(slot)
    }

    /// In the ways of both buckets in turn: an entry is near its first way in either.
    #[inline(always)]
    fn position(&self, fingerprint: u64, taken: impl Fn(usize) -> bool) -> Option<usize> {
        let (buckets, first) = self.choices(fingerprint);
        for way in (0..WAYS).map(|i| (first + i) % WAYS) {
            for bucket in buckets {
                let index = bucket * WAYS + way;
                // A `taken` entry had expired, and is another quota's of the key from now on.
                if self.buckets[bucket][way].fingerprint == fingerprint && !taken(index) {
                    return Some(index);
                }
            }
        }
        None
    }

    /// The two buckets, and the way from which they are filled: most entries are found at this way.
    #[inline]
    fn choices(&self, fingerprint: u64) -> ([usize; 2], usize) {
        let buckets = [self.bucket(fingerprint as u32), self.bucket((fingerprint >> 32) as u32)];
        (buckets, (fingerprint >> 16) as usize % WAYS)
    }

    #[inline]
    fn bucket(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize
    }

    /// In the first bucket while this is sparse, then in the emptier one.
    #[inline(always)]
    fn choose_free(&self, fingerprint: u64, now: i64, taken: impl Fn(&Slot) -> bool) -> Found {
        let ([a, b], first) = self.choices(fingerprint);
        let free = |bucket: usize| {
            let ways = self.buckets[bucket].iter().enumerate();
            ways.fold(0_u16, |free, (way, entry)| {
                let slot = Slot { index: bucket * WAYS + way, fingerprint };
                free | u16::from(entry.until <= now && !taken(&slot)) << way
            })
        };
        let (mut bucket, mut ways) = (a, free(a));
        if ways.count_ones() < SPARSE {
            let others = free(b);
            if others.count_ones() > ways.count_ones() {
                (bucket, ways) = (b, others);
            }
        }
        match ways.rotate_right(first as u32) {
            0 => Found::Full,
            ways => {
                let way = (first + ways.trailing_zeros() as usize) % WAYS;
                Found::Free(Slot { index: bucket * WAYS + way, fingerprint })
            }
        }
    }

    pub(super) fn last_end(&self) -> i64 {
        self.buckets.iter().flatten().map(|entry| entry.until).max().unwrap_or(0)
    }

    pub(super) fn live(&self, now: i64) -> usize {
        self.buckets.iter().flatten().filter(|entry| entry.until > now).count()
    }

    pub(super) fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.buckets.iter_mut().flatten()
    }

    pub(super) fn change_around(&mut self, fingerprint: u64, mut change: impl FnMut(&mut Entry)) {
        let (buckets, _) = self.choices(fingerprint);
        buckets
            .into_iter()
            .for_each(|bucket| self.buckets[bucket].iter_mut().for_each(&mut change));
    }

    #[inline]
    pub(super) fn get(&self, slot: Slot) -> Entry {
        self.buckets.as_flattened()[slot.index]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: Slot) -> &mut Entry {
        &mut self.buckets.as_flattened_mut()[slot.index]
    }

    #[inline]
    pub(super) fn set(&mut self, slot: Slot, State { start, used, until, .. }: State) {
        *self.get_mut(slot) = Entry { fingerprint: slot.fingerprint, until, start, used };
    }

    pub(super) fn clear(&mut self, slot: Slot) {
        *self.get_mut(slot) = Entry::default();
    }
}

#[cfg(feature = "saved")]
impl Table {
    pub(super) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Reduced to `max_buckets` if the live entries fit.
    pub(super) fn restored(buckets: Vec<Bucket>, max_buckets: usize, now: i64) -> Self {
        let as_before = Self { max_buckets, buckets: buckets.into() };
        match as_before.buckets.len() > max_buckets {
            true => as_before.moved(max_buckets, now).unwrap_or(as_before),
            false => as_before,
        }
    }
}
