//! Quotas in configuration files: as text, as tables and as lists.

use std::fmt;
use std::str::FromStr;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor,
};
use serde::ser::{Serialize, Serializer};

use super::{ParseQuotaError, Plan, Quota, Quotas};

struct QuotaVisitor<T> {
    expected: &'static str,
    /// `None` if the type can't be a list.
    from_list: Option<fn(Quotas) -> T>,
}

impl<'de, T: FromStr<Err = ParseQuotaError> + From<Quota>> Visitor<'de> for QuotaVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<T, A::Error> {
        let (mut limit, mut window) = (None, None);
        while let Some(key) = table.next_key::<String>()? {
            let twice = match key.replace('_', "-").as_str() {
                "limit" | "max-requests" => {
                    limit.replace(table.next_value::<u64>()?).map(|_| "limit")
                }
                "window" | "window-size" => {
                    window.replace(table.next_value_seed(WindowText)?).map(|_| "window")
                }
                _ => return Err(A::Error::unknown_field(&key, &["limit", "window"])),
            };
            if let Some(field) = twice {
                return Err(A::Error::duplicate_field(field));
            }
        }
        let limit = limit.ok_or_else(|| A::Error::missing_field("limit"))?;
        let window = window.ok_or_else(|| A::Error::missing_field("window"))?;
        format!("{limit}/{window}").parse::<Quota>().map(T::from).map_err(A::Error::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<T, A::Error> {
        let Some(first) = list.next_element::<Quota>()? else {
            return Err(A::Error::invalid_length(0, &self));
        };
        let mut quotas = Quotas::from(first);
        while let Some(quota) = list.next_element()? {
            quotas = quotas.try_and(quota).map_err(A::Error::custom)?;
        }
        let from_list =
            self.from_list.ok_or_else(|| A::Error::invalid_type(Unexpected::Seq, &self))?;
        Ok(from_list(quotas))
    }
}

/// A unit is required: a number alone means seconds in some programs and milliseconds in others.
struct WindowText;

impl<'de> DeserializeSeed<'de> for WindowText {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for WindowText {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a window with its unit, such as \"60s\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

macro_rules! in_files {
    ($($t:ty, $from_list:expr, $expected:literal;)*) => {$(
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let visitor = QuotaVisitor { expected: $expected, from_list: $from_list };
                // Binary formats don't say which type comes next. They contain serialized text.
                match deserializer.is_human_readable() {
                    true => deserializer.deserialize_any(visitor),
                    false => deserializer.deserialize_str(visitor),
                }
            }
        }
    )*};
}

in_files! {
    Quota, None, "a quota such as \"100/hour\", or a table with limit and window";
    Quotas, Some(|quotas| quotas),
        "a quota such as \"100/hour\", a table with limit and window, or a list of these";
    Plan, Some(Plan::from),
        "\"unlimited\", a quota such as \"100/hour\", a table with limit and window, or a list";
}
