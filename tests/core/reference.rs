//! A second, naive implementation of rules S1 to S16: it goes from window to window where that is
//! affordable, counts in 128 bits, and shares no line with the crate.

pub(crate) const END_OF_TIME: i128 = (1 << 53) - 1;
/// More windows than this are skipped in one step.
const WALK: i128 = 2_000;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Grid {
    Aligned,
    StartingAt(i128),
    Staggered,
    FirstRequest,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Terms {
    pub(crate) limit: i128,
    pub(crate) window: i128,
    pub(crate) grid: Grid,
    pub(crate) capacity: i128,
    pub(crate) max_reserved: i128,
}

/// The state of S5.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Counter {
    pub(crate) start: i128,
    pub(crate) used: i128,
    pub(crate) until: i128,
}

/// The counter at one instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    start: i128,
    used: i128,
    until: Option<i128>,
    /// The start of the stored window, if it is a later one: the clock has stepped back (S4).
    from_ahead: Option<i128>,
}

/// The contents of a decision.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) granted: i128,
    pub(crate) limit: Vec<i128>,
    pub(crate) used: Vec<i128>,
    pub(crate) remaining: Vec<i128>,
    pub(crate) reset: Vec<i128>,
    pub(crate) refusing: Vec<usize>,
    pub(crate) governing: usize,
    pub(crate) retry_at: Option<i128>,
    pub(crate) for_good: bool,
    pub(crate) ready_at: Option<i128>,
}

impl Answer {
    /// What a decision says of a limit that may pass while another one refuses.
    pub(crate) fn numbers(&self) -> (i128, [&[i128]; 4]) {
        (self.granted, [&self.limit, &self.used, &self.remaining, &self.reset])
    }
}

/// A charge that passed, as S14 and S15 need it.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) cost: i128,
    refundable_until: Vec<i128>,
    charged_from: Vec<i128>,
    max_reserved: Vec<i128>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Ask {
    Charge,
    Reserve,
    Peek,
}

/// The counters of one key under one scope.
#[derive(Clone)]
pub(crate) struct Model {
    shift: i128,
    pub(crate) counters: Vec<Option<Counter>>,
    /// Other keys count here, too (S30): nothing leaves a counter before all of it does.
    pub(crate) is_shared: bool,
}

impl Terms {
    fn floor(&self) -> i128 {
        // A limit of 0 never has tokens left (S8).
        if self.limit == 0 { 0 } else { self.limit - self.capacity }
    }

    fn start_of(&self, now: i128, shift: i128) -> i128 {
        let passes_through = match self.grid {
            // The epoch is a Thursday.
            Grid::Aligned if self.window == 7 * 86_400_000 => 4 * 86_400_000,
            Grid::Aligned => 0,
            Grid::StartingAt(at) => at,
            Grid::Staggered => shift,
            Grid::FirstRequest => now,
        };
        let into = (now - passes_through) % self.window;
        now - if into < 0 { into + self.window } else { into }
    }

    /// The number of windows until `tokens` more have been granted; `None`: never.
    fn windows_for(&self, tokens: i128) -> Option<i128> {
        if tokens <= 0 {
            return Some(0);
        }
        if self.limit == 0 {
            return None;
        }
        if tokens > self.limit * WALK {
            return Some((tokens + self.limit - 1) / self.limit);
        }
        let (mut windows, mut granted) = (0, 0);
        while granted < tokens {
            granted += self.limit;
            windows += 1;
        }
        Some(windows)
    }

    fn after(&self, start: i128, windows: i128) -> i128 {
        (start + windows * self.window).min(END_OF_TIME)
    }

