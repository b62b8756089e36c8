//! A time zone whose midnight is soon, so that a scenario crosses it.

use std::fs;
use std::path::Path;

/// The variable with the folder of time zones.
pub const FOLDER: &str = "TZDIR";
/// The zone that [`write`] writes.
pub const NAME: &str = "Proof/Midnight";

/// Writes a zone file, in which it is midnight at an instant in seconds since the Unix epoch.
pub fn write(folder: &Path, midnight: u64) {
    const DAY: i32 = 86_400;
    let since_utc_midnight = (midnight % DAY as u64) as i32;
    // The zone is ahead of UTC by half a day at most.
    let offset = match DAY - since_utc_midnight {
        ahead if ahead > DAY / 2 => ahead - DAY,
        ahead => ahead,
    };
    // RFC 9636: one kind of time and no changes, in the block of version 1 and in that of 2.
    let counts = [0_u32, 0, 0, 0, 1, 4].map(u32::to_be_bytes).concat();
    let header = [&b"TZif2"[..], &[0; 15], &counts].concat();
    let block = [&header[..], &offset.to_be_bytes(), &[0, 0], b"PRF\0"].concat();
    let sign = if offset < 0 { '+' } else { '-' };
    let (h, m, s) = (offset.abs() / 3_600, offset.abs() / 60 % 60, offset.abs() % 60);
    let rule = format!("\nPRF{sign}{h}:{m:02}:{s:02}\n");
    let file = folder.join(NAME);
    fs::create_dir_all(file.parent().expect("it is in a folder")).expect("there is room for it");
    fs::write(file, [&block[..], &block, rule.as_bytes()].concat()).expect("there is room for it");
}
