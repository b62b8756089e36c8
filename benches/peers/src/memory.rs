//! `peers-memory CASE` prints the bytes that a store holds for a key, the most it held while it grew,
//! and what the system gave (resident). A program of its own, for the allocator that counts.

fn main() {
    let id = std::env::args().nth(1).expect("a case");
    let (before, mut case) = (resident(), None);
    let counted = allocation_counter::measure(|| {
        case = Some(tower_fixed_window_peers::Case::prepared(&id));
    });
    let bytes = [counted.bytes_current as u64, counted.bytes_max, resident() - before];
    let keys = f64::from(case.expect("it was made").keys);
    println!("{id}\t{}", bytes.map(|bytes| format!("{:.2}", bytes as f64 / keys)).join("\t"));
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4_096
}
