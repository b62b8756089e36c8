//! Two keys are equal, and read alike, exactly if their parts are.
#![no_main]

use std::net::IpAddr;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tower_fixed_window::Key;

#[derive(Arbitrary, Clone, Debug)]
enum Part<'a> {
    Text(&'a str),
    /// So often, to be longer than what is kept as it is.
    Long(&'a str, u8),
    Number(i64),
    Large(u64),
    Id([u8; 16]),
    Address(IpAddr, u8),
    Secret(&'a [u8]),
    Hmac(&'a [u8]),
}

/// The parts of a key, by what a user tells apart.
#[derive(PartialEq, Debug)]
enum Meaning {
    Text(String),
    Number(i128),
    Id([u8; 16]),
    V4([u8; 4]),
    V6(u128, u8),
    Secret(Vec<u8>),
    Hmac(Vec<u8>),
}

impl Part<'_> {
    fn key(&self) -> Key {
        match self {
            Self::Text(text) => Key::from(*text),
            Self::Long(text, times) => Key::from(text.repeat(usize::from(*times))),
            Self::Number(number) => Key::from(*number),
            Self::Large(number) => Key::from(*number),
            Self::Id(id) => Key::from(*id),
            Self::Address(address, prefix) => Key::from_ip(*address, *prefix),
            Self::Secret(secret) => Key::secret(secret),
            Self::Hmac(value) => Key::hmac("secret", value),
        }
    }

    fn meaning(&self) -> Meaning {
        match self {
            Self::Text(text) => Meaning::Text((*text).into()),
            Self::Long(text, times) => Meaning::Text(text.repeat(usize::from(*times))),
            Self::Number(number) => Meaning::Number((*number).into()),
            Self::Large(number) => Meaning::Number((*number).into()),
            Self::Id(id) => Meaning::Id(*id),
            Self::Address(address, prefix) => match address.to_canonical() {
                IpAddr::V4(address) => Meaning::V4(address.octets()),
                IpAddr::V6(address) => {
                    // Neighbors share the prefix of such addresses.
                    let is_local = address.is_unicast_link_local() || address.is_unique_local();
                    let bits = if is_local { 128 } else { (*prefix).min(128) };
                    let address = u128::from(address);
                    let inside = address as u32;
                    match address >> 32 {
                        0x64_ff9b_0000_0000_0000_0000 | 0xffff_0000 => {
                            return Meaning::V4(inside.to_be_bytes());
                        }
                        0 if inside >> 24 != 0 => return Meaning::V4(inside.to_be_bytes()),
                        _ => {}
                    }
                    let kept = (0..bits).map(|bit| address & 1 << (127 - bit)).sum();
                    Meaning::V6(kept, bits)
                }
            },
            Self::Secret(secret) => Meaning::Secret(secret.to_vec()),
            Self::Hmac(value) => Meaning::Hmac(value.to_vec()),
        }
    }
}

fn key(parts: &[Part<'_>]) -> Key {
    let mut key = Key::global();
    parts.iter().for_each(|part| key.append(&part.key()));
    key
}

fuzz_target!(|input: (Vec<Part<'_>>, Vec<Part<'_>>)| {
    let (a, b) = input;
    let same = a.iter().map(Part::meaning).eq(b.iter().map(Part::meaning));
    let (key_a, key_b) = (key(&a), key(&b));
    assert_eq!(key_a == key_b, same);
    assert_eq!(key_a.as_bytes() == key_b.as_bytes(), same);
    let (text_a, text_b) = (key_a.readable(), key_b.readable());
    assert_eq!(text_a == text_b, same, "{text_a} {text_b}");
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"%,.:@_-".contains(&b);
    assert!(text_a.bytes().all(plain), "{text_a}");
    assert_eq!(text_a.matches(',').count(), a.len().saturating_sub(1), "{text_a}");
    assert_eq!(format!("{key_a:?}"), "Key(..)");
});