    fn look(&self, counter: Option<Counter>, now: i128, shift: i128) -> Now {
        let fresh = Now {
            start: self.start_of(now, shift),
            used: self.floor(),
            until: None,
            from_ahead: None,
        };
        let Some(Counter { start, used, until }) = counter else { return fresh };
        if now >= until {
            return fresh;
        }
        if now < start {
            let used = used.max(self.floor());
            if start - now < self.window {
                return Now { start, used, until: Some(until), from_ahead: None };
            }
            let moved = self.start_of(now, shift);
            // Whole windows, also for a state whose last window the end of time has cut short.
            let windows = (until - start + self.window - 1) / self.window;
            let until = Some(self.after(moved, windows));
            return Now { start: moved, used, until, from_ahead: Some(start) };
        }
        let (mut start, mut used) = (start, used.max(self.floor()));
        let mut entered = 0;
        if (now - start) / self.window > WALK {
            entered = (now - start) / self.window;
            start += entered * self.window;
            used = (used - entered * self.limit).max(self.floor());
        }
        while now >= start + self.window {
            start += self.window;
            used = (used - self.limit).max(self.floor());
            entered += 1;
        }
        if entered > 0 {
            used = self.lasting(Now { start, used, until: Some(until), from_ahead: None });
        }
        if entered > 0 && used == self.floor() {
            fresh
        } else {
            Now { start, used, until: Some(until), from_ahead: None }
        }
    }

    /// The part of `used` that lasts beyond the window: tokens that windows until the end of the
    /// state have yet to grant.
    fn lasting(&self, Now { start, used, until, .. }: Now) -> i128 {
        let Some(until) = until else { return used };
        if self.limit == 0 || until == END_OF_TIME {
            return used;
        }
        let mut left = self.limit - self.capacity;
        let mut at = start;
        if (until - start) / self.window > WALK {
            let windows = (until - start) / self.window;
            left += windows * self.limit;
            at += windows * self.window;
        }
        while at < until {
            left += self.limit;
            at += self.window;
        }
        if left < used { left } else { used }
    }

    /// Returns whether this quota lets a charge pass. Other quotas may still refuse it.
    pub(crate) fn fits(&self, now: Now, cost: i128, ask: Ask) -> bool {
        let credit = if ask == Ask::Reserve { self.max_reserved } else { 0 };
        cost == 0 || self.limit > 0 && now.used + cost <= self.limit + credit
    }

    /// The last window that covers any of the `used` tokens, or of `more` tokens on top.
    fn last_window(&self, now: Now, more: i128) -> (i128, i128) {
        let mut windows = 0;
        if now.used + more > self.limit && self.limit > 0 {
            let debt = self.lasting(now) + more - self.limit;
            // What stands above a limit that was lowered is no debt (S5).
            windows = self.windows_for(debt).expect("a limit").max(i128::from(more > 0));
        }
        (self.after(now.start, windows), self.after(now.start, windows + 1))
    }

    /// Returns whether tokens are reserved in a window later than the one with this end (S14).
    fn is_reserved_after(&self, now: Now, end: i128) -> bool {
        let (first, last) = match now.until {
            _ if self.max_reserved == 0 => return false,
            // Nothing is covered: it counts until when the state lasts.
            Some(END_OF_TIME) if self.limit == 0 => (END_OF_TIME, END_OF_TIME),
            Some(until) if self.limit == 0 => {
                let windows = (until - now.start + self.window - 1) / self.window;
                (self.after(now.start, windows - 1), self.after(now.start, windows))
            }
            _ => self.last_window(now, 0),
        };
        first >= end && last > end
    }

    /// The counter to store after `more` tokens are counted; a refund's are negative.
    fn keep(&self, now: Now, more: i128) -> Counter {
        let more = more.clamp(-END_OF_TIME, END_OF_TIME);
        let bounded = |used: i128| used.min(END_OF_TIME).max(self.floor());
        let end = self.after(now.start, 1);
        let until = match self.windows_for(bounded(self.lasting(now) + more) - self.floor()) {
            _ if self.limit == 0 => {
                // Whole windows, also for a state that a step back has moved away from the end of
                // time.
                let last = now.until.unwrap_or(end).max(end) - now.start;
                self.after(now.start, (last + self.window - 1) / self.window)
            }
            Some(windows) => end.max(self.after(now.start, windows)),
            None => unreachable!("a limit grants something"),
        };
        Counter { start: now.start, used: bounded(now.used + more), until }
    }
}

