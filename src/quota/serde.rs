//! Quotas in configuration files: as text, as tables and as lists.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{Plan, Quota, QuotaError, Quotas, text};

/// A type that a configuration file may contain.
trait InFile: FromStr<Err: fmt::Display> + From<Quota> {
    const EXPECTED: &str;

    /// Returns `None` if the type can't be a list.
    fn from_list(quotas: Quotas) -> Option<Self>;
}

impl InFile for Quota {
    const EXPECTED: &str = "a quota such as \"100/hour\", or a table with limit and window";

    fn from_list(_: Quotas) -> Option<Self> {
        None
    }
}

impl InFile for Quotas {
    const EXPECTED: &str =
        "a quota such as \"100/hour\", a table with limit and window, or a list of these";

    fn from_list(quotas: Quotas) -> Option<Self> {
        Some(quotas)
    }
}

impl InFile for Plan {
    const EXPECTED: &str =
        "\"unlimited\", a quota such as \"100/hour\", a table with limit and window, or a list";

    fn from_list(quotas: Quotas) -> Option<Self> {
        Some(quotas.into())
    }
}

struct QuotaVisitor<T>(PhantomData<T>);

impl<'de, T: InFile> Visitor<'de> for QuotaVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<T, A::Error> {
        let (mut limit, mut window) = (None, None);
        while let Some(key) = table.next_key::<String>()? {
            match key.replace('_', "-").as_str() {
                "limit" | "max-requests" if limit.is_some() => {
                    return Err(A::Error::duplicate_field("limit"));
                }
                "window" | "window-size" if window.is_some() => {
                    return Err(A::Error::duplicate_field("window"));
                }
                "limit" | "max-requests" => limit = Some(table.next_value::<u64>()?),
                "window" | "window-size" => window = Some(table.next_value::<WindowText>()?.0),
                _ => return Err(A::Error::unknown_field(&key, &["limit", "window"])),
            }
        }
        let limit = limit.ok_or_else(|| A::Error::missing_field("limit"))?;
        let window = window.ok_or_else(|| A::Error::missing_field("window"))?;
        if limit > Quota::MAX_TOKENS {
            return Err(A::Error::custom(QuotaError::LimitTooLarge));
        }
        text::windows(limit, &window).map(T::from).map_err(A::Error::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<T, A::Error> {
        let Some(first) = list.next_element::<Quota>()? else {
            return Err(A::Error::invalid_length(0, &self));
        };
        let mut quotas = Quotas::from(first);
        while let Some(quota) = list.next_element()? {
            quotas = quotas.try_and(quota).map_err(A::Error::custom)?;
        }
        T::from_list(quotas).ok_or_else(|| A::Error::invalid_type(Unexpected::Seq, &self))
    }
}

/// The text of a window in a table. A unit is required, since a number alone means seconds in some
/// programs and milliseconds in others.
struct WindowText(String);

impl<'de> Deserialize<'de> for WindowText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyText;

        impl Visitor<'_> for AnyText {
            type Value = WindowText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a window with its unit, such as \"60s\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<WindowText, E> {
                Ok(WindowText(text.to_owned()))
            }
        }
        deserializer.deserialize_str(AnyText)
    }
}

macro_rules! in_files {
    ($($t:ty),*) => {$(
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                // Binary formats don't say which type comes next. They contain serialized text.
                match deserializer.is_human_readable() {
                    true => deserializer.deserialize_any(QuotaVisitor(PhantomData)),
                    false => deserializer.deserialize_str(QuotaVisitor(PhantomData)),
                }
            }
        }
    )*};
}

in_files!(Quota, Quotas, Plan);
