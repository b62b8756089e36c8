//! Reports each line of a charge once: to the log and the metrics, to warnings, and to the counts
//! of refused keys.
//!
//! A limit without warnings and counts of refused keys costs each request the look at one `bool` of
//! its limiter, `is_watched`. With a warning, each request costs a comparison for each share and
//! quota, and of several limits a copy of the line's decision.

use http::request::Parts;

use super::Limiter;
use crate::decision::Decision;
use crate::key::route;
use crate::observe::{self, Event};
use crate::store::{Account, Scope};

pub(crate) type ChargedLine<'a> = (&'a Limiter, Account<'a>, u64);

/// In shadow mode nothing is refused. `parts` are those of a request to a layer, whose route is
/// counted, too.
#[inline(always)]
pub(crate) fn report<'a>(
    decision: &Decision,
    lines: usize,
    line: impl Fn(usize) -> ChargedLine<'a>,
    parts: Option<&Parts>,
) {
    // The first one outside of the loop, so that the compiler knows its place.
    let mut is_watched = note(decision, 0, line(0));
    for place in 1..lines {
        is_watched |= note(decision, place, line(place));
    }
    // After all lines were counted, since a closure of the app may panic.
    if is_watched {
        watch(decision, (0..lines).map(line), parts);
    }
}

#[inline(always)]
fn note(decision: &Decision, place: usize, (limiter, account, cost): ChargedLine<'_>) -> bool {
    if !decision.is_allowed() {
        if observe::ON {
            report_refused(account, decision, place);
        }
    } else if let Some(of) = decision.at(place) {
        note_passed(account.scope, cost, of.ready_at_ms().is_some());
    } else {
        // Its store failed, and lets requests pass then.
        account.scope.observe().event(Event::FailedOpen, 1);
    }
    limiter.is_watched
}

#[inline(always)]
pub(super) fn note_passed(scope: &Scope, tokens: u64, waits: bool) {
    if observe::ON {
        scope.observe().passed(if waits { Event::Reserved } else { Event::Passed }, tokens);
    }
}

/// The log has one event for a request: that of the line that governs.
#[inline(never)]
fn report_refused(account: Account<'_>, decision: &Decision, place: usize) {
    if decision.at(place).is_none_or(Decision::is_allowed) {
        return;
    }
    let outcome = if decision.is_shadow() { Event::ShadowRefused } else { Event::Refused };
    let observed = account.scope.observe();
    observed.event(outcome, 1);
    if observe::shows_refusals() && place == decision.governing_line() {
        let quota = decision.governing_quota(account.quotas);
        observed.log_refusal(outcome, Some((quota, decision.retry_after())), None);
    }
}

#[inline(never)]
fn watch<'a>(
    decision: &Decision,
    lines: impl Iterator<Item = ChargedLine<'a>>,
    parts: Option<&Parts>,
) {
    for (place, (limiter, account, _)) in lines.enumerate().filter(|(_, of)| of.0.is_watched) {
        let (key, quotas) = (account.key, account.quotas);
        let Some(of) = decision.at(place) else { continue };
        match &limiter.live.tracker {
            _ if decision.is_allowed() => limiter.live.limit.warn(key, quotas, of, of.granted()),
            Some(tracker) if !of.is_allowed() => tracker.note(key, quotas, of, parts.map(route)),
            _ => {}
        }
    }
}