impl Model {
    pub(crate) fn new(quotas: usize, shift: u64) -> Self {
        Self { shift: shift.into(), counters: vec![None; quotas], is_shared: false }
    }

    pub(crate) fn look(&self, terms: &[Terms], now: i128) -> Vec<Now> {
        let pairs = terms.iter().zip(&self.counters);
        let look = |(terms, counter): (&Terms, &Option<Counter>)| match counter {
            Some(of) if self.is_shared && now < of.until => {
                let window = terms.look(None, now, self.shift);
                Now { used: of.used.max(window.used), until: Some(of.until), ..window }
            }
            _ if self.is_shared => terms.look(None, now, self.shift),
            _ => terms.look(*counter, now, self.shift),
        };
        pairs.map(look).collect()
    }

    /// Keeps what is counted now. What is shared lasts for a whole window from now.
    fn keep(&mut self, i: usize, terms: &Terms, window: Now, more: i128, now: i128) {
        let mut counter = terms.keep(window, more);
        if self.is_shared {
            let lasts = (now + terms.window).max(window.until.unwrap_or(0));
            counter = Counter { start: now, until: counter.until.max(lasts), ..counter };
        }
        self.counters[i] = Some(counter);
    }

    pub(crate) fn ask(
        &mut self,
        terms: &[Terms],
        now: i128,
        cost: i128,
        ask: Ask,
    ) -> (Answer, Option<Taken>) {
        let windows = self.look(terms, now);
        let reserve = ask == Ask::Reserve;
        let mut refusing: Vec<usize> =
            (0..terms.len()).filter(|&i| !terms[i].fits(windows[i], cost, ask)).collect();
        // S13: what another quota counts in a window that is over by then.
        let covered: Vec<(i128, i128)> =
            terms.iter().zip(&windows).map(|(terms, now)| terms.last_window(*now, cost)).collect();
        let waits = |i: usize| covered[i].0 > windows[i].start;
        let mut too_late = false;
        if reserve && refusing.is_empty() && cost > 0 {
            for i in (0..terms.len()).filter(|i| waits(*i)) {
                for other in (0..terms.len()).filter(|other| *other != i) {
                    too_late |= covered[i].0 >= covered[other].1;
                }
            }
            if too_late {
                refusing = (0..terms.len()).filter(|i| waits(*i)).collect();
            }
        }
        let allowed = refusing.is_empty();
        let granted = if allowed && ask != Ask::Peek { cost } else { 0 };
        let used: Vec<i128> = windows.iter().map(|window| window.used + granted).collect();
        let reset: Vec<i128> =
            terms.iter().zip(&windows).map(|(terms, now)| terms.after(now.start, 1)).collect();
        let remaining: Vec<i128> =
            terms.iter().zip(&used).map(|(terms, used)| (terms.limit - used).max(0)).collect();

        let retries: Vec<Option<i128>> = (0..terms.len())
            .map(|i| {
                let (terms, window) = (&terms[i], &windows[i]);
                if too_late {
                    return Some(covered[i].0);
                }
                let most = terms.capacity + if reserve { terms.max_reserved } else { 0 };
                if cost > most || terms.limit == 0 {
                    return None;
                }
                // Not in this window: it is refused there.
                let short = terms.lasting(*window) + cost - terms.limit;
                let at = terms.after(window.start, terms.windows_for(short)?.max(1));
                match window.until {
                    Some(until) if self.is_shared && cost <= terms.capacity => Some(until),
                    Some(until) if cost <= terms.capacity => Some(at.min(until)),
                    _ => Some(at),
                }
            })
            .collect();
        let for_good = refusing.iter().any(|&i| retries[i].is_none());
        let retry_at = if allowed || for_good {
            None
        } else {
            refusing.iter().filter_map(|&i| retries[i]).max()
        };

        let ready_at = if allowed && reserve && cost > 0 {
            (0..terms.len()).filter(|i| waits(*i)).map(|i| covered[i].0).max()
        } else {
            None
        };

        // S19: the first of those that nobody is before.
        let governing = if allowed {
            (0..terms.len()).min_by_key(|&i| (remaining[i], -reset[i])).expect("a quota")
        } else {
            let rank = |i: usize| (retries[i].is_none(), retries[i].unwrap_or(0), reset[i]);
            let best = refusing.iter().map(|&i| rank(i)).max().expect("one that refuses");
            *refusing.iter().find(|&&i| rank(i) == best).expect("it is one of them")
        };

        let taken = (allowed && ask != Ask::Peek).then(|| Taken {
            cost,
            refundable_until: covered.iter().map(|(_, end)| *end).collect(),
            charged_from: windows.iter().map(|window| window.start).collect(),
            max_reserved: terms.iter().map(|terms| terms.max_reserved).collect(),
        });
        for (i, terms) in terms.iter().enumerate() {
            if granted > 0 || windows[i].from_ahead.is_some() && ask != Ask::Peek {
                self.keep(i, terms, windows[i], granted, now);
            }
        }
        let answer = Answer {
            allowed,
            granted,
            limit: terms.iter().map(|terms| terms.limit).collect(),
            used: used.into_iter().map(|used| used.max(0)).collect(),
            remaining,
            reset,
            refusing,
            governing,
            retry_at,
            for_good,
            ready_at,
        };
        (answer, taken)
    }

