//! Decisions that travel together.
//!
//! A decision is sent at once while fewer than two calls are under way. Those asked meanwhile go with
//! the next call, which leaves when one of the two has come back: there is no timer, and nobody who
//! is alone waits for company.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::link::{Lease, Link};
use super::script::{self, Answer, LOADS, MANY, ONE};
use super::{failed, late};
use crate::store::StoreError;

/// Calls under way at once. With one, the server would be idle while its answer travels.
const CALLS: usize = 2;
/// Decisions in one call. More would save little, and keep the server from others for longer.
const MOST: usize = 128;

/// How often a call that has come back lets other tasks run before the next one leaves. tokio comes
/// back after some sixty tasks, and all who were answered are to have the chance to ask again.
const YIELDS: usize = 3;

/// Where the decisions for one server gather; clones share it.
#[derive(Clone)]
pub(super) struct Gather(Arc<Inner>);

struct Inner {
    link: Link,
    queue: Mutex<Queue>,
    /// It has turned out that no script may use two keys: the server is part of a cluster.
    apart: AtomicBool,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Until when each call may be under way. Past that its end is not waited for: it may be in a
    /// runtime that nobody runs any more.
    calls: [Option<Instant>; CALLS],
}

struct Waiting {
    /// The call for this decision alone.
    cmd: Cmd,
    until: Instant,
    reply: oneshot::Sender<Fate>,
    /// Where its answer is awaited.
    runtime: Handle,
}

/// What became of a decision.
pub(super) enum Fate {
    Known(Result<Answer, StoreError>),
    /// It can't travel with others, and was not decided.
    Returned(Cmd),
}

impl Gather {
    pub(super) fn new(link: Link) -> Self {
        Self(Arc::new(Inner { link, queue: Mutex::default(), apart: AtomicBool::new(false) }))
    }

    /// Whether nobody can travel with others here.
    pub(super) fn is_apart(&self) -> bool {
        self.0.apart.load(Ordering::Relaxed)
    }

    /// A place for a call that leaves now, if there is one and nobody waits for it.
    pub(super) fn place(&self, until: Instant) -> Option<UnderWay> {
        let mut queue = self.queue();
        if !queue.waiting.is_empty() {
            return None;
        }
        let place = queue.free(Instant::now())?;
        queue.calls[place] = Some(until);
        Some(UnderWay { gather: self.clone(), place, until })
    }

    /// Has it decided in the next call. `cmd` is the call for this decision alone, `runtime` the one
    /// in which the answer is awaited.
    pub(super) async fn join(&self, cmd: Cmd, until: Instant, runtime: Handle) -> Fate {
        let (reply, fate) = oneshot::channel();
        let next = {
            let mut queue = self.queue();
            queue.waiting.push_back(Waiting { cmd, until, reply, runtime });
            self.next(&mut queue)
        };
        leave(next);
        match timeout_at(until, fate).await {
            Ok(Ok(fate)) => fate,
            Ok(Err(_)) | Err(_) => Fate::Known(Err(late())),
        }
    }

    /// The next call, if somebody waits for it and there is a place.
    fn next(&self, queue: &mut Queue) -> Option<(Call, Handle)> {
        let now = Instant::now();
        let place = queue.free(now)?;
        let mut batch = Vec::new();
        while batch.len() < MOST
            && let Some(next) = queue.waiting.pop_front()
        {
            if next.is_wanted(now) {
                batch.push(next);
            }
        }
        let until = batch.iter().map(|waiting| waiting.until).max()?;
        queue.calls[place] = Some(until);
        // In a runtime that somebody runs now, whoever had the call before.
        let runtime = batch[0].runtime.clone();
        let under_way = UnderWay { gather: self.clone(), place, until };
        Some((Call { batch, under_way }, runtime))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn leave(next: Option<(Call, Handle)>) {
    if let Some((call, runtime)) = next {
        runtime.spawn(call.run());
    }
}

impl Queue {
    fn free(&self, now: Instant) -> Option<usize> {
        self.calls.iter().position(|call| call.is_none_or(|until| until <= now))
    }
}

impl Waiting {
    /// What is late or was dropped is not sent.
    fn is_wanted(&self, now: Instant) -> bool {
        now < self.until && !self.reply.is_closed()
    }

    fn tell(self, fate: Fate) {
        // Who is gone needs no answer.
        let _ = self.reply.send(fate);
    }
}

/// A place among the calls under way. The next call takes it over.
pub(super) struct UnderWay {
    gather: Gather,
    place: usize,
    until: Instant,
}

impl UnderWay {
    /// Makes a call in this place, and leaves it as soon as the answer is there. It may take long
    /// until the asker comes to fetch that, and others are not to wait for it.
    pub(super) async fn until_answered<T>(self, call: impl Future<Output = T>) -> T {
        let answered = Arc::new(Answered(Mutex::new((Some(self), Waker::noop().clone()))));
        let waker = Waker::from(Arc::clone(&answered));
        let _dropped = OnDrop(&answered);
        let mut call = pin!(call);
        poll_fn(|cx| {
            answered.lock().1.clone_from(cx.waker());
            call.as_mut().poll(&mut Context::from_waker(&waker))
        })
        .await
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.gather.queue();
            // Who has taken it since has another instant: it was free from this one on only.
            if queue.calls[self.place] == Some(self.until) {
                queue.calls[self.place] = None;
            }
            self.gather.next(&mut queue)
        };
        leave(next);
    }
}

/// Is woken by the answer; wakes the asker.
struct Answered(Mutex<(Option<UnderWay>, Waker)>);

impl Answered {
    fn lock(&self) -> MutexGuard<'_, (Option<UnderWay>, Waker)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Answered {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let (under_way, asker) = {
            let mut this = self.lock();
            (this.0.take(), this.1.clone())
        };
        drop(under_way);
        asker.wake();
    }
}

