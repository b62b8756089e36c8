//! Commands and answers as bytes (RESP 2).

use crate::server::Reply;

/// Takes the next command off the front of what has arrived, if all of it has.
pub fn command(bytes: &mut Vec<u8>) -> Option<Vec<Vec<u8>>> {
    let mut at = 0;
    let count = length(bytes, &mut at, b'*')?;
    let mut args = Vec::with_capacity(count);
    for _ in 0..count {
        let length = length(bytes, &mut at, b'$')?;
        args.push(bytes.get(at..at + length)?.to_vec());
        at += length + 2;
    }
    if at > bytes.len() {
        return None;
    }
    bytes.drain(..at);
    Some(args)
}

fn length(bytes: &[u8], at: &mut usize, kind: u8) -> Option<usize> {
    let line = &bytes[*at..];
    let end = line.windows(2).position(|two| two == b"\r\n")?;
    assert_eq!(line[0], kind, "not a command");
    *at += end + 2;
    Some(str::from_utf8(&line[1..end]).ok()?.parse().expect("a length"))
}

pub fn reply(reply: &Reply, bytes: &mut Vec<u8>) {
    let mut line = |kind: char, text: &str| bytes.extend(format!("{kind}{text}\r\n").bytes());
    match reply {
        Reply::Status(text) => line('+', text),
        Reply::Error(text) => line('-', text),
        Reply::Int(n) => line(':', &n.to_string()),
        Reply::Nil => line('$', "-1"),
        Reply::Bulk(text) => {
            line('$', &text.len().to_string());
            bytes.extend(text);
            bytes.extend(b"\r\n");
        }
        Reply::Array(all) => {
            line('*', &all.len().to_string());
            all.iter().for_each(|one| self::reply(one, bytes));
        }
    }
}
