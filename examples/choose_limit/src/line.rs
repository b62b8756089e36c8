//! A line of a log: the time of a request, and its client.

use crate::client::Client;
use crate::json;
use crate::time;

/// The reasons why a line can't be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unread {
    Broken,
    NoClient,
}

pub(crate) struct Format {
    key: Option<String>,
    json: json::Fields,
}

impl Format {
    pub(crate) fn new(key: Option<String>) -> Self {
        Self { json: json::Fields::new(key.as_deref()), key }
    }

    pub(crate) fn read(&self, line: &[u8]) -> Result<(i64, Client), Unread> {
        match line.first() {
            Some(b'{') => self.json.read(line),
            _ => text(line, self.key.as_deref().unwrap_or("remote_addr")),
        }
    }
}

/// The common and combined formats, also behind what syslog or a name of a host puts before them:
/// `192.0.2.7 - ada [21/Nov/2026:23:30:36 +0000] "GET / HTTP/1.1" 200 12 "referer" "agent"`.
fn text(line: &[u8], key: &str) -> Result<(i64, Client), Unread> {
    let (before, time, after) = around_time(line).ok_or(Unread::Broken)?;
    let value = match key {
        "remote_addr" => address(before),
        "remote_user" => before.rsplit(u8::is_ascii_whitespace).next(),
        "request" => quoted(after, 0),
        "method" => request(after, 0),
        "path" => request(after, 1).map(|path| until(path, b'?')),
        "http_referer" => quoted(after, 1),
        "http_user_agent" => quoted(after, 2),
        "http_x_forwarded_for" => quoted(after, 3),
        _ => None,
    };
    let client = Client::new(&String::from_utf8_lossy(value.ok_or(Unread::NoClient)?));
    Ok((time, client.ok_or(Unread::NoClient)?))
}

/// Splits a line into the text before its time, the time, and the rest. The user's name may have
/// brackets, too.
fn around_time(line: &[u8]) -> Option<(&[u8], i64, &[u8])> {
    let brackets = line.iter().enumerate().filter(|(_, byte)| **byte == b'[').take(4);
    brackets.map(|(at, _)| at).find_map(|at| {
        let rest = &line[at + 1..];
        let end = rest.iter().take(40).position(|byte| *byte == b']')?;
        Some((line[..at].trim_ascii(), time::parse(&rest[..end])?, &rest[end + 1..]))
    })
}

/// Finds the address: the third word before the time, or the first word, since names of users may
/// have spaces.
fn address(before: &[u8]) -> Option<&[u8]> {
    let mut words = before.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let first = words.clone().next()?;
    let third = words.nth_back(2);
    let is_address = |word: &[u8]| {
        Client::new(&String::from_utf8_lossy(word)).is_some_and(|client| client.is_address())
    };
    match third {
        Some(third) if third == first || is_address(third) || !is_address(first) => Some(third),
        _ => Some(first).filter(|first| is_address(first)),
    }
}

fn quoted(text: &[u8], n: usize) -> Option<&[u8]> {
    let mut rest = text;
    for i in 0.. {
        let start = rest.iter().position(|byte| *byte == b'"')? + 1;
        let mut escaped = false;
        let length = rest[start..].iter().position(|byte| {
            let ends = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            ends
        })?;
        if i == n {
            return Some(&rest[start..start + length]);
        }
        rest = &rest[start + length + 1..];
    }
    None
}

fn request(after: &[u8], word: usize) -> Option<&[u8]> {
    quoted(after, 0)?.split(|byte| *byte == b' ').nth(word)
}

fn until(text: &[u8], end: u8) -> &[u8] {
    text.split(|byte| *byte == end).next().unwrap_or(text)
}
