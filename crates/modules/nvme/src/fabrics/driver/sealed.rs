//! Connections with TLS: the buffers for it, which all queues of a reactor share. Reactor context.

use super::link::Link;
use super::live::Live;
use super::tcp::BUFFER;
use super::{Loss, QueueDriver};
use aryk_reactor::Cx;
use aryk_tls::{Session, TlsError, overhead};
use std::cell::{RefCell, RefMut};

/// Bytes that are decrypted at a time.
const OPENED_MAX: usize = 64 << 10;

/// See the [module](self).
pub(super) struct Sealing {
    opened: RefCell<Vec<u8>>,
    records: RefCell<Vec<u8>>,
}

impl Default for Sealing {
    fn default() -> Self {
        Self {
            opened: RefCell::new(vec![0; OPENED_MAX]),
            records: RefCell::new(Vec::with_capacity(BUFFER + overhead(BUFFER))),
        }
    }
}

impl Sealing {
    /// Encrypts output.
    pub(super) fn seal(&self, session: &mut Session, plain: &[u8]) -> Result<RefMut<'_, Vec<u8>>, TlsError> {
        let mut records = self.records.borrow_mut();
        records.clear();
        session.write(plain, &mut records)?;
        Ok(records)
    }
}

impl QueueDriver {
    /// Takes encrypted input of a path. Returns the number of commands that ended.
    pub(super) fn open(&mut self, path: usize, mut received: &[u8], cx: &mut Cx) -> Result<u32, Loss> {
        let Some(sealing) = self.sealing.clone() else { return Ok(0) };
        let mut opened = sealing.opened.borrow_mut();
        let mut count = 0;
        loop {
            let Some(Live { link: Link::Tcp(tcp), .. }) = self.lives[path].as_deref_mut() else {
                return Ok(count);
            };
            let Some(session) = &mut tcp.tls else { return Ok(count) };
            match session.read(&mut received, &mut opened)? {
                0 => return Ok(count),
                len => count += self.take_input(path, &opened[..len], cx)?,
            }
        }
    }
}
