//! Memory: one store in a process of its own, with an allocator that counts.
//! `peers-memory WHO KEYS` prints the bytes that are held, the most there were, and what the system
//! had to give (resident).

use tower_fixed_window_peers::batch::{Verdict, prepared};
use tower_fixed_window_peers::keys::Keys;
use tower_fixed_window_peers::stores;

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(who), Some(keys)) = (args.next(), args.next()) else {
        panic!("peers-memory WHO KEYS");
    };
    let keys = keys.parse().expect("a number of keys");
    let all = Keys::Uniform(keys).all();
    let before = resident();
    let mut filled = None;
    let counted = allocation_counter::measure(|| {
        let store = stores::contestant(&who, Verdict::Allowed, keys);
        filled = Some(prepared(store, Verdict::Allowed, &all));
    });
    println!("{} {} {}", counted.bytes_current, counted.bytes_max, resident() - before);
}

fn resident() -> usize {
    let pages = |text: String| text.split(' ').nth(1)?.parse::<usize>().ok();
    std::fs::read_to_string("/proc/self/statm").ok().and_then(pages).unwrap_or(0) * 4_096
}
