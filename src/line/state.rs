//! Who is in a line, in which order, and what is known there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::claim::{Claim, Terms, Those, Tokens};
use super::tokens::{Asked, Hand, Told};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::Instant;

/// Timers and the store's clock round to this.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The requests of a key that wait, by their numbers in order of arrival.
pub(super) struct State {
    pub(super) arrivals: u64,
    pub(super) there: BTreeMap<u64, Entry>,
    /// Passed over, since they were not polled; each comes back when it is.
    pub(super) away: BTreeMap<u64, Entry>,
    /// Refused while they were looking away.
    pub(super) refused: BTreeMap<u64, Decision>,
    /// What all that are there ask for.
    pub(super) tokens: Tokens,
    /// How many have been told to wait.
    pub(super) waiting: u64,
    /// From here on some have joined who don't know whether they have to wait.
    pub(super) unjudged: u64,
    pub(super) told: Option<Told>,
    /// When tokens were granted last.
    pub(super) served: Option<Instant>,
    pub(super) asked: Option<Asked>,
    pub(super) hand: Option<Hand>,
    /// The charge of those up to a number has failed.
    pub(super) failed: Option<(u64, StoreError)>,
}

pub(super) struct Entry {
    /// None from when it has got its tokens.
    pub(super) cost: Tokens,
    /// What it is decided by, where that is its own, and not the layer's.
    pub(super) own: Option<Terms>,
    pub(super) arrived: Instant,
    pub(super) deadline: Instant,
    /// By then it is polled again, if it is polled at all.
    pub(super) looks: Instant,
    pub(super) has_to_wait: bool,
    /// It is its turn, but its service was not ready.
    pub(super) readying: bool,
    pub(super) waker: Option<Waker>,
}

impl Entry {
    pub(super) fn has_to_wait(&mut self, waiting: &mut u64, out: &mut Out) {
        self.has_to_wait = true;
        *waiting += 1;
        out.waits += 1;
    }
}

/// Who polls.
pub(super) struct Asker<'a> {
    /// What its charge is decided by.
    pub(super) terms: &'a Terms,
    pub(super) now: Instant,
    /// How many may wait, and for how long.
    pub(super) most: u64,
    pub(super) max_wait: Duration,
    /// Whether a charge covers those behind the head, since it takes a while.
    pub(super) covers_others: bool,
    /// Whether several limits are charged together.
    pub(super) of_several: bool,
    /// Whether other nodes charge the same keys.
    pub(super) shared: bool,
    /// No request may wait any longer.
    pub(super) closed: bool,
}

impl Asker<'_> {
    /// Whether all limits could ever grant as many tokens.
    pub(super) fn can_be_granted(&self, tokens: &Tokens) -> bool {
        let mut of = self.terms.iter().zip(tokens.costs());
        of.all(|(term, tokens)| term.quotas.can_grant(tokens))
    }
}

/// Why a request is not charged.
pub(crate) enum End {
    /// It is not due yet, and lets go of its service.
    LetGo,
    Refused(Decision),
    Failed(StoreError),
    /// No answer has come in time.
    Unanswered,
    Closed,
}

/// What is done without the lock.
#[derive(Default)]
pub(super) struct Out {
    wakers: Vec<Waker>,
    /// These tokens are returned.
    pub(super) back: Vec<(Decision, Terms)>,
    /// A charge in flight that no request waits for.
    pub(super) orphan: Option<(Reply<Decision>, Terms)>,
    dropped: Option<Waker>,
    /// How many more have to wait.
    pub(super) waits: i64,
    /// How long others have waited.
    pub(super) waited: Vec<Duration>,
}

impl Out {
    pub(super) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

impl State {
    /// Of a line in which requests ask for tokens of as many limits.
    pub(super) fn new(cost: &Tokens) -> Self {
        Self {
            arrivals: 0,
            there: BTreeMap::new(),
            away: BTreeMap::new(),
            refused: BTreeMap::new(),
            tokens: cost.none(),
            waiting: 0,
            unjudged: 0,
            told: None,
            served: None,
            asked: None,
            hand: None,
            failed: None,
        }
    }

