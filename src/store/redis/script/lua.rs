//! A script, its hash, and the call that loads it: [`Lua`].

use redis::{Cmd, Script, cmd};

pub(crate) struct Lua {
    hash: String,
    load: Cmd,
}

impl Lua {
    pub(crate) fn new(code: &str) -> Self {
        let mut load = cmd("SCRIPT");
        load.arg("LOAD").arg(code);
        Self { hash: Script::new(code).get_hash().to_owned(), load }
    }

    pub(crate) fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the call that loads the script.
    pub(crate) fn load_call(&self) -> &Cmd {
        &self.load
    }
}
