//! The thread of a rotation, for what must not run on a reactor: it encrypts zones again, and writes the journal. Any context.

use super::Journal;
use futures_channel::oneshot;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

type Job = Box<dyn FnOnce(&mut Journal) + Send>;

/// The thread. It ends when this is dropped, after the job that it runs.
#[derive(Debug)]
pub(super) struct Worker(Sender<Job>);

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// Those of the system.
    pub fn start(journal: Journal) -> io::Result<Self> {
        let (sender, jobs) = channel();
        std::thread::Builder::new().name("rekey".to_owned()).spawn(move || run(journal, &jobs))?;
        Ok(Self(sender))
    }

    /// Runs a job on the thread, also if the caller stops waiting for its result.
    pub async fn run<R: Send + 'static>(&self, job: impl FnOnce(&mut Journal) -> R + Send + 'static) -> R {
        let (done, wait) = oneshot::channel();
        let job = Box::new(move |journal: &mut Journal| {
            // The caller may have stopped waiting.
            let _ = done.send(job(journal));
        });
        self.0.send(job).expect("the thread ends after this value");
        wait.await.expect("the thread runs each job")
    }
}

fn run(mut journal: Journal, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        job(&mut journal);
    }
}
