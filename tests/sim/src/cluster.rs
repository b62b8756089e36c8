//! A cluster: which host has which slots, what each host knows of that, and what it answers to who
//! asks the wrong one.

use crate::server::Reply;

/// Slots move in parts of a master's: so many.
pub const PARTS: usize = 4;

/// The owner of each part of the slots.
type Owners = Vec<usize>;

#[derive(Debug)]
pub struct Cluster {
    /// The owners as each host knows them. A host is the last to know of others.
    views: Vec<Owners>,
    /// As it is.
    owners: Owners,
    /// Where parts are on their way to.
    moving: Vec<Option<usize>>,
    /// The replica of one of the masters, and that master.
    pub replica: (usize, usize),
}

impl Cluster {
    /// The last host is the replica of `victim`.
    pub fn new(masters: usize, victim: usize) -> Self {
        let owners: Owners = (0..masters * PARTS).map(|part| part / PARTS).collect();
        Self {
            views: vec![owners.clone(); masters + 1],
            moving: vec![None; owners.len()],
            owners,
            replica: (masters, victim),
        }
    }

    pub fn part_of(&self, key: &[u8]) -> usize {
        part_of(key, self.owners.len())
    }

    /// Returns the owner of a key.
    pub fn owner(&self, key: &[u8]) -> usize {
        self.owners[self.part_of(key)]
    }

    /// Parts begin to move. Returns those that do: not what moves already.
    pub fn begin(&mut self, parts: &[usize], to: usize) -> Vec<usize> {
        let to = if self.replica.0 == to { self.replica.1 } else { to };
        let starts = |part: &usize| self.moving[*part].is_none() && self.owners[*part] != to;
        let parts: Vec<_> = parts.iter().copied().filter(starts).collect();
        parts.iter().for_each(|part| self.moving[*part] = Some(to));
        parts
    }

    /// Where a key of these parts goes to from a host.
    pub fn goes_to(&self, key: &[u8], from: usize, parts: &[usize]) -> Option<usize> {
        let part = self.part_of(key);
        let goes = self.owners[part] == from && parts.contains(&part);
        self.moving[part].filter(|to| goes && *to != from)
    }

    /// Parts have a new owner. Both know it; others hear of it later.
    pub fn settle(&mut self, parts: &[usize]) {
        for &part in parts {
            let (from, Some(to)) = (self.owners[part], self.moving[part]) else { continue };
            (self.owners[part], self.moving[part]) = (to, None);
            self.views[from][part] = to;
            self.views[to][part] = to;
        }
    }

    /// A replica takes over all parts of its master, which does not know that yet.
    pub fn take_over(&mut self, master: usize, by: usize) {
        for part in 0..self.owners.len() {
            for owner in [&mut self.owners[part], &mut self.views[by][part]] {
                *owner = if *owner == master { by } else { *owner };
            }
            self.moving[part] = self.moving[part].map(|to| if to == master { by } else { to });
        }
        self.replica = (master, by);
    }

    /// A host knows who has what.
    pub fn learn(&mut self, host: usize) {
        self.views[host].clone_from(&self.owners);
    }

    /// All hosts know who has what.
    pub fn gossip(&mut self) {
        self.views.iter_mut().for_each(|view| view.clone_from(&self.owners));
    }

    /// Returns the answer to a command that is not the host's own to execute.
    pub fn refuses(
        &self,
        host: usize,
        args: &[Vec<u8>],
        asking: bool,
        has: impl Fn(&[u8]) -> bool,
    ) -> Option<Reply> {
        let keys = keys(args);
        let first = keys.first()?;
        if keys.iter().any(|key| slot_of(key) != slot_of(first)) {
            let what = "CROSSSLOT Keys in request don't hash to the same slot";
            return Some(Reply::Error(what.to_owned()));
        }
        let (slot, part) = (slot_of(first), self.part_of(first));
        let redirect =
            |how: &str, to: usize| Some(Reply::Error(format!("{how} {slot} {}", address(to))));
        match (self.views[host][part], self.moving[part]) {
            (owner, Some(to)) if owner == host => {
                if has(first) {
                    None
                } else {
                    redirect("ASK", to)
                }
            }
            (owner, None) if owner == host => None,
            (_, Some(to)) if to == host && asking => None,
            (owner, _) => redirect("MOVED", owner),
        }
    }

    /// The answer to `CLUSTER SLOTS`.
    pub fn slots(&self, host: usize) -> Reply {
        let view = &self.views[host];
        let node = |host: usize| {
            let name = |text: String| Reply::Bulk(text.into_bytes());
            let id = name(format!("{host:040}"));
            Reply::Array(vec![name(format!("h{host}")), Reply::Int(6379), id, Reply::Array(vec![])])
        };
        let mut all = Vec::new();
        let mut begins = 0;
        for part in 1..=view.len() {
            let owner = view[begins];
            if view.get(part) == Some(&owner) {
                continue;
            }
            let slot = |part: usize| (part * 16_384).div_ceil(view.len()) as i64;
            let mut range = vec![Reply::Int(slot(begins)), Reply::Int(slot(part) - 1), node(owner)];
            if self.replica.1 == owner {
                range.push(node(self.replica.0));
            }
            all.push(Reply::Array(range));
            begins = part;
        }
        Reply::Array(all)
    }
}

pub fn part_of(key: &[u8], parts: usize) -> usize {
    usize::from(slot_of(key)) * parts / 16_384
}

/// The keys of a command.
pub fn keys(args: &[Vec<u8>]) -> &[Vec<u8>] {
    match &args[0].to_ascii_uppercase()[..] {
        b"EVAL" | b"EVALSHA" => {
            let keys = args.get(2).and_then(|keys| str::from_utf8(keys).ok()?.parse().ok());
            let all = args.get(3..).unwrap_or_default();
            &all[..keys.unwrap_or(0).min(all.len())]
        }
        b"HMGET" | b"DEL" | b"UNLINK" => args.get(1..2).unwrap_or_default(),
        _ => &[],
    }
}

/// Returns the address of a host.
pub fn address(host: usize) -> String {
    format!("h{host}:6379")
}

/// Returns the host of an address.
pub fn host(address: &str) -> usize {
    let number = address.strip_prefix('h').and_then(|rest| rest.strip_suffix(":6379"));
    number.and_then(|number| number.parse().ok()).expect("the address of a host")
}

/// CRC-16 of what is in braces.
fn slot_of(key: &[u8]) -> u16 {
    let text = str::from_utf8(key).expect("keys are text");
    let tag = text.split_once('{').and_then(|(_, rest)| Some(rest.split_once('}')?.0));
    let mut crc = 0_u32;
    for byte in tag.filter(|tag| !tag.is_empty()).unwrap_or(text).bytes() {
        crc ^= u32::from(byte) << 8;
        for _ in 0..8 {
            crc = crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 };
        }
    }
    (crc & 0x3fff) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // By `CLUSTER KEYSLOT`.
        for (key, of) in [("123456789", 12_739), ("a", 15_495), ("b", 3_300), ("{}a", 10_875)] {
            assert_eq!(slot_of(key.as_bytes()), of, "{key}");
        }
        assert_eq!(slot_of(b"tfw1:{a}"), slot_of(b"a"));
    }
}