    pub(crate) fn settle(&mut self, terms: &[Terms], taken: Taken, now: i128, actual: i128) {
        let windows = self.look(terms, now);
        for (i, terms) in terms.iter().enumerate() {
            let window = windows[i];
            // Quotas may have granted reservations when they were charged, or now.
            let reserved = terms.max_reserved.max(taken.max_reserved[i]);
            let max_reserved = reserved.min(END_OF_TIME - terms.capacity);
            let terms = &Terms { max_reserved, ..*terms };
            let counted_from = window.from_ahead.unwrap_or(window.start);
            let only_until = match window.from_ahead {
                Some(_) => terms.after(window.start, 1),
                None => taken.refundable_until[i],
            };
            let refundable = window.until.is_some()
                // A window that a step forward has ended stays ended (S4).
                && now.max(counted_from) < taken.refundable_until[i]
                // What a step back has moved before may be of later tokens.
                && counted_from >= taken.charged_from[i]
                && !terms.is_reserved_after(window, only_until);
            // What comes back to a shared counter may be of another key.
            let comes_back = actual < taken.cost && refundable && !self.is_shared;
            if actual > taken.cost || comes_back {
                self.keep(i, terms, window, actual - taken.cost, now);
            }
        }
    }

    pub(crate) fn reset(&mut self) {
        self.counters.fill(None);
    }
}

impl Model {
    /// The windows that would cover a reservation, with whether that is a later one; `None`: it does
    /// not fit.
    fn covering(&self, terms: &[Terms], now: i128, cost: i128) -> Option<Vec<(i128, i128, bool)>> {
        let windows = self.look(terms, now);
        let each = terms.iter().zip(windows);
        each.map(|(terms, window)| {
            let room = terms.limit + terms.max_reserved - window.used;
            let (start, end) = terms.last_window(window, cost);
            (terms.limit > 0 && cost <= room).then_some((start, end, start > window.start))
        })
        .collect()
    }

    /// Returns whether any counter ends in this time.
    pub(crate) fn ends_between(&self, from: i128, to: i128) -> bool {
        self.counters.iter().flatten().any(|counter| from < counter.until && counter.until <= to)
    }
}

/// A limit with its cost, one of several in a charge.
pub(crate) struct Line<'a> {
    pub(crate) model: &'a mut Model,
    pub(crate) terms: &'a [Terms],
    pub(crate) cost: i128,
}

