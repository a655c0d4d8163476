//! The thread that runs the clients' futures. It starts with the first client, and ends with the [`Executor`] and the last
//! future.

use super::Ticket;
use async_task::Runnable;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

enum Job {
    Run(Runnable),
    Expire(Instant, Weak<Ticket>),
}

#[derive(Default)]
pub(super) struct Executor {
    sender: OnceLock<Sender<Job>>,
    starting: Mutex<()>,
}

impl Executor {
    /// Starts the thread, unless it runs.
    pub fn start(&self) -> std::io::Result<()> {
        let _starting = crate::bdev::lock(&self.starting);
        if self.sender.get().is_none() {
            let (sender, jobs) = channel();
            std::thread::Builder::new().name("memory".to_owned()).spawn(move || work(&jobs))?;
            self.sender.get_or_init(|| sender);
        }
        Ok(())
    }

    fn sender(&self) -> &Sender<Job> {
        self.sender.get().expect("started before the first client is attached")
    }

    /// Runs a future to its end.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        let sender = self.sender().clone();
        // The thread ends after the last sender, so that it receives everything.
        let (runnable, task) =
            async_task::spawn(future, move |runnable| drop(sender.send(Job::Run(runnable))));
        runnable.schedule();
        task.detach();
    }

    /// Ends the wait for a ticket after `patience`.
    pub fn expire_after(&self, patience: Duration, ticket: &Arc<Ticket>) {
        let _ = self.sender().send(Job::Expire(now() + patience, Arc::downgrade(ticket)));
    }
}

fn work(jobs: &Receiver<Job>) {
    // Nearly in the order of their times, for the patience seldom changes.
    let mut waits: VecDeque<(Instant, Weak<Ticket>)> = VecDeque::new();
    loop {
        // Before the next job: a future that wakes itself always leaves one.
        while let Some((at, ticket)) = waits.front()
            && (ticket.strong_count() == 0 || *at <= now())
        {
            if let Some(ticket) = ticket.upgrade() {
                ticket.expire();
            }
            waits.pop_front();
        }
        let next = match waits.front() {
            None => jobs.recv().map_err(RecvTimeoutError::from),
            Some((at, _)) => jobs.recv_timeout(at.saturating_duration_since(now())),
        };
        match next {
            Ok(Job::Run(runnable)) => drop(runnable.run()),
            Ok(Job::Expire(at, ticket)) => waits.push_back((at, ticket)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "registrations run outside of reactors, in real time")]
fn now() -> Instant {
    Instant::now()
}
