//! Reads beside the pool, as another thread does them: the pool tells where the data is, and a reader reads it. Messages between
//! the two take a while.

use aryk_volume::{Action, Extents, ReadEnd, ReadKey, Reader, Request, Status, Tag};
use std::collections::{BTreeMap, VecDeque};

use super::{Open, World};

/// A reader, and the messages between it and the pool.
#[derive(Debug, Default)]
pub(super) struct Beside {
    pub(super) reader: Reader,
    /// Requests of the reader by their tags.
    keys: BTreeMap<u64, ReadKey>,
    requests: VecDeque<Request>,
    located: VecDeque<(u64, Extents)>,
    given_back: VecDeque<(Extents, u64)>,
}

impl Beside {
    pub(super) fn submit(&mut self, request: Request) {
        self.requests.push_back(request);
    }

    /// Aborts requests that the reader has.
    pub(super) fn abort(&mut self, is_meant: impl Fn(u64) -> bool) {
        for (_, &key) in self.keys.iter().filter(|(tag, _)| is_meant(**tag)) {
            self.reader.abort(key);
        }
    }
}

impl World {
    /// Lets some messages arrive, and takes what the reader has ended. Returns whether there were any, or will be.
    pub(super) fn pass_messages(&mut self) -> Result<bool, String> {
        let [requests, located, given_back] = [(); 3].map(|()| self.rng.usize(..4));
        let Open { pool, beside, .. } = self.open.as_mut().expect("the pool is open");
        let has_any =
            !(beside.requests.is_empty() && beside.located.is_empty() && beside.given_back.is_empty());
        for request in beside.requests.drain(..requests.min(beside.requests.len())) {
            pool.submit(request);
        }
        for (extents, damaged) in beside.given_back.drain(..given_back.min(beside.given_back.len())) {
            pool.give_back(extents, damaged);
        }
        for (tag, extents) in beside.located.drain(..located.min(beside.located.len())) {
            let request = self.requests.get(&tag).expect("it has not ended");
            let key = beside.reader.start(Tag(tag), request.units.0, request.memory, extents);
            beside.keys.insert(tag, key);
        }
        let mut has_ended = false;
        while let Some(end) = self.opened().beside.reader.next_end() {
            has_ended = true;
            match end {
                ReadEnd::Extents { extents, damaged_blocks } => {
                    self.opened().beside.given_back.push_back((extents, damaged_blocks));
                }
                ReadEnd::Request { tag: Tag(tag), status } => {
                    self.tick();
                    self.opened().beside.keys.remove(&tag);
                    self.ended(tag, status, Vec::new())?;
                }
            }
        }
        Ok(has_any || has_ended)
    }

    /// The pool has told where the data of a read is, or that it has to read it itself.
    pub(super) fn located(&mut self, tag: u64, status: Status, mut extents: Extents) -> Result<(), String> {
        let Open { pool, store, beside, .. } = self.open.as_mut().expect("the pool is open");
        if status == Status::Ok {
            extents.place(|blob, unit, len| store.offset(blob, unit, len));
            beside.located.push_back((tag, extents));
            return Ok(());
        }
        let request = self.requests.get_mut(&tag).ok_or("a reply to nothing")?;
        request.is_located = false;
        let (unit, end) = request.units;
        let action = Action::Read { data: request.memory };
        pool.submit(Request { tag: Tag(tag), volume: request.volume, unit, units: end - unit, action });
        Ok(())
    }
}