struct OnDrop<'a>(&'a Answered);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        let under_way = self.0.lock().0.take();
        drop(under_way);
    }
}

struct Call {
    batch: Vec<Waiting>,
    under_way: UnderWay,
}

impl Call {
    async fn run(self) {
        let Self { mut batch, under_way } = self;
        let gather = under_way.gather.clone();
        let Inner { link, apart, .. } = &*gather.0;
        let mut used = None;
        let sent = timeout_at(under_way.until, send(link, &mut used, &mut batch)).await.ok();
        // Where one thread drives all tasks, it may stop to do so once its own answer is there, and
        // the next call is not to wait for that. Elsewhere this task comes to its end.
        let on_its_own = Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread;
        let under_way = on_its_own.then_some(under_way);
        if let Some(lease) = used {
            match &sent {
                Some(Ok(answers)) => {
                    answers.iter().for_each(|one| link.report(&lease, Some(one.as_ref())));
                }
                Some(Err(error)) => link.report::<()>(&lease, Some(Err(error))),
                None => link.report::<()>(&lease, None),
            }
        }
        match sent {
            Some(Ok(answers)) => {
                for (waiting, answer) in batch.into_iter().zip(answers) {
                    waiting.tell(Fate::Known(answer.map_err(failed)));
                }
            }
            Some(Err(error))
                if error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot)
                    && batch.len() > 1 =>
            {
                apart.store(true, Ordering::Relaxed);
                for Waiting { cmd, reply, .. } in batch {
                    let _ = reply.send(Fate::Returned(cmd));
                }
            }
            Some(Err(error)) => {
                let error = failed(error);
                batch.into_iter().for_each(|one| one.tell(Fate::Known(Err(error.clone()))));
            }
            None => batch.into_iter().for_each(|one| one.tell(Fate::Known(Err(late())))),
        }
        // Those who ask again at once go with the next call.
        if let Some(_under_way) = under_way {
            for _ in 0..YIELDS {
                yield_now().await;
            }
        }
    }
}

/// Sends what is still wanted of a batch. Again only if it was refused because its script is missing.
async fn send(
    link: &Link,
    used: &mut Option<Lease>,
    batch: &mut Vec<Waiting>,
) -> RedisResult<Vec<RedisResult<Answer>>> {
    let Lease { connection } = used.insert(link.get().await?);
    let mut loads = 0..LOADS;
    loop {
        let now = Instant::now();
        batch.retain(|waiting| waiting.is_wanted(now));
        let (script, answers) = match &batch[..] {
            [] => return Ok(Vec::new()),
            [one] => {
                let answer = connection.req_packed_command(&one.cmd).await;
                (&ONE, answer.and_then(Answer::one).map(|answer| vec![Ok(answer)]))
            }
            all => {
                let cmd = script::many(all.iter().map(|waiting| &waiting.cmd));
                let answer = connection.req_packed_command(&cmd).await;
                (&MANY, answer.and_then(|answer| Answer::many(answer, all.len())))
            }
        };
        match answers {
            Err(error) if script::is_missing(&error) && loads.next().is_some() => {
                script.load_async(connection).await?;
            }
            answers => return answers,
        }
    }
}
