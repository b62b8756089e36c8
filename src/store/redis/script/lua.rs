//! A script, and how a server gets it.

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

    /// The call that brings it.
    pub(crate) fn load(&self) -> &Cmd {
        &self.load
    }
}
