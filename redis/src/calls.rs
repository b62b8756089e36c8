//! Calls to the server (S32): [`Calls`].
//!
//! ```text
//! charge ──> a question ──> `gather`: waits while as many calls ──> `call`: one round trip, by
//!            (`script`)     are in flight as the distance asks      the deadline of its callers
//! ```
//!
//! A call has at most 128 keys: of several charges, and a charge of several limits has a key for
//! each, which stay together. Corrections share calls, too. A reset has a call of its own, and so
//! has each question in a cluster, where keys may be on different servers.
//!
//! A question whose caller is gone before it is sent is not sent. Each runtime has its own
//! connection and calls, as another runtime may end.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connect::NEVER;
use super::link::{Links, Origin, Servers};
use super::script::{Answer, Commands, decide, instant, is_outside};
use crate::sync;
use tower_fixed_window::store::{Adjust, Charge, Reply, Scope};
use tower_fixed_window::{Clock, Decision, Key, Store, StoreError};

mod call;
mod failure;
mod gather;

pub(super) use failure::address_error;
use failure::{apart_error, unexpected_answer};
use gather::{Gather, Question};

const DEADLINE: Duration = Duration::from_millis(250);

#[derive(Clone)]
pub(super) struct Calls {
    runtimes: Arc<Runtimes>,
    pub(super) one_by_one: bool,
    pub(super) commands: Commands,
    pub(super) deadline: Duration,
    /// A test's, in place of the server's.
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// The server and the number of its database, if the app has given its address.
    pub(super) database: Option<Arc<str>>,
}

impl Calls {
    pub(super) fn new(servers: Servers) -> Self {
        Self {
            runtimes: Runtimes::new(servers),
            one_by_one: false,
            commands: Commands::new(""),
            deadline: DEADLINE,
            database: None,
            clock: None,
        }
    }

    fn look<T>(&self, scope: &Scope, key: &Key, at: impl FnOnce(&Origin) -> T) -> T {
        self.runtimes.servers.look(|| self.commands.key(scope, key), at)
    }

    fn now(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| instant(clock.now_ms()))
    }

    /// Asks once more if the server's time was outside of the calendars' boundaries.
    async fn ask_server(&self, question: impl Fn() -> Question) -> Result<Vec<Answer>, StoreError> {
        let now = Instant::now();
        let until = now.checked_add(self.deadline).unwrap_or_else(|| now + NEVER);
        let answer = self.send_once(question(), until).await?;
        if let Some(time) = answer.first().and_then(Answer::time) {
            self.commands.note_time(time);
        }
        if is_outside(&answer) { self.send_once(question(), until).await } else { Ok(answer) }
    }

    async fn send_once(&self, asked: Question, until: Instant) -> Result<Vec<Answer>, StoreError> {
        let gather = self.runtimes.current_gather()?;
        let alone = self.one_by_one || gather.one_by_one.load(Relaxed);
        if alone && asked.len() > 1 {
            return Err(apart_error());
        }
        gather.send(asked, until, alone).await
    }
}

impl Store for Calls {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (this, charge, now) = (self.clone(), charge.to_owned(), self.now());
        Reply::later(async move {
            let charge = charge.as_charge();
            let answers = this.ask_server(|| this.commands.charge(&charge, now)).await?;
            decide(&answers, &charge, now).ok_or_else(unexpected_answer)
        })
    }

    fn charges_together(&self) -> bool {
        let gather = self.runtimes.current_gather();
        !(self.one_by_one || gather.is_ok_and(|gather| gather.one_by_one.load(Relaxed)))
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.tokens == 0 {
            return Reply::now(());
        }
        let (this, adjust, now) = (self.clone(), adjust.to_owned(), self.now());
        Reply::later(async move {
            let adjust = adjust.as_adjust();
            let answers = this.ask_server(|| vec![this.commands.adjust(&adjust, now)]).await?;
            if is_outside(&answers) { Err(unexpected_answer()) } else { Ok(()) }
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let this = Self { one_by_one: true, ..self.clone() };
        let (scope, key) = (scope.clone(), key.clone());
        Reply::later(async move {
            this.ask_server(|| vec![this.commands.reset(&scope, &key)]).await.map(|_| ())
        })
    }

    fn now_ms(&self) -> u64 {
        let known = || self.commands.server_time();
        self.clock.as_ref().map_or_else(known, |clock| clock.now_ms())
    }

    fn fault_domain(&self, scope: &Scope, key: &Key) -> u64 {
        self.look(scope, key, |server| server.number)
    }

    fn is_cut_off(&self, scope: &Scope, key: &Key) -> bool {
        let server = self.fault_domain(scope, key);
        self.runtimes.current_gather().is_ok_and(|gather| gather.links.is_cut_off(server))
    }

    fn in_time(&self, deadline: Duration) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self { deadline, ..self.clone() }))
    }

    fn identity(&self) -> Option<String> {
        self.database.as_ref().map(|database| format!("{database} {}", self.commands.prefix))
    }

    fn server(&self, scope: &Scope, key: &Key) -> Option<Arc<str>> {
        self.look(scope, key, |server| server.name.get())
    }
}

/// Each has a connection and calls in flight of its own, so that its end does not affect the
/// others. Nothing is left of one that has ended.
struct Runtimes {
    servers: Arc<Servers>,
    gathers: Mutex<Vec<OfRuntime>>,
}

/// The task that keeps it ends with the runtime, or when the sender is dropped.
type OfRuntime = (Id, Weak<Gather>, oneshot::Sender<()>);

impl Runtimes {
    /// Connects at once if called in a runtime.
    fn new(servers: Servers) -> Arc<Self> {
        let this = Arc::new(Self { servers: Arc::new(servers), gathers: Mutex::default() });
        let _ = this.current_gather();
        this
    }

    fn current_gather(&self) -> Result<Arc<Gather>, StoreError> {
        let outside = |_| StoreError::new("Redis is called outside of a tokio runtime").unsent();
        let runtime = Handle::try_current().map_err(outside)?;
        let (mut gathers, id) = (sync::lock(&self.gathers), runtime.id());
        let own = gathers.iter().find(|(of, ..)| *of == id);
        if let Some(gather) = own.and_then(|(_, gather, _)| gather.upgrade()) {
            return Ok(gather);
        }
        gathers.retain(|(_, gather, _)| gather.strong_count() > 0);
        let gather = Arc::new(Gather::new(Links::new(&self.servers), runtime.clone()));
        let (until, end) = oneshot::channel();
        gathers.push((id, Arc::downgrade(&gather), until));
        let kept = Arc::clone(&gather);
        runtime.spawn(async move {
            let _ = end.await;
            drop(kept);
        });
        Ok(gather)
    }
}
