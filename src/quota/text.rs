//! Quotas as text, `"33/minute, 2000/hour"`: parsing, printing, `serde`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Anchor, MONDAY_MS, Quota, QuotaError, Quotas, WEEK_MS};

/// Units, longest first, with the names that are read; the first is the one that is printed.
const UNITS: [(u64, &[&str]); 6] = [
    (WEEK_MS, &["week", "weeks", "w"]),
    (86_400_000, &["day", "days", "d"]),
    (3_600_000, &["hour", "hours", "h"]),
    (60_000, &["minute", "minutes", "min", "m"]),
    (1_000, &["second", "seconds", "sec", "s"]),
    (1, &["ms"]),
];

impl fmt::Display for Quota {
    /// The form that is parsed: `60/minute`, `5/10s`, `60/hour from-first-request`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rate().fmt(f)?;
        let aligned = if self.window == WEEK_MS { MONDAY_MS } else { 0 };
        match self.anchor {
            Anchor::Grid { offset } if offset == aligned => {}
            Anchor::Grid { offset } => write!(f, " starting-at={offset}ms")?,
            Anchor::Staggered => f.write_str(" staggered")?,
            Anchor::FirstRequest => f.write_str(" from-first-request")?,
        }
        if self.capacity != self.limit {
            write!(f, " rollover-up-to={}", self.capacity)?;
        }
        if self.max_reserved != 0 {
            write!(f, " reserve-up-to={}", self.max_reserved)?;
        }
        Ok(())
    }
}

impl Quota {
    /// Only limit and window: what a client is told.
    pub(crate) fn rate(&self) -> impl fmt::Display + use<> {
        Rate(*self)
    }
}

struct Rate(Quota);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quota { limit, window, .. } = self.0;
        let (unit, names) = UNITS
            .into_iter()
            .find(|(unit, _)| window % unit == 0)
            .expect("every window is whole milliseconds");
        match window / unit {
            1 => write!(f, "{limit}/{}", names[0]),
            n => write!(f, "{limit}/{n}{}", names[names.len() - 1]),
        }
    }
}

impl fmt::Display for Quotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, quota) in self.iter().enumerate() {
            write!(f, "{}{quota}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl FromStr for Quota {
    type Err = ParseQuotaError;

    /// Reads `limit/window`, where the window is a unit (`minute`) or a number of them (`10s`, `10
    /// seconds`), and then any of `staggered`, `from-first-request`, `starting-at=6h`,
    /// `rollover-up-to=150`, `reserve-up-to=20`, each meaning the method of that name. The first
    /// three exclude each other, and none may be there twice.
    ///
    /// ```
    /// use tower_fixed_window::Quota;
    ///
    /// assert_eq!("100/hour".parse(), Ok(Quota::per_hour(100)));
    /// assert_eq!("60/h from-first-request".parse(), Ok(Quota::per_hour(60).from_first_request()));
    ///
    /// let error = "100/fortnight".parse::<Quota>().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "\"100/fortnight\", column 5: expected a unit: ms, s, minute, hour, day or week",
    /// );
    /// ```
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        Parser { text, at: 0 }.whole(Parser::quota)
    }
}

impl FromStr for Quotas {
    type Err = ParseQuotaError;

    /// Reads quotas separated by commas.
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        Parser { text, at: 0 }.whole(|p| {
            let mut quotas = Quotas::from(p.quota()?);
            while p.eat(",") {
                p.space();
                let at = p.at;
                let quota = p.quota()?;
                quotas = quotas.try_and(quota).map_err(|error| p.invalid(at, error))?;
            }
            Ok(quotas)
        })
    }
}

