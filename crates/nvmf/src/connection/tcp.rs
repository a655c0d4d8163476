//! A TCP connection in control, plain or in TLS. Control context.

use super::{End, PATIENCE, Slot, Slots};
use crate::address::Transport;
use crate::queue::{Carrier, TcpCarrier};
use crate::stream::Stream;
use crate::target::Inner;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::tcp::{IcResp, Piece, Queue, Received};
use std::io::IoSlice;
use std::sync::Arc;

/// The largest data of an H2CData PDU.
const H2C_DATA_MAX: u32 = 128 << 10;

/// A connection.
pub(super) struct TcpLink {
    pub stream: Stream,
    pub queue: Queue,
    /// What was received and not taken yet.
    input: Vec<u8>,
}

impl TcpLink {
    pub fn new(stream: Stream) -> Self {
        let supported =
            IcResp { alignment: 0, header_digest: true, data_digest: true, h2c_data_max: H2C_DATA_MAX };
        let queue = Queue::new(supported, Transport::Tcp.in_capsule_max());
        Self { stream, queue, input: Vec::new() }
    }

    /// Makes the handshake of TLS.
    pub async fn secure(&mut self, inner: &Inner) -> Result<(), End> {
        let psks = Arc::clone(&inner.state.borrow().psks);
        Ok(self.stream.secure(psks, &mut self.input).await?)
    }

    /// The next command whose data has arrived, and whether the data is intact.
    pub async fn next(&mut self, slots: &mut Slots) -> Result<(SlotId, bool), End> {
        loop {
            if let Some(ready) = self.take(slots).await? {
                return Ok(ready);
            }
            // The answer to an ICReq.
            self.flush_in_time(slots).await?;
            self.stream.receive(&mut self.input).await?;
        }
    }

    /// Takes what was received, up to the next command.
    async fn take(&mut self, slots: &mut Slots) -> Result<Option<(SlotId, bool)>, End> {
        let bytes = std::mem::take(&mut self.input);
        let mut input = &bytes[..];
        loop {
            match self.queue.receive(&mut input) {
                Ok(None) => return Ok(None),
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    slots.insert(slot, Slot::new(entry, data_len, vec![0; data_len as usize]));
                }
                Ok(Some(Received::Data { slot, offset, bytes })) => {
                    let slot = slots.get_mut(&slot).expect("its command came first");
                    slot.data[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                Ok(Some(Received::Ready { slot, is_intact })) => {
                    self.input = input.to_vec();
                    return Ok(Some((slot, is_intact)));
                }
                Ok(Some(Received::Terminated(_))) => return Err(End::Refused),
                Err(fatal) => {
                    self.queue.terminate(fatal);
                    self.flush_in_time(slots).await?;
                    return Err(End::Refused);
                }
            }
        }
    }

    async fn flush_in_time(&mut self, slots: &mut Slots) -> Result<(), End> {
        tokio::time::timeout(PATIENCE, self.flush(slots)).await.map_err(|_| End::Refused)?
    }

    /// Writes the output.
    pub async fn flush(&mut self, slots: &mut Slots) -> Result<(), End> {
        while !self.queue.is_output_empty() {
            let slices: Vec<IoSlice<'_>> = (self.queue.output().take(8))
                .map(|piece| match piece {
                    Piece::Bytes(bytes) => IoSlice::new(bytes),
                    Piece::Data { slot, offset, len } => {
                        IoSlice::new(&slots[&slot].data[offset as usize..][..len as usize])
                    }
                })
                .collect();
            let Some(len) = self.stream.try_send(&slices)? else {
                drop(slices);
                self.stream.sendable().await?;
                continue;
            };
            drop(slices);
            self.queue.sent(len, |slot| {
                slots.remove(&slot);
            });
        }
        Ok(self.stream.flush().await?)
    }

    /// The connection for an I/O queue. Nothing is unsent.
    pub fn into_carrier(self, zero_copy: bool) -> Result<Carrier, End> {
        let (socket, tls) = self.stream.into_parts()?;
        Ok(Carrier::Tcp(TcpCarrier { socket, tls, queue: self.queue, rest: self.input, zero_copy }))
    }
}
