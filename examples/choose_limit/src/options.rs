//! The command line.

use tower_fixed_window::Quota;

pub(crate) const HELP: &str = r#"Which limit should I write? Reads access logs, and shows for a list of quotas which clients
each of them would have refused.

usage: cargo run --release -p choose_limit -- [OPTION].. LOG..

A LOG is a file, or `-` for standard input. gzip is recognised by its content. Lines are read in
the common and combined formats and as JSON. Several logs, rotated or from several servers, are
merged by time.

  --quota "60/minute"  judge this quota; may be repeated. Without it: 1, 2, 5, 10, 20, 50, ..
                       a minute and an hour, up to the first that refuses no client
  --key FIELD          the field that identifies a client, in place of the address. JSON: a name or
                       a path with dots (request.headers.X-Api-Key). Text: remote_addr,
                       remote_user, method, path, request, http_referer, http_user_agent or
                       http_x_forwarded_for. Of a list of addresses the last one counts, which is
                       what the nearest proxy has written
  --tolerate SHARE     the share of clients that may be refused under the recommended quota, as
                       0.1% (the default) or 0.001
  --json               print JSON
  --html FILE          write a page with plots, too
  --hash               replace clients by hashes, which differ from run to run
  --max-clients N      count at most N clients (1000000; about 500 bytes each). Requests of
                       further clients are left out, and the report says how many
  --help               print this

Windows are cut by the time in the log, as the crate cuts them by its clock. Refused requests are
not counted. An IPv6 client is its /64. Lines that are out of order by at most 65536 lines are
sorted; with more than 16 logs, by 1048576 lines divided by their number. Lines of more than 65536
bytes, lines that come later than that, and lines that can't be read are skipped and counted.
"#;

/// The share of clients that may be refused by default: 0.1%.
const TOLERATED: f64 = 0.001;
const MAX_CLIENTS: usize = 1_000_000;

#[derive(Default)]
pub(crate) struct Options {
    pub(crate) help: bool,
    pub(crate) quotas: Vec<Quota>,
    pub(crate) key: Option<String>,
    pub(crate) tolerate: f64,
    pub(crate) json: bool,
    pub(crate) html: Option<String>,
    pub(crate) hash: bool,
    pub(crate) max_clients: usize,
    pub(crate) logs: Vec<String>,
}

impl Options {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { tolerate: TOLERATED, max_clients: MAX_CLIENTS, ..Self::default() };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--help" | "-h" => options.help = true,
                "--quota" => options.quotas.push(quota(&value()?)?),
                "--key" => options.key = Some(value()?),
                "--tolerate" => options.tolerate = share(&value()?)?,
                "--json" => options.json = true,
                "--html" => options.html = Some(value()?),
                "--hash" => options.hash = true,
                "--max-clients" => options.max_clients = count(&value()?)?,
                "--" => options.logs.extend(&mut arguments),
                unknown if unknown.starts_with("--") => {
                    return Err(format!("{unknown:?} is no option: see --help"));
                }
                _ => options.logs.push(argument),
            }
        }
        if options.logs.is_empty() && !options.help {
            return Err("which log? Name files, or - for standard input; see --help".to_owned());
        }
        Ok(options)
    }
}

fn quota(text: &str) -> Result<Quota, String> {
    if text.contains(',') {
        return Err(format!("{text:?}: one quota at a time, write --quota twice"));
    }
    let quota: Quota = text.parse().map_err(|error| format!("--quota {error}"))?;
    if quota.capacity() != quota.limit() {
        return Err(format!("{text:?}: quotas with rollover can't be judged here"));
    }
    Ok(quota)
}

fn share(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    let share = number.trim().parse::<f64>().ok().map(|number| number / unit);
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or(format!("--tolerate {text:?}: write a share such as 0.1% or 0.001"))
}

fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=u32::MAX as usize).contains(count));
    count.ok_or(format!("--max-clients {text:?}: write a number from 1 to {}", u32::MAX))
}
