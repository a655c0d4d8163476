//! A session's queues: decides which of them the device runs, and with which setup. Control context.

use super::{F_LOG_ALL, F_PROTOCOL_FEATURES, Session};
use crate::Error;
use crate::device::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, Rings};
use crate::error::SHARE;
use crate::inflight::Inflight;
use crate::memory::{GRACE, Removed};
use crate::message::{self, Code, LogDesc, Request, VringFd, VringState};
use crate::vring::{Kick, RunState, Vring, is_packed};
use aryk_dma::{DirtyLog, GuestArea, MemTable};
use aryk_log_limit::limited;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// How long a session waits for a queue to start, so that it can report an error in its answer to the front-end. A disk may
/// take longer, or forever: then the session continues.
const START_PATIENCE: Duration = Duration::from_millis(100);

/// Waits for the next end (success or failure) of a start that takes long.
pub(super) async fn next_started(vrings: &mut [Vring]) -> (usize, Result<(), DeviceError>) {
    std::future::poll_fn(|cx| {
        for (index, vring) in vrings.iter_mut().enumerate() {
            if let RunState::Starting(started) = &mut vring.run_state
                && let Poll::Ready(started) = Pin::new(started).poll(cx)
            {
                vring.run_state = RunState::Stopped;
                return Poll::Ready((
                    index,
                    started.unwrap_or_else(|_| Err("the start ended without a result".into())),
                ));
            }
        }
        Poll::Pending
    })
    .await
}

