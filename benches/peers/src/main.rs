//! `peers [--quick] [SECTION..]` measures and prints; the other commands are what it calls itself with.

use tower_fixed_window_peers::{counting, http, report};

fn main() {
    let mut args = std::env::args().skip(1).peekable();
    match args.peek().map(String::as_str) {
        Some("count") => counting::be_counted(args.skip(1)),
        Some("serve") => http::serve(args.skip(1)),
        _ => {
            let (flags, sections): (Vec<_>, Vec<_>) = args.partition(|arg| arg.starts_with('-'));
            print!("{}", report::report(flags == ["--quick"], &sections));
        }
    }
}
