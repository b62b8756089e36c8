//! Calls of the server: each is sent, shared by decisions, and ended in time (S32).

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;
use tokio::time::Instant;

use super::connect::settings::NEVER;
use super::link::Origin;
use super::script::{self, Answer, Commands};
#[cfg(feature = "testing")]
use crate::clock::Clock;
use crate::decision::{Decision, MAX_LIMITS, Merging};
use crate::key::Key;
use crate::store::Store;
#[cfg(feature = "testing")]
use crate::store::account::instant;
use crate::store::adjust::Adjust;
use crate::store::charge::{Charge, OwnedCharge};
use crate::store::error::StoreError;
use crate::store::remote::Breaker;
use crate::store::reply::Reply;
use crate::store::scope::Scope;

mod call;
mod failure;
mod gather;
mod queue;
mod runtimes;

use call::Ended;
use failure::ended;
use queue::{Departing, Question};
use runtimes::Runtimes;

/// The default deadline of a call.
const DEADLINE: Duration = Duration::from_millis(250);

/// The server's counters, by calls that end in time and report to the breaker.
#[derive(Clone)]
pub(super) struct Calls {
    runtimes: Arc<Runtimes>,
    /// Decisions don't share calls.
    pub(super) apart: bool,
    pub(super) commands: Commands,
    pub(super) deadline: Duration,
    #[cfg(feature = "testing")]
    pub(super) clock: Option<Arc<dyn Clock>>,
}

impl Calls {
    pub(super) fn new(source: Origin) -> Self {
        Self {
            runtimes: Runtimes::new(source),
            apart: false,
            commands: Commands::new(""),
            deadline: DEADLINE,
            #[cfg(feature = "testing")]
            clock: None,
        }
    }

    pub(super) fn breaker(&self) -> &Arc<Breaker> {
        self.runtimes.breaker()
    }

    #[cfg(feature = "testing")]
    fn now(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| instant(clock.now_ms()))
    }

    #[cfg(not(feature = "testing"))]
    fn now(&self) -> Option<i64> {
        None
    }

    /// Calls the script, together with concurrent decisions.
    async fn ask(&self, mut asked: Question, until: Instant) -> Result<Answer, StoreError> {
        let gather = self.runtimes.here()?;
        if !self.apart && !gather.is_apart() {
            match gather.join(asked, until).await {
                Ok(answer) => return answer,
                Err(same) => asked = same,
            }
        }
        match asked {
            Question::One(cmd) => self.call(cmd, until).await,
            Question::All(_) => Err(StoreError::new("limits are in several slots").apart()),
        }
    }

    /// Sends a command on its own.
    async fn call(&self, cmd: Cmd, until: Instant) -> Result<Answer, StoreError> {
        let link = self.runtimes.here()?.link.of(script::key(&cmd));
        let (waiting, outcome) = Departing::new(Question::One(cmd), until);
        tokio::spawn(async move { Ended::after(link, vec![waiting], until).await.answer() });
        match outcome.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(ended()),
        }
    }

    /// The same for a command without a result.
    fn send(&self, cmd: Cmd) -> Reply<()> {
        let this = self.clone();
        Reply::later(async move { this.call(cmd, this.until()).await.map(|_| ()) })
    }

    /// The deadline of a call that begins now.
    fn until(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.deadline).unwrap_or_else(|| now + NEVER)
    }
}

fn senseless() -> StoreError {
    StoreError::new("Redis returned an unexpected answer").of_key()
}

impl Store for Calls {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let now = self.now();
        let cmd = self.commands.charge(&charge, now);
        let (this, charge) = (self.clone(), charge.to_owned());
        Reply::later(async move {
            let (until, charge) = (this.until(), charge.as_charge());
            let mut answer = this.ask(Question::One(cmd), until).await?;
            if let Some(time) = answer.outside() {
                this.commands.correct_time(time);
                let again = this.commands.charge(&charge, now);
                answer = this.ask(Question::One(again), until).await?;
            }
            let decision = answer.decide(&charge, now);
            decision.ok_or_else(senseless)
        })
    }

    fn charge_all(&self, charges: &[Charge<'_>]) -> Option<Reply<Decision>> {
        let scopes = charges.iter().map(|charge| charge.account().scope().id());
        let is_apart = self.apart || self.runtimes.here().is_ok_and(|gather| gather.is_apart());
        let twice =
            scopes.clone().enumerate().any(|(i, id)| scopes.clone().take(i).any(|of| of == id));
        if is_apart || twice || !(1..=MAX_LIMITS).contains(&charges.len()) {
            return None;
        }
        if let [charge] = charges {
            let name = Arc::clone(charge.account().scope().shared_name());
            return Some(self.charge(*charge).map(move |decision| {
                let mut merging = Merging::new();
                merging.push(&name, decision);
                merging.done()
            }));
        }
        let now = self.now();
        let cmds = self.commands.charge_all(charges, now);
        let (this, charges) =
            (self.clone(), charges.iter().map(Charge::to_owned).collect::<Vec<_>>());
        Some(Reply::later(async move {
            let charges: Vec<_> = charges.iter().map(OwnedCharge::as_charge).collect();
            let until = this.until();
            let mut answer = this.ask(Question::All(cmds), until).await?;
            if let Some(time) = answer.outside() {
                this.commands.correct_time(time);
                answer =
                    this.ask(Question::All(this.commands.charge_all(&charges, now)), until).await?;
            }
            answer.decide_all(&charges, now).ok_or_else(senseless)
        }))
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let now = self.now();
        let Some(cmd) = self.commands.adjust(&adjust, now) else { return Reply::now(()) };
        let (this, adjust) = (self.clone(), adjust.to_owned());
        Reply::later(async move {
            let until = this.until();
            let answer = this.call(cmd, until).await?;
            if let Some(time) = answer.outside() {
                this.commands.correct_time(time);
                let cmd = this.commands.adjust(&adjust.as_adjust(), now);
                let again = this.call(cmd.expect("it was made before"), until).await?;
                return again.outside().map_or(Ok(()), |_| Err(senseless()));
            }
            Ok(())
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.send(self.commands.reset(scope, key))
    }

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        self.runtimes.domain(|| self.commands.key(scope, key))
    }
}
