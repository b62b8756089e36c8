//! A line of JSON: takes out the needed fields, and ignores all others.

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

use crate::client::Client;
use crate::line::Unread;
use crate::time;

/// The fields in which servers and proxies write the time; the first that a line has counts.
const TIMES: [&str; 14] = [
    "time_iso8601",
    "timestamp",
    "@timestamp",
    "ts",
    "msec",
    "StartUTC",
    "start_time",
    "time_local",
    "time",
    "datetime",
    "date",
    "requestTime",
    "eventTime",
    "StartLocal",
];

/// The fields in which they write the client's address: nginx, Caddy, Traefik, Envoy, Elastic,
/// cloud providers.
const CLIENTS: [&str; 21] = [
    "request.client_ip",
    "request.remote_ip",
    "client_ip",
    "remote_addr",
    "remote_ip",
    "ClientHost",
    "ClientAddr",
    "clientip",
    "clientIp",
    "client.ip",
    "client.address",
    "source.ip",
    "source.address",
    "remoteAddr",
    "remoteIp",
    "httpRequest.remoteIp",
    "remote_host",
    "downstream_remote_address",
    "request.remote_addr",
    "ip",
    "client",
];

pub(crate) struct Fields {
    paths: Vec<String>,
}

impl Fields {
    pub(crate) fn new(key: Option<&str>) -> Self {
        let clients = key.map_or(CLIENTS.to_vec(), |key| vec![key]);
        Self { paths: TIMES.into_iter().chain(clients).map(str::to_owned).collect() }
    }

    pub(crate) fn read(&self, line: &[u8]) -> Result<(i64, Client), Unread> {
        let mut found = Found::default();
        let mut json = serde_json::Deserializer::from_slice(line);
        let all = Paths { here: 0, below: (1 << self.paths.len()) - 1 };
        let value = Value { fields: self, paths: all, depth: 0, found: &mut found };
        value.deserialize(&mut json).and_then(|()| json.end()).map_err(|_| Unread::Broken)?;
        let (_, time) = found.time.ok_or(Unread::Broken)?;
        let (_, client) = found.client.ok_or(Unread::NoClient)?;
        Ok((time, client))
    }

    /// The paths that lead through `key`, among those that lead to the object.
    fn step(&self, key: &str, paths: u64, depth: usize) -> Paths {
        let mut next = Paths { here: 0, below: 0 };
        for (i, path) in self.paths.iter().enumerate().filter(|(i, _)| paths >> i & 1 == 1) {
            match path[depth..].strip_prefix(key) {
                Some("") => next.here |= 1 << i,
                Some(rest) if rest.starts_with('.') => next.below |= 1 << i,
                _ => {}
            }
        }
        next
    }
}

/// The best time and client so far, with the places of their paths in the lists.
#[derive(Default)]
struct Found {
    time: Option<(usize, i64)>,
    client: Option<(usize, Client)>,
}

impl Found {
    fn take(&mut self, paths: u64, time: impl FnOnce() -> Option<i64>, client: &str) {
        let path = paths.trailing_zeros() as usize;
        if path < TIMES.len() && self.time.is_none_or(|(best, _)| path <= best) {
            self.time = time().map(|time| (path, time)).or(self.time);
        }
        let path = (paths >> TIMES.len()).trailing_zeros() as usize;
        if path < 64
            && self.client.as_ref().is_none_or(|(best, _)| path <= *best)
            && let Some(client) = Client::new(client)
        {
            self.client = Some((path, client));
        }
    }
}

/// Sets of paths, a bit for each: those that end at a value, and those that lead into it.
#[derive(Clone, Copy)]
struct Paths {
    here: u64,
    below: u64,
}

struct Value<'a> {
    fields: &'a Fields,
    paths: Paths,
    /// The part of each path that has been followed already.
    depth: usize,
    found: &'a mut Found,
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.found.take(self.paths.here, || time::parse(text.as_bytes()), text);
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.found.take(self.paths.here, || time::number(number as f64), &number.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.found.take(self.paths.here, || None, &number.to_string());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.found.take(self.paths.here, || time::number(number), &number.to_string());
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    /// The last value of a list counts, as with a header that has several values.
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { fields, paths, depth, found } = self;
        while list.next_element_seed(Value { fields, paths, depth, found })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { fields, paths, depth, found } = self;
        while let Some((length, next)) = map.next_key_seed(Name { fields, paths, depth })? {
            if next.here | next.below == 0 {
                map.next_value::<IgnoredAny>()?;
            } else {
                // Skips the name and the dot after it.
                let depth = depth + length + 1;
                map.next_value_seed(Value { fields, paths: next, depth, found })?;
            }
        }
        Ok(())
    }
}

/// The name of a field: its length, and the paths that go on there.
struct Name<'a> {
    fields: &'a Fields,
    paths: Paths,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = (usize, Paths);

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = (usize, Paths);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok((name.len(), self.fields.step(name, self.paths.below, self.depth)))
    }
}
