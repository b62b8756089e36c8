//! A bounded table whose entries expire: a flat array of buckets, in which a 64-bit fingerprint has
//! an entry in one of two. An entry that has expired is free. So there is nothing to sweep, and a
//! look-up reads two buckets at most, whatever the table holds.
//!
//! When both buckets of a fingerprint are full of entries that live, the table is doubled, until it
//! has as many buckets as it may.

/// Entries in a bucket. With two buckets to choose from, 16-way buckets hold as many keys as 10/11
/// of their entries with few left over: of a million keys 0.05%, of ten thousand 0.13% (medians).
pub(super) const WAYS: usize = 16;
/// With this many free entries in its first bucket, a key doesn't look at the second one. A table
/// fills as well as if it always did (by simulation), and most keys are found at the first look.
const SPARSE: u32 = 10;

/// What an entry of `P` is found by, when it ends and what it holds lie together.
#[derive(Clone, Copy, Default)]
pub(super) struct Entry<P> {
    /// 0: none.
    pub(super) fingerprint: u64,
    pub(super) until: i64,
    pub(super) payload: P,
}

pub(super) type Bucket<P> = [Entry<P>; WAYS];

#[derive(Default)]
pub(super) struct Table<P> {
    buckets: Box<[Bucket<P>]>,
    max_buckets: usize,
}

/// A place in a table, and the fingerprint of the entry that is or may be there.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    bucket: usize,
    way: usize,
    fingerprint: u64,
}

impl Slot {
    /// Whether both are the same place.
    #[inline]
    pub(super) fn is(&self, other: &Slot) -> bool {
        (self.bucket, self.way) == (other.bucket, other.way)
    }
}

/// What a table has for a fingerprint.
#[derive(Clone, Copy)]
pub(super) enum Found {
    /// Its entry, which may have expired.
    Entry(Slot),
    /// A place for one.
    Free(Slot),
    /// Both of its buckets are full.
    Full,
}

impl<P: Copy + Default> Table<P> {
    pub(super) fn new(buckets: usize, max_buckets: usize) -> Self {
        let bucket = [Entry::default(); WAYS];
        Self { buckets: vec![bucket; buckets].into(), max_buckets }
    }

