//! A connection of RDMA. Context: the thread of NVMe over Fabrics.

use super::{Commands, Pending, Place};
use crate::fabrics::driver::Carrier;
use crate::fabrics::rdma::{Way, Wire};
use crate::fabrics::{ConnectError, RemoteConfig};
use aryk_nvme::spec::entry::SubmissionEntry;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Link {
    wire: Wire,
    /// Says that there are completions.
    news: AsyncFd<OwnedFd>,
}

impl Link {
    pub(super) async fn open(config: &RemoteConfig, place: Place) -> Result<Self, ConnectError> {
        let wire = Wire::connect(config, place).await?;
        #[expect(deprecated, reason = "unsound for types whose descriptor may change; this is an OwnedFd")]
        let news = AsyncFd::with_interest(wire.fd().try_clone_to_owned()?, Interest::READABLE)?;
        Ok(Self { wire, news })
    }

    pub(super) fn submit(
        &mut self,
        cid: u16,
        entry: SubmissionEntry,
        pending: &Pending,
    ) -> Result<(), ConnectError> {
        let transfer = pending.transfer();
        if !self.wire.has_room(1, transfer) {
            return Err(ConnectError::Unsupported("an admin command has too much data"));
        }
        self.wire.submit(cid, entry, transfer, Way::Copied, |to| to.write(0, &pending.outgoing));
        Ok(())
    }

    /// Posts what there is to post, and waits for completions of the device.
    pub(super) async fn turn(&mut self, commands: &mut Commands) -> Result<(), ConnectError> {
        self.wire.flush()?;
        if !self.wire.arm()? {
            self.news.readable().await?.clear_ready();
            self.wire.poll()?;
        }
        while let Some(ended) = self.wire.next()? {
            let pending = commands[usize::from(ended.cid)].as_mut().expect("the queue has the command");
            if ended.status.is_success() {
                let data = self.wire.data(ended.cid);
                data.read(0, &mut pending.incoming[..data.len() as usize]);
            }
            self.wire.release(ended.cid);
            pending.done = Some((ended.status, ended.result, true));
        }
        Ok(())
    }

    pub(super) fn into_carrier(mut self, in_capsule_max: u32) -> Carrier {
        self.wire.set_in_capsule_max(in_capsule_max);
        Carrier::Rdma(self.wire)
    }
}