/// The contents of a decision over several limits, and of each limit's own decision.
pub(crate) struct Together {
    pub(crate) allowed: bool,
    pub(crate) retry_at: Option<i128>,
    pub(crate) ready_at: Option<i128>,
    pub(crate) answers: Vec<Answer>,
    /// `Some` if the charge passed.
    pub(crate) taken: Option<Vec<Taken>>,
}

/// S37, naively: each limit decides on a copy of its counters. The copies are kept if all limits
/// pass.
pub(crate) fn together(lines: &mut [Line<'_>], now: i128, ask: Ask) -> Together {
    if let [Line { model, terms, cost }] = lines {
        let (answer, taken) = model.ask(terms, now, *cost, ask);
        let Answer { allowed, retry_at, ready_at, .. } = answer;
        let taken = taken.map(|taken| vec![taken]);
        return Together { allowed, retry_at, ready_at, answers: vec![answer], taken };
    }
    let tried: Vec<_> = lines
        .iter()
        .map(|Line { model, terms, cost }| {
            let mut copy = (*model).clone();
            let (answer, taken) = copy.ask(terms, now, *cost, ask);
            (copy, answer, taken)
        })
        .collect();
    let ready_at = tried.iter().filter_map(|(_, answer, _)| answer.ready_at).max();
    let fit = tried.iter().all(|(_, answer, _)| answer.allowed);
    // S13 over all quotas of all limits: one counts in a window that is over when another covers.
    let taking = lines.iter().filter(|line| line.cost > 0 && ask == Ask::Reserve);
    let covering: Option<Vec<_>> =
        taking.map(|line| line.model.covering(line.terms, now, line.cost)).collect();
    let covering = covering.map(|lines| lines.concat()).unwrap_or_default();
    let places = || covering.iter().enumerate();
    let last = places().filter(|(_, (.., waits))| *waits).max_by_key(|(_, (due, ..))| *due);
    // A window that begins at the end of time ends there, too.
    let is_late = |(i, (due, ..)): &(usize, &(i128, i128, bool))| {
        places().any(|(other, (_, end, _))| other != *i && end <= due)
    };
    let late = last.filter(is_late).map(|(_, (due, ..))| *due);
    let allowed = fit && late.is_none();
    if allowed {
        let ready_at = ready_at.filter(|_| ask == Ask::Reserve);
        let (mut answers, mut all_taken) = (vec![], vec![]);
        for (line, (copy, answer, taken)) in lines.iter_mut().zip(tried) {
            *line.model = copy;
            answers.push(answer);
            all_taken.extend(taken);
        }
        let taken = (ask != Ask::Peek).then_some(all_taken);
        return Together { allowed, retry_at: None, ready_at, answers, taken };
    }
    let mut retries = vec![];
    let answers = lines
        .iter_mut()
        .zip(tried)
        .map(|(line, (_, answer, _))| {
            // Only what has moved is written (S4).
            let write = if ask == Ask::Peek { Ask::Peek } else { Ask::Charge };
            let (look, _) = line.model.ask(line.terms, now, 0, write);
            if late.is_some() {
                retries.push(late);
                look
            } else if answer.allowed {
                look
            } else {
                retries.push(answer.retry_at);
                answer
            }
        })
        .collect();
    let for_good = retries.contains(&None);
    let retry_at = retries.into_iter().max().flatten().filter(|_| !for_good);
    Together { allowed, retry_at, ready_at: None, answers, taken: None }
}

/// FNV-1a, finished by fmix64, over scope and key (S2).
pub(crate) fn stagger(scope: &str, key: &[u8]) -> u64 {
    const WORD: u128 = 1 << 64;
    let mut hash: u128 = 14_695_981_039_346_656_037;
    for byte in scope.as_bytes().iter().chain(key) {
        hash = (hash ^ u128::from(*byte)) * 1_099_511_628_211 % WORD;
    }
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash ^= hash >> 33;
        hash = hash * factor % WORD;
    }
    (hash ^ (hash >> 33)) as u64
}
