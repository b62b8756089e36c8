//! A script, its hash, and a call that contains it: [`Lua`].

use redis::{Arg, Cmd, Script, cmd};

pub(crate) struct Lua {
    hash: String,
    code: String,
}

impl Lua {
    /// Creates a script without the comments and indents of its code, which travels with calls.
    pub(crate) fn new(code: &str) -> Self {
        let lines = code.lines().map(str::trim).filter(|line| !line.starts_with("--"));
        let code = lines.collect::<Vec<_>>().join("\n");
        Self { hash: Script::new(&code).get_hash().to_owned(), code }
    }

    pub(crate) fn hash(&self) -> &str {
        &self.hash
    }

    #[cfg(test)]
    pub(super) fn code(&self) -> &str {
        &self.code
    }

    /// Returns the same call, with the script in place of its hash. The server keeps the script
    /// for later calls by the hash. Servers and proxies without `SCRIPT` take it, too.
    pub(crate) fn eval(&self, call: &Cmd) -> Cmd {
        let mut eval = cmd("EVAL");
        eval.arg(&self.code);
        args_from(call, 2).for_each(|arg| {
            eval.arg(arg);
        });
        eval
    }
}

/// Returns the arguments of a call from the nth on.
pub(super) fn args_from(call: &Cmd, from: usize) -> impl ExactSizeIterator<Item = &[u8]> {
    let all = call.args_iter().skip(from);
    all.map(|arg| if let Arg::Simple(arg) = arg { arg } else { b"" })
}
