//! The name of a limit, as decisions have it: [`LimitName`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The number of a name among those of this process, or 0 for none. A decision that had the name
/// itself would count references to it with each request.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LimitName(u16);

struct Names {
    numbers: BTreeMap<&'static str, u16>,
    all: Vec<&'static str>,
}

static NAMES: Mutex<Names> = Mutex::new(Names { numbers: BTreeMap::new(), all: Vec::new() });

impl LimitName {
    /// Returns the name's number. Names are kept for as long as the process runs: 65,535 of them,
    /// in some 5 MB. Decisions of limits beyond that know no name.
    pub(crate) fn of(name: &str) -> Self {
        if name.is_empty() {
            return Self::default();
        }
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let Names { numbers, all } = &mut *names;
        if let Some(number) = numbers.get(name) {
            return Self(*number);
        }
        let Ok(number) = u16::try_from(all.len() + 1) else { return Self::default() };
        let name: &'static str = String::from(name).leak();
        numbers.insert(name, number);
        all.push(name);
        Self(number)
    }

    /// Returns the name. It is empty if the limit has none.
    pub(crate) fn text(self) -> &'static str {
        let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let place = usize::from(self.0).checked_sub(1);
        place.and_then(|place| names.all.get(place)).copied().unwrap_or_default()
    }
}

impl fmt::Debug for LimitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.text(), f)
    }
}