    /// A newcomer takes the last place, unless it has to wait and there is no room, or no time.
    pub(super) fn join(
        &mut self,
        claim: &Claim,
        asker: &Asker<'_>,
        out: &mut Out,
    ) -> Result<u64, Decision> {
        let Claim { cost, own, .. } = claim;
        let Asker { terms, now, most, max_wait, .. } = *asker;
        let deadline = now.checked_add(max_wait).unwrap_or(now + Duration::from_secs(1 << 32));
        let told = self.told.as_ref().filter(|told| !told.stale && told.terms == *terms);
        let has_to_wait = match told {
            Some(told) => {
                let mut tokens = self.not_in_hand(&self.tokens);
                tokens += cost;
                match told.due(&tokens) {
                    Some(due) if due <= now => false,
                    Some(due) if self.waiting < most && due <= deadline + TICK => true,
                    _ => return Err(told.refusal(&tokens, now)),
                }
            }
            None => false,
        };
        let number = self.arrivals;
        self.arrivals += 1;
        if self.there.is_empty() {
            self.unjudged = number;
        }
        self.tokens += cost;
        let (cost, own) = (cost.clone(), own.then(|| Arc::clone(terms)));
        let (arrived, looks, readying, waker) = (now, now + TICK, false, None);
        let mut entry =
            Entry { cost, own, arrived, deadline, looks, has_to_wait: false, readying, waker };
        if has_to_wait {
            entry.has_to_wait(&mut self.waiting, out);
        }
        self.there.insert(number, entry);
        Ok(number)
    }

    pub(super) fn set_waker(&mut self, me: u64, waker: &Waker, out: &mut Out) {
        let entry = self.there.get_mut(&me).or_else(|| self.away.get_mut(&me));
        if let Some(entry) = entry
            && !entry.waker.as_ref().is_some_and(|there| there.will_wake(waker))
        {
            out.dropped = entry.waker.replace(waker.clone());
        }
    }

    pub(super) fn head(&self) -> Option<u64> {
        self.there.first_key_value().map(|(number, _)| *number)
    }

    pub(super) fn wake_head(&mut self, now: Instant, out: &mut Out) {
        if let Some(mut head) = self.there.first_entry() {
            let head = head.get_mut();
            head.looks = head.looks.min(now);
            out.wakers.extend(head.waker.take());
        }
    }

    pub(super) fn wake_all(&mut self, out: &mut Out) {
        out.wakers.extend(self.there.values_mut().filter_map(|entry| entry.waker.take()));
    }

    /// The first request that has no tokens yet.
    pub(super) fn first_short(&self) -> Option<&Tokens> {
        self.there.values().map(|entry| &entry.cost).find(|cost| !cost.is_none())
    }

    /// There may be tokens of some limits now: if the head waits for one of these, it asks at once.
    pub(super) fn ask_again(&mut self, limits: Those, out: &mut Out) {
        if let Some(asked) = &mut self.asked {
            asked.freed = asked.freed.and(limits);
        }
        let (Some(told), Some(first)) = (&self.told, self.first_short()) else { return };
        if told.waits_for(limits, first) {
            self.told.iter_mut().for_each(|told| told.stale = true);
            self.wake_head(Instant::now(), out);
        }
    }

    /// These tokens without those that were granted and are not used yet.
    pub(super) fn not_in_hand(&self, tokens: &Tokens) -> Tokens {
        self.hand.as_ref().map_or_else(|| tokens.clone(), |hand| tokens - &hand.left)
    }

    pub(super) fn empty_hand(&mut self, out: &mut Out) {
        let Some(hand) = self.hand.take().filter(|hand| !hand.left.is_none()) else { return };
        if let Some(told) = &mut self.told {
            told.decision = hand.without_rest();
        }
        out.back.push((hand.rest(), hand.terms));
    }

    pub(super) fn refuse(&mut self, number: u64, refusal: Decision, now: Instant, out: &mut Out) {
        let was_head = self.head() == Some(number);
        let Some(entry) = self.remove(number, now, out) else { return };
        self.refused.insert(number, refusal);
        out.wakers.extend(entry.waker);
        if was_head {
            self.wake_head(now, out);
        }
    }

    fn remove(&mut self, number: u64, now: Instant, out: &mut Out) -> Option<Entry> {
        let entry = self.there.remove(&number).or_else(|| self.away.remove(&number))?;
        self.tokens -= &entry.cost;
        if entry.has_to_wait {
            self.waiting -= 1;
            out.waits -= 1;
            out.waited.push(now.saturating_duration_since(entry.arrived));
        }
        Some(entry)
    }

    /// It is served, refused or gone.
    pub(super) fn leave(&mut self, me: u64, out: &mut Out) {
        let (was_head, now) = (self.head() == Some(me), Instant::now());
        self.refused.remove(&me);
        out.dropped = self.remove(me, now, out).and_then(|entry| entry.waker);
        let polled = self.asked.as_ref().filter(|asked| asked.polled_by == Some(me));
        let (is_mine, is_lost) =
            (polled.is_some(), polled.is_some_and(|asked| asked.reply.is_none()));
        if self.there.is_empty() || is_lost {
            // A charge that was not sent is withdrawn, and one that has panicked has no answer.
            if let Some(Asked { reply: Some(reply), terms, polled_by: Some(_), .. }) =
                self.asked.take()
            {
                out.orphan = Some((reply, terms));
            }
        }
        if self.there.is_empty() {
            self.empty_hand(out);
        } else if was_head || is_mine {
            self.wake_head(now, out);
        }
    }
}