/// Why text is no quota: what was expected, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseQuotaError {
    text: String,
    at: usize,
    kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Kind {
    Expected(&'static str),
    Again(&'static str),
    Invalid(QuotaError),
}

impl ParseQuotaError {
    /// The byte at which the fault begins.
    pub fn position(&self) -> usize {
        self.at
    }
}

impl fmt::Display for ParseQuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What is shown is bounded: the text may be a whole file, handed over by mistake.
        let shown: String = self.text.chars().take(80).collect();
        let column = self.text[..self.at].chars().count() + 1;
        write!(f, "{shown:?}, column {column}: ")?;
        match self.kind {
            Kind::Expected(what) => write!(f, "expected {what}"),
            Kind::Again(what) => f.write_str(what),
            Kind::Invalid(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ParseQuotaError {}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

type Parsed<T> = Result<T, ParseQuotaError>;

/// What may follow a rate. The first three choose where windows begin.
const OPTIONS: [&str; 5] =
    ["staggered", "from-first-request", "starting-at=", "rollover-up-to=", "reserve-up-to="];
const STARTING_AT: usize = 2;
/// Each of these is chosen at most once.
const ONCE: [&str; 3] = [
    "windows begin in one way: keep one of staggered, from-first-request, starting-at=",
    "rollover-up-to= is here twice: keep one",
    "reserve-up-to= is here twice: keep one",
];
const A_NUMBER: &str = "a whole number of at most 2^53 - 1";

impl Parser<'_> {
    fn whole<T>(mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.space();
        let value = parse(&mut self)?;
        if self.at == self.text.len() {
            return Ok(value);
        }
        self.expected("a comma, the end, or one of staggered, from-first-request, starting-at=, rollover-up-to=, reserve-up-to=")
    }

    fn quota(&mut self) -> Parsed<Quota> {
        let start = self.at;
        let limit = self.number("a limit: a whole number, as in 100/hour")?;
        self.space();
        if !self.eat("/") {
            return self.expected("a slash and a window, as in 100/hour");
        }
        self.space();
        let at = self.at;
        let window = self.span()?;
        let mut quota = Quota::try_new(limit, window).map_err(|error| {
            let limit = error == QuotaError::LimitTooLarge;
            self.invalid(if limit { start } else { at }, error)
        })?;
        let mut told = [false; ONCE.len()];
        loop {
            let end = self.at;
            self.space();
            let at = self.at;
            let Some((option, _)) = (0..).zip(OPTIONS).find(|(_, option)| self.eat(option)) else {
                return Ok(quota);
            };
            if at == end {
                return Err(self.error(at, Kind::Expected("a space")));
            }
            let what = usize::saturating_sub(option, STARTING_AT);
            if std::mem::replace(&mut told[what], true) {
                return Err(self.error(at, Kind::Again(ONCE[what])));
            }
            match option {
                0 => quota = quota.staggered(),
                1 => quota = quota.from_first_request(),
                STARTING_AT => quota = quota.starting_at(self.span()?),
                3 => quota.capacity = self.number(A_NUMBER)?,
                _ => quota.max_reserved = self.number(A_NUMBER)?,
            }
            if option > STARTING_AT {
                self.check(at, &quota)?;
            }
        }
    }

    fn check(&self, at: usize, quota: &Quota) -> Parsed<()> {
        let sum = quota.capacity.checked_add(quota.max_reserved);
        match sum {
            Some(0..=super::MAX_TOKENS) if quota.capacity >= quota.limit => Ok(()),
            _ => Err(self.invalid(at, QuotaError::Capacity)),
        }
    }

    /// `minute`, `10s`, `10 seconds`.
    fn span(&mut self) -> Parsed<Duration> {
        let start = self.at;
        let count = match self.rest().starts_with(|c: char| c.is_ascii_digit()) {
            true => self.number(A_NUMBER)?,
            false => 1,
        };
        self.space();
        let rest = self.rest();
        let word = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit = UNITS.into_iter().find(|(_, names)| names.contains(&&rest[..word]));
        let Some((unit, _)) = unit else {
            return self.expected("a unit: ms, s, minute, hour, day or week");
        };
        self.at += word;
        let millis = count
            .checked_mul(unit)
            .ok_or_else(|| self.invalid(start, QuotaError::WindowTooLong))?;
        Ok(Duration::from_millis(millis))
    }

    fn number(&mut self, what: &'static str) -> Parsed<u64> {
        let rest = self.rest();
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        match rest[..digits].parse() {
            Ok(number) => {
                self.at += digits;
                Ok(number)
            }
            Err(_) if digits > 0 => self.expected(A_NUMBER),
            Err(_) => self.expected(what),
        }
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn expected<T>(&self, what: &'static str) -> Parsed<T> {
        Err(self.error(self.at, Kind::Expected(what)))
    }

    fn invalid(&self, at: usize, error: QuotaError) -> ParseQuotaError {
        self.error(at, Kind::Invalid(error))
    }

    fn error(&self, at: usize, kind: Kind) -> ParseQuotaError {
        ParseQuotaError { text: self.text.to_owned(), at, kind }
    }
}

#[cfg(feature = "serde")]
mod with_serde {
    use std::fmt;
    use std::marker::PhantomData;
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error, Visitor};
    use serde::ser::{Serialize, Serializer};

    use super::super::{Quota, Quotas};

    struct Text<T>(PhantomData<T>);

    impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a quota such as \"100/hour\"")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }

    macro_rules! as_text {
        ($($t:ty),*) => {$(
            impl Serialize for $t {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }

            impl<'de> Deserialize<'de> for $t {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    deserializer.deserialize_str(Text(PhantomData))
                }
            }
        )*};
    }

    as_text!(Quota, Quotas);
}
