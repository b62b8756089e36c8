//! The candidates, and the choice between them.

use tower_fixed_window::{Quota, Quotas};

use crate::report::{Report, Windows};
use crate::simulate::{Meter, Simulation};
use crate::table::grouped;

/// 1, 2, 5, 10, .. to five million, a minute and an hour.
pub(crate) fn candidates() -> Vec<Quota> {
    let limits = (0..7).flat_map(|n| [1, 2, 5].map(|digit| digit * 10_u64.pow(n)));
    limits.flat_map(|limit| [Quota::per_minute(limit), Quota::per_hour(limit)]).collect()
}

impl Report {
    /// Chooses quotas, and says why. Among the candidates: the smallest limits a minute and an hour
    /// that together refuse no more than the tolerated share of clients. Among given quotas: the
    /// one that grants least.
    pub(crate) fn recommend(&mut self, simulation: &Simulation, given: bool, tolerated: f64) {
        // The addend makes up for rounding: 3 / 1,000 in binary, times 1,000, is a little less than
        // 3.
        let allowed = (tolerated * self.clients as f64 + 1e-9) as u64;
        self.tolerated = tolerated;
        let choice =
            if given { self.least(simulation, allowed) } else { self.pair(simulation, allowed) };
        let share = format!(
            "at most {} of the clients ({} of {}) would ever have been refused",
            percent(tolerated),
            grouped(allowed),
            grouped(self.clients)
        );
        self.why = match (&choice, given) {
            (None, true) => format!("There is none among the given quotas under which {share}."),
            (None, false) => format!("There is no quota of the row under which {share}."),
            (Some((_, refused)), true) => {
                format!(
                    "Of the given quotas it grants the least of those under which {share}: here {refused}."
                )
            }
            (Some((_, refused)), false) => format!(
                "It is the smallest of 1, 2, 5, 10, .. a minute and an hour under which {share}: \
                 here {refused}."
            ),
        };
        self.recommended = choice.map(|(quotas, _)| quotas.to_string());
    }

    fn least(&self, simulation: &Simulation, allowed: u64) -> Option<(Quotas, u64)> {
        let rate = |quota: &Quota| quota.limit() as f64 / quota.window().as_secs_f64();
        let all = self.windows.iter().flat_map(|windows| {
            let quotas = simulation.grids[windows.grid].quotas.iter();
            quotas.map(|quota| (*quota, windows.above(quota.limit())))
        });
        let fitting = all.filter(|(_, refused)| *refused <= allowed);
        fitting
            .min_by(|(a, _), (b, _)| rate(a).total_cmp(&rate(b)))
            .map(|(quota, refused)| (quota.into(), refused))
    }

    fn pair(&self, simulation: &Simulation, allowed: u64) -> Option<(Quotas, u64)> {
        let [minutes, hours] = &self.windows[..] else { return None };
        let fits = |windows: &Windows, quota: &Quota| windows.above(quota.limit()) <= allowed;
        let quotas = |windows: &Windows| simulation.grids[windows.grid].quotas.iter();
        let minute = quotas(minutes).find(|quota| fits(minutes, quota))?;
        for hour in quotas(hours).filter(|quota| fits(hours, quota)) {
            // A single quota is enough where the other one would never refuse.
            if hour.limit() <= minute.limit() {
                return Some(((*hour).into(), hours.above(hour.limit())));
            }
            if hour.limit() >= 60 * minute.limit() {
                break;
            }
            let above = |meter: &Meter, quota: &Quota| u64::from(meter.most) > quota.limit();
            let refused = simulation.clients().filter(|(_, meters)| {
                above(&meters[minutes.grid], minute) || above(&meters[hours.grid], hour)
            });
            let refused = refused.count() as u64;
            if refused <= allowed {
                return Some((minute.and(*hour), refused));
            }
        }
        Some(((*minute).into(), minutes.above(minute.limit())))
    }
}

/// `0.1%`.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 0.0 && percent < 0.000_5 {
        return "<0.001%".to_owned();
    }
    let digits = if percent == 0.0 || percent >= 10.0 {
        0
    } else if percent >= 0.1 {
        1
    } else {
        3
    };
    format!("{percent:.digits$}%")
}
