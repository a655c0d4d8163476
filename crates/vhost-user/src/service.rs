//! The common part of controllers that listen and controllers that connect: a task that serves one front-end after the other, and
//! the handle that controls the task. Control context.

use crate::device::{Device, SessionHandle};
use crate::session::serve_front_end;
use crate::stats::{Snapshot, Stats};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

/// State that the task shares with its handle.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) stats: Stats,
    current: Mutex<Option<SessionHandle>>,
}

impl Shared {
    fn current(&self) -> Option<SessionHandle> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_current(&self, session: Option<SessionHandle>) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = session;
    }

    /// Serves one front-end. Meanwhile `session` can end the session.
    pub(crate) async fn serve<D: Device>(&self, stream: UnixStream, device: &D, session: &SessionHandle) {
        self.set_current(Some(session.clone()));
        // The result has already been logged and counted.
        let _ = serve_front_end(stream, device, session.clone(), &self.stats).await;
        self.set_current(None);
    }
}

/// A controller's task. Dropping it stops it in the background.
#[derive(Debug)]
pub(crate) struct Service {
    shared: Arc<Shared>,
    path: PathBuf,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
    span: Span,
}

impl Service {
    /// Starts the task that `make` returns; the task must end soon after its receiver has changed.
    ///
    /// # Panics
    /// Outside of a [`tokio::task::LocalSet`].
    pub(crate) fn start<F: Future<Output = ()> + 'static>(
        name: &str,
        path: &Path,
        make: impl FnOnce(Arc<Shared>, watch::Receiver<bool>) -> F,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = watch::channel(false);
        let span = tracing::info_span!("vhost-user", controller = name);
        let task = make(Arc::clone(&shared), stopped).instrument(span.clone());
        Self { shared, path: path.to_owned(), stop, task: tokio::task::spawn_local(task), span }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn stats(&self) -> Snapshot {
        self.shared.stats.snapshot()
    }

    pub(crate) fn tell_left_out(&self) {
        self.span.in_scope(|| self.shared.stats.lines.tell_left_out());
    }

    pub(crate) fn config_changed(&self) {
        if let Some(session) = self.shared.current() {
            session.config_changed();
        }
    }

    pub(crate) async fn stop(self) {
        self.stop.send_replace(true);
        if let Err(error) = self.task.await
            && let Ok(panic) = error.try_into_panic()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
