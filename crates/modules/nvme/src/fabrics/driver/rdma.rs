//! A connection of RDMA. Reactor context.
//!
//! While the reactor reaps the driver in every turn, the completion queue has no wake-ups and no system call: they are turned on
//! before the driver parks.

use super::link::Link;
use super::live::Live;
use super::{DriverId, Loss, QueueDriver};
use crate::fabrics::rdma::Wire;
use aryk_bdev::Op;
use aryk_rdma::Ending;
use aryk_reactor::{Cx, WatchId};
use std::io;

/// How often one turn takes completions of the device.
const POLLS_MAX: u32 = 4;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Rdma {
    pub(super) wire: Wire,
    watch: Option<WatchId>,
}

impl Rdma {
    pub(super) const fn new(wire: Wire) -> Self {
        Self { wire, watch: None }
    }

    pub(super) fn watch(&mut self, id: DriverId, cx: &mut Cx) -> io::Result<()> {
        self.watch = Some(cx.watch_driver(self.wire.fd().try_clone_to_owned()?, id)?);
        Ok(())
    }

    /// A thread destroys the queue pair: nothing is sent any more. What it connects afterwards comes later. Returns the end if
    /// the target may access the memory of requests until then.
    pub(super) fn close(self, cx: &mut Cx) -> Option<Ending> {
        self.watch.into_iter().for_each(|watch| drop(cx.unwatch(watch)));
        self.wire.close()
    }
}

impl QueueDriver {
    /// Takes what the device of a path has completed. Returns the number of commands that ended, at least 1 if there was
    /// anything.
    pub(super) fn receive_rdma(&mut self, path: usize, cx: &mut Cx) -> Result<u32, Loss> {
        let (mut count, mut has_any, mut received_at) = (0, false, None);
        for _ in 0..POLLS_MAX {
            let Some(Live { link: Link::Rdma(rdma), .. }) = self.lives[path].as_deref_mut() else { break };
            let is_full = rdma.wire.poll()?;
            has_any |= rdma.wire.has_any();
            loop {
                let Some(Live { link: Link::Rdma(rdma), commands, free, .. }) =
                    self.lives[path].as_deref_mut()
                else {
                    return Ok(count);
                };
                let Some(ended) = rdma.wire.next()? else { break };
                count += 1;
                let running = commands[usize::from(ended.cid)].take().expect("the queue had the command");
                let request = self.requests.get(running.key).expect("it is at the controller");
                if ended.status.is_success() && request.io.op == Op::Read {
                    rdma.wire.data(ended.cid).copy_to(&request.io.data);
                }
                rdma.wire.release(ended.cid);
                free.push(ended.cid);
                let now = *received_at.get_or_insert_with(|| cx.refresh_now());
                self.complete(running, ended.status, true, now, cx)?;
            }
            if !is_full {
                break;
            }
        }
        Ok(count.max(u32::from(has_any)))
    }
}