    /// Whether it has no memory yet.
    #[inline]
    pub(super) fn is_unallocated(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Entries, whether taken or free.
    pub(super) fn capacity(&self) -> usize {
        self.buckets.len() * WAYS
    }

    pub(super) fn max_buckets(&self) -> usize {
        self.max_buckets
    }

    pub(super) fn may_grow(&self) -> bool {
        self.buckets.len() < self.max_buckets
    }

    /// Moves what is live into twice as many buckets. `false`: there may be no more, or what is
    /// there found no room in them, which is seen in tables of a few buckets only; then it stays as
    /// it is for good.
    #[cold]
    pub(super) fn grow(&mut self, now: i64) -> bool {
        let mut size = self.buckets.len();
        while size < self.max_buckets {
            // By halves of the most, so that the last step is as large as the others.
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

    /// `None`: something found no room.
    fn moved(&self, buckets: usize, now: i64) -> Option<Self> {
        // With half of all entries free, fewer will do: what is in its first bucket is found
        // sooner.
        const PLENTY: u32 = 4;

        let mut larger = Self::new(buckets, self.max_buckets);
        // A bit for each entry that is free: one line of memory to look at instead of sixteen.
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

    /// The entry of a fingerprint, else a place for it that is not taken.
    #[inline(always)]
    pub(super) fn find(&self, fingerprint: u64, now: i64, taken: impl Fn(&Slot) -> bool) -> Found {
        match self.entry(fingerprint, &taken) {
            Some(slot) => Found::Entry(slot),
            None => self.free(fingerprint, now, taken),
        }
    }

    /// The entry of a fingerprint, which may have expired.
    #[inline(always)]
    pub(super) fn entry(&self, fingerprint: u64, taken: impl Fn(&Slot) -> bool) -> Option<Slot> {
        let (buckets, first) = self.choices(fingerprint);
        for bucket in buckets {
            let entries = &self.buckets[bucket];
            for i in 0..WAYS {
                let way = (first + i) % WAYS;
                let slot = Slot { bucket, way, fingerprint };
                // One that another quota of the key has been given was expired: it is no loss.
                if entries[way].fingerprint == fingerprint && !taken(&slot) {
                    return Some(slot);
                }
            }
        }
        None
    }

    /// The buckets of a fingerprint. They fill from a way that it chooses as well: mostly the first
    /// look finds it.
    #[inline]
    fn choices(&self, fingerprint: u64) -> ([usize; 2], usize) {
        let buckets = [self.bucket(fingerprint as u32), self.bucket((fingerprint >> 32) as u32)];
        (buckets, (fingerprint >> 16) as usize % WAYS)
    }

    #[inline]
    fn bucket(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.buckets.len() as u64) >> 32) as usize
    }

    /// A free entry in the first of two buckets while there are plenty, then in the emptier one.
    fn free(&self, fingerprint: u64, now: i64, taken: impl Fn(&Slot) -> bool) -> Found {
        let ([a, b], first) = self.choices(fingerprint);
        // A bit for each way.
        let free = |bucket: usize| {
            let ways = self.buckets[bucket].iter().enumerate();
            ways.fold(0_u16, |free, (way, entry)| {
                let slot = Slot { bucket, way, fingerprint };
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
                Found::Free(Slot { bucket, way, fingerprint })
            }
        }
    }

    /// When the last entry ends; 0 if there is none.
    pub(super) fn last_end(&self) -> i64 {
        self.buckets.iter().flatten().map(|entry| entry.until).max().unwrap_or(0)
    }

    pub(super) fn live(&self, now: i64) -> usize {
        self.buckets.iter().flatten().filter(|entry| entry.until > now).count()
    }

    pub(super) fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry<P>> {
        self.buckets.iter_mut().flatten()
    }

    /// Changes the entries of the two buckets of a fingerprint.
    pub(super) fn change_around(
        &mut self,
        fingerprint: u64,
        mut change: impl FnMut(&mut Entry<P>),
    ) {
        let (buckets, _) = self.choices(fingerprint);
        buckets
            .into_iter()
            .for_each(|bucket| self.buckets[bucket].iter_mut().for_each(&mut change));
    }

    #[inline]
    pub(super) fn get(&self, slot: Slot) -> Entry<P> {
        self.buckets[slot.bucket][slot.way % WAYS]
    }

    #[inline]
    pub(super) fn payload_mut(&mut self, slot: Slot) -> &mut P {
        &mut self.buckets[slot.bucket][slot.way % WAYS].payload
    }

    #[inline]
    pub(super) fn set(&mut self, slot: Slot, until: i64, payload: P) {
        let Slot { bucket, way, fingerprint } = slot;
        self.buckets[bucket][way % WAYS] = Entry { fingerprint, until, payload };
    }

    pub(super) fn clear(&mut self, slot: Slot) {
        self.set(Slot { fingerprint: 0, ..slot }, 0, P::default());
    }
}

#[cfg(feature = "saved")]
impl<P: Copy + Default> Table<P> {
    pub(super) fn buckets(&self) -> &[Bucket<P>] {
        &self.buckets
    }

    /// A table of buckets that were another's, of at most `max_buckets` if these have room for what
    /// is live.
    pub(super) fn restored(buckets: Vec<Bucket<P>>, max_buckets: usize, now: i64) -> Self {
        let as_before = Self { max_buckets, buckets: buckets.into() };
        match as_before.buckets.len() > max_buckets {
            true => as_before.moved(max_buckets, now).unwrap_or(as_before),
            false => as_before,
        }
    }
}
