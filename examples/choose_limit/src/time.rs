//! Times as logs write them, read as milliseconds since the epoch, and written as UTC.

const MONTHS: [&[u8]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];
const DAY_MS: i64 = 86_400_000;

/// `21/Nov/2026:23:30:36 +0100`, `2026-11-21T23:30:36.5+01:00`, or seconds since the epoch. A time
/// without a zone is UTC. `None` before 1970 and after 9999, too.
pub(crate) fn parse(text: &[u8]) -> Option<i64> {
    match text {
        [_, _, b'/', ..] => {
            let month = MONTHS.iter().position(|month| text.get(3..6) == Some(month))?;
            (text.get(6) == Some(&b'/') && text.get(11) == Some(&b':')).then_some(())?;
            let day = date(digits(text.get(7..11)?)?, month as i64 + 1, digits(&text[..2])?)?;
            time(day, &text[12..])
        }
        [_, _, _, _, b'-', _, _, b'-', _, _, b'T' | b't' | b' ', rest @ ..] => {
            let part = |range| digits(&text[range]);
            time(date(part(0..4)?, part(5..7)?, part(8..10)?)?, rest)
        }
        _ => number(std::str::from_utf8(text).ok()?.parse().ok()?),
    }
}

/// A number: of seconds, or where that is too much, of milli-, micro- or nanoseconds.
pub(crate) fn number(number: f64) -> Option<i64> {
    let ms = [1e3, 1.0, 1e-3, 1e-6].map(|unit| number * unit);
    // Accepts 1973 to 5138: in this range, the units can't be confused, and a duration is no time.
    ms.into_iter().find(|ms| (1e11..1e14).contains(ms)).map(|ms| ms.round() as i64)
}

/// `23:30:36`, perhaps a fraction, perhaps a zone.
fn time(day: i64, text: &[u8]) -> Option<i64> {
    let [h1, h2, b':', m1, m2, b':', s1, s2, rest @ ..] = text else { return None };
    let (hour, minute) = (digits(&[*h1, *h2])?, digits(&[*m1, *m2])?);
    let second = digits(&[*s1, *s2])?;
    // 60 is a leap second.
    (hour < 24 && minute < 60 && second <= 60).then_some(())?;
    let (ms, zone) = fraction(rest)?;
    let ms = day * DAY_MS + (hour * 3_600 + minute * 60 + second) * 1_000 + ms - offset(zone)?;
    (ms >= 0).then_some(ms)
}

fn fraction(text: &[u8]) -> Option<(i64, &[u8])> {
    let [b'.' | b',', rest @ ..] = text else { return Some((0, text)) };
    let length = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
    let mut ms = [b'0'; 3];
    let known = length.min(3);
    ms[..known].copy_from_slice(&rest[..known]);
    (length > 0).then_some((digits(&ms)?, &rest[length..]))
}

/// Milliseconds that a zone is ahead of UTC.
fn offset(zone: &[u8]) -> Option<i64> {
    let (sign, rest) = match zone.trim_ascii_start() {
        b"" | b"Z" | b"z" | b"UTC" | b"GMT" => return Some(0),
        [b'+', rest @ ..] => (1, rest),
        [b'-', rest @ ..] => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = match rest {
        [hours @ .., b':', m1, m2] => (hours, [*m1, *m2]),
        [h1, h2, m1, m2] => (&[*h1, *h2][..], [*m1, *m2]),
        hours => (hours, *b"00"),
    };
    let (hours, minutes) = (digits(hours)?, digits(&minutes)?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 60 + minutes) * 60_000)
}

/// Days since the epoch.
fn date(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let length = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    // A time on the last day of 1969 may be in 1970 in UTC.
    ((1969..=9999).contains(&year) && (1..=length).contains(&day)).then_some(())?;
    Some(days_before(year, month) + day - 1)
}

/// Days from the epoch to the first of a month. Years that begin in March end with the leap day.
fn days_before(year: i64, month: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 - 719_468
}

fn digits(text: &[u8]) -> Option<i64> {
    let digit = |number: i64, byte: &u8| {
        byte.is_ascii_digit().then(|| number * 10 + i64::from(byte - b'0'))
    };
    (1..=4).contains(&text.len()).then(|| text.iter().try_fold(0, digit))?
}

/// `2026-11-21T23:30:36Z`.
pub(crate) fn utc(ms: i64) -> String {
    let (day, second) = (ms.div_euclid(DAY_MS), ms.rem_euclid(DAY_MS) / 1_000);
    // An average year is exact enough for a guess; a step up or down corrects it.
    let guess = 1970 + day * 400 / 146_097;
    let year = if days_before(guess + 1, 1) <= day { guess + 1 } else { guess };
    let year = if days_before(year, 1) > day { year - 1 } else { year };
    let month = (1..=12).rev().find(|&month| days_before(year, month) <= day).unwrap_or(1);
    let day = day - days_before(year, month) + 1;
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
