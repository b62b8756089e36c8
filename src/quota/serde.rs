//! Quotas in configuration files, as text.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{ParseQuotaError, Plan, Quota, Quotas};

/// With what is expected, for errors.
struct Text<T>(&'static str, PhantomData<T>);

impl<T: FromStr<Err = ParseQuotaError>> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! in_files {
    ($($t:ty, $expected:literal;)*) => {$(
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Text($expected, PhantomData))
            }
        }
    )*};
}

in_files! {
    Quota, "a quota such as \"100/hour\"";
    Quotas, "quotas such as \"100/hour\" or \"5/second, 100/hour\"";
    Plan, "\"unlimited\", or quotas such as \"100/hour\"";
}