impl<D: Device> Session<'_, D> {
    /// Carries out one of the SET_VRING requests.
    pub(super) async fn set_vring(
        &mut self,
        code: Code,
        request: Request,
        fd: Option<EventFd>,
    ) -> Result<(), Error> {
        match request {
            Request::SetVringNum(VringState { index, num }) => {
                let index = self.index(code, index)?;
                let size = Vring::check_size(code, self.features, num, self.device.queue_size_max())?;
                if self.vrings[index].size != size {
                    self.halt(index).await;
                    self.vrings[index].size = size;
                }
                self.settle(code, index).await
            }
            Request::SetVringAddr(addr) => {
                let index = self.index(code, addr.index)?;
                let log_addr = Vring::check_log(code, self.device.logs_writes(), &addr)?;
                let addr = Vring::check_addr(code, self.features, &addr)?;
                if self.vrings[index].addr != Some(addr) {
                    self.halt(index).await;
                    self.vrings[index].addr = Some(addr);
                }
                self.vrings[index].log_addr = log_addr;
                self.settle(code, index).await?;
                self.update_log(index).await;
                Ok(())
            }
            Request::SetVringBase(VringState { index, num }) => {
                let index = self.index(code, index)?;
                Vring::check_base(code, self.features, num)?;
                self.halt(index).await;
                self.vrings[index].base = Some(num);
                self.settle(code, index).await
            }
            Request::SetVringEnable(VringState { index, num }) => {
                let index = self.index(code, index)?;
                self.vrings[index].enabled = Some(num != 0);
                if num == 0 {
                    self.halt(index).await;
                }
                self.settle(code, index).await
            }
            Request::SetVringKick(VringFd { index, .. }) => {
                let index = self.index(code, index.into())?;
                self.halt(index).await;
                self.vrings[index].kick = fd.map_or(Kick::Poll, Kick::Fd);
                self.settle(code, index).await
            }
            Request::SetVringCall(VringFd { index, .. }) => {
                let index = self.index(code, index.into())?;
                self.vrings[index].call.clone_from(&fd);
                if self.vrings[index].run_state.is_running() {
                    self.device.set_call(index as u16, fd).await;
                }
                Ok(())
            }
            Request::SetVringErr(VringFd { index, .. }) => {
                let index = self.index(code, index.into())?;
                self.vrings[index].err.clone_from(&fd);
                if self.vrings[index].run_state.is_running() {
                    self.device.set_err(index as u16, fd).await;
                }
                Ok(())
            }
            other => unreachable!("{other:?} is no SET_VRING request"),
        }
    }

    fn index(&self, code: Code, index: u32) -> Result<usize, Error> {
        let queues = self.vrings.len();
        let found = usize::try_from(index).ok().filter(|&i| i < queues);
        found.ok_or(Error::BadQueue { code, index, queues })
    }

    pub(super) async fn get_vring_base(&mut self, code: Code, state: VringState) -> Result<Vec<u8>, Error> {
        let index = self.index(code, state.index)?;
        self.halt(index).await;
        self.vrings[index].kick = Kick::Stopped;
        let vring = &self.vrings[index];
        let num = match (vring.base, vring.stopped_at) {
            (None, Some(stopped_at)) => stopped_at,
            _ => vring.base(self.features.unwrap_or(0)),
        };
        Ok(message::reply(code, zerocopy::IntoBytes::as_bytes(&VringState { index: state.index, num })))
    }

    /// Sets the in-flight region. Setting the same region again changes nothing.
    pub(super) async fn set_inflight(&mut self, code: Code, inflight: Inflight) -> Result<(), Error> {
        if !self.inflight.as_ref().is_some_and(|ours| ours.is_same(&inflight)) {
            for index in 0..self.vrings.len() {
                self.halt(index).await;
            }
            self.inflight = Some(inflight);
        }
        for index in 0..self.vrings.len() {
            self.settle(code, index).await?;
        }
        Ok(())
    }

    fn inflight_part(&self, code: Code, index: usize, features: u64) -> Result<Option<GuestArea>, Error> {
        let Some(region) = &self.inflight else { return Ok(None) };
        region.part(code, index, self.vrings[index].size, is_packed(features))
    }

    /// SET_LOG_BASE. Answered when no queue marks the old log any more.
    pub(super) async fn set_log(&mut self, code: Code, desc: LogDesc, fd: &OwnedFd) -> Result<(), Error> {
        self.await_room([desc.size].into_iter()).await?;
        let log = DirtyLog::map(fd.as_fd(), desc.offset, desc.size);
        let log = log.map_err(|source| Error::Log { code, source })?.given_by(self.memory.peer());
        let end = self.memory_end();
        if !log.covers(end) {
            return Err(Error::LogTooSmall { code, got: desc.size, end });
        }
        self.log = Some(Arc::new(log));
        for index in 0..self.vrings.len() {
            self.update_log(index).await;
        }
        Ok(())
    }

    /// The first guest address after all memory.
    fn memory_end(&self) -> u64 {
        self.memory.table().regions().last().map_or(0, |region| region.guest_addr + region.len)
    }

    /// The log and the ring addresses that a queue must mark.
    fn queue_log(&self, index: usize) -> Option<QueueLog> {
        let features = self.features.filter(|features| features & F_LOG_ALL != 0)?;
        let log = Arc::clone(self.log.as_ref()?);
        let ring = self.vrings[index].logged_ring(features, &self.memory.table());
        Some(QueueLog { log, ring })
    }

    /// Updates the device if the log of a running queue has changed.
    pub(super) async fn update_log(&mut self, index: usize) {
        let log = self.queue_log(index);
        if self.vrings[index].run_state.is_running() && self.vrings[index].log != log {
            self.vrings[index].log.clone_from(&log);
            self.device.set_log(index as u16, log).await;
        }
    }

    /// "VHOST_USER_RESET_DEVICE", and a device status of 0: resets all queues to their initial state. Their call fds stay,
    /// because front-ends send those once. The session's features and memory stay, too. The positions at which queues stopped
    /// can still be queried.
    pub(super) async fn reset(&mut self) {
        for index in 0..self.vrings.len() {
            self.halt(index).await;
            let Vring { call, err, base, stopped_at, .. } = std::mem::take(&mut self.vrings[index]);
            self.vrings[index] = Vring { call, err, stopped_at: base.or(stopped_at), ..Vring::default() };
        }
        self.inflight = None;
        self.status = 0;
    }

    /// Stops a queue if it runs, and cancels its start if it waits for its disk.
    pub(super) async fn halt(&mut self, index: usize) {
        let is_running = match std::mem::take(&mut self.vrings[index].run_state) {
            RunState::Stopped => false,
            RunState::Running => true,
            RunState::Starting(started) => {
                self.device.cancel_start(index as u16);
                // The queue may have started before the cancellation.
                matches!(self.wait("a queue's start is cancelled", started).await, Ok(Ok(())))
            }
        };
        if is_running {
            let base = self.wait("a queue stops", self.device.stop_queue(index as u16)).await;
            self.vrings[index].base = Some(base);
            self.vrings[index].log = None;
            tracing::debug!(queue = index, base, "queue stopped");
        }
    }

    /// Stops all queues at the same time, at the end of the session.
    pub(super) async fn halt_all(&mut self) {
        for index in 0..self.vrings.len() {
            if matches!(self.vrings[index].run_state, RunState::Starting(_)) {
                self.halt(index).await;
            }
        }
        let running = (0..self.vrings.len()).filter(|&index| self.vrings[index].run_state.is_running());
        let device = self.device;
        let mut stops: Vec<_> = running.map(|index| Box::pin(device.stop_queue(index as u16))).collect();
        std::future::poll_fn(|cx| {
            stops.retain_mut(|stop| stop.as_mut().poll(cx).is_pending());
            if stops.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.vrings.clear();
    }

    /// Starts a queue if the front-end has enabled it, its setup is complete, and it does not run yet.
    pub(super) async fn settle(&mut self, code: Code, index: usize) -> Result<(), Error> {
        let Some(features) = self.features else { return Ok(()) };
        let vring = &self.vrings[index];
        if !matches!(vring.run_state, RunState::Stopped) || !vring.is_wanted(features) {
            return Ok(());
        }
        vring.check(code, features)?;
        self.sharing.check(self.memory.files());
        let memory = self.memory.table();
        let Some(rings) = vring.rings(features, &memory) else {
            limited!(
                self.stats.lines.faults,
                warn,
                queue = index,
                "queue cannot start yet: its rings are in none of the {} memory regions announced; {SHARE}",
                memory.regions().len()
            );
            self.stats.rings_outside();
            return Ok(());
        };
        let inflight = self.inflight_part(code, index, features)?;
        populate(&rings, inflight.as_ref()).await;
        let vring = &self.vrings[index];
        let setup = QueueSetup {
            size: vring.size,
            base: vring.base(features),
            features: features & !(F_PROTOCOL_FEATURES | F_LOG_ALL),
            rings,
            memory,
            kick: vring.kick.fd(),
            call: vring.call.clone(),
            err: vring.err.clone(),
            inflight,
            log: self.queue_log(index),
        };
        tracing::debug!(queue = index, size = setup.size, base = setup.base, "queue starts");
        let log = setup.log.clone();
        let started = self.start(index as u16, setup).await;
        self.vrings[index].run_state = started.map_err(|source| Error::Device { code, source })?;
        self.vrings[index].log = log;
        Ok(())
    }

    /// Starts a queue, and waits for that up to [`START_PATIENCE`]. If several starts take long, the session waits only for the
    /// first.
    async fn start(&self, index: u16, setup: QueueSetup) -> Result<RunState, DeviceError> {
        let others_start = self.vrings.iter().any(|vring| matches!(vring.run_state, RunState::Starting(_)));
        let patience = if others_start { Duration::ZERO } else { START_PATIENCE };
        let mut started = self.starts.begin(self.device.start_queue(index, setup)).await;
        match tokio::time::timeout(patience, &mut started).await {
            Ok(started) => started
                .unwrap_or_else(|_| Err("the start ended without a result".into()))
                .map(|()| RunState::Running),
            Err(_) => {
                limited!(self.stats.lines.sessions, info, queue = index, "queue waits for its disk");
                Ok(RunState::Starting(started))
            }
        }
    }

    /// Handles the end of a start that took long: the queue runs, or cannot run. Passes the changes since the start began to
    /// the device; a change of the rings or of the memory has cancelled the start.
    pub(super) async fn has_started(
        &mut self,
        index: usize,
        started: Result<(), DeviceError>,
    ) -> Result<(), Error> {
        started.map_err(|source| Error::Ended(format!("queue {index} cannot start: {source}")))?;
        let vring = &mut self.vrings[index];
        vring.run_state = RunState::Running;
        let (call, err) = (vring.call.clone(), vring.err.clone());
        self.device.set_call(index as u16, call).await;
        self.device.set_err(index as u16, err).await;
        self.update_log(index).await;
        Ok(())
    }

    /// Waits until devices have registered the memory, or the session must end.
    async fn register(&self, memory: &MemTable) {
        tokio::select! {
            biased;
            () = self.device.register_memory(memory) => {}
            () = self.ending() => {}
        }
    }

    /// Updates the device after a change of the memory table. Queues whose rings are in removed memory wait until the memory is
    /// added again: front-ends remove and add a region to change its size.
    pub(super) async fn memory_changed(&mut self, code: Code, removed: Removed) -> Result<(), Error> {
        let memory = self.memory.table();
        self.register(&memory).await;
        let features = self.features.unwrap_or(0);
        let mut rings = Vec::new();
        for index in 0..self.vrings.len() {
            let vring = &self.vrings[index];
            match (&vring.run_state, vring.rings(features, &memory)) {
                (RunState::Stopped, _) => {}
                (RunState::Running, Some(found)) => rings.push((index as u16, found)),
                // The code below repeats a start that takes long with the new memory.
                (RunState::Running, None) | (RunState::Starting(_), _) => self.halt(index).await,
            }
        }
        if !rings.is_empty() {
            self.device.set_memory(MemoryChange { memory, rings }).await;
        }
        self.sharing.check(self.memory.files());
        let retired = removed.retire(GRACE, async || self.device.revoke_memory().await);
        self.wait("removed memory is in use", retired).await;
        let end = self.memory_end();
        if features & F_LOG_ALL != 0 && self.log.as_ref().is_some_and(|log| !log.covers(end)) {
            limited!(
                self.stats.lines.faults,
                warn,
                "the dirty log does not cover guest memory up to {end:#x}: the VM's migration may fail"
            );
        }
        for index in 0..self.vrings.len() {
            self.settle(code, index).await?;
            self.update_log(index).await;
        }
        Ok(())
    }
}

/// Allocates the pages that a queue's reactor uses constantly, so that the reactor need not wait for the kernel to allocate
/// them. The front-end can remove the pages again.
async fn populate(rings: &Rings, inflight: Option<&GuestArea>) {
    let Rings { desc, driver, device } = rings.clone();
    let areas = [Some(desc), Some(driver), Some(device), inflight.cloned()];
    let populating =
        tokio::task::spawn_blocking(move || areas.iter().flatten().for_each(GuestArea::populate));
    populating.await.expect("populating does not panic");
}
