//! Decides which values a read may return. Pure: events in, verdicts out. Test tool, any thread.
//!
//! A request's interval is from before the device could see it until its completion was seen. Within the interval a write
//! may be applied at any time, and more than once: a request that was in flight at a crash is submitted again. So a read
//! may return a write W unless there is a request that was submitted after W had completed, that completed before the
//! read was submitted, and that shows another value: a later write, or an earlier read that returned another value.
//! Writes that are still in flight may always be seen.
//!
//! A write-zeroes is a write of zeroes. A discard leaves zeroes or the old content.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::content::Content;

/// A point in time: the number of events before it.
type Moment = u64;

/// The effect of a changing request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Writes sectors that carry the write's number.
    Write,
    /// Writes zeroes.
    Zeroes,
    /// Writes zeroes, or changes nothing.
    Discard,
}

/// A value that a sector may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    seq: u64,
    change: Change,
    completed: Option<Moment>,
    /// The moment from which no new read may return the value.
    obsolete: Option<Moment>,
}

impl Candidate {
    fn is(&self, content: Content) -> bool {
        match content {
            Content::Written(seq) => self.change == Change::Write && self.seq == seq,
            Content::Zero => self.change != Change::Write,
            Content::Foreign { .. } => false,
        }
    }

    fn completed_before(&self, moment: Moment) -> bool {
        self.completed.is_some_and(|completed| completed < moment)
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.change {
            Change::Write => "write",
            Change::Zeroes => "zeroes",
            Change::Discard => "discard",
        };
        let state = match (self.completed, self.obsolete) {
            (None, _) => " in flight",
            (Some(_), None) => "",
            (Some(_), Some(_)) => " overwritten since",
        };
        write!(f, "{name} {}{state}", self.seq)
    }
}

/// A read in flight.
#[derive(Debug)]
pub struct Read {
    submitted: Moment,
    sectors: Range<u64>,
}

impl Read {
    /// The sectors of the read.
    #[must_use]
    pub fn sectors(&self) -> Range<u64> {
        self.sectors.clone()
    }
}

/// A write, write-zeroes or discard in flight.
#[derive(Debug)]
pub struct Write {
    submitted: Moment,
    seq: u64,
    change: Change,
    sectors: Range<u64>,
}

impl Write {
    /// The request's number, which its sectors carry.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }

    /// The sectors of the change.
    #[must_use]
    pub fn sectors(&self) -> Range<u64> {
        self.sectors.clone()
    }
}

/// A read returned a value that it must not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongValue {
    /// The sector.
    pub sector: u64,
    /// The returned content.
    pub saw: Content,
    /// The contents that the read was allowed to return.
    pub allowed: Vec<String>,
}

impl fmt::Display for WrongValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sector {} reads as {}, but may be: {}", self.sector, self.saw, self.allowed.join(", "))
    }
}

/// The allowed contents of every sector of an area.
#[derive(Debug)]
pub struct Checker {
    now: Moment,
    next_seq: u64,
    sectors: Vec<Vec<Candidate>>,
    /// The submission times of the reads in flight.
    reads: BTreeMap<Moment, ()>,
}

impl Checker {
    /// Creates an area of `sectors`, each with the content of write 0.
    #[must_use]
    pub fn new(sectors: u64) -> Self {
        let first = Candidate { seq: 0, change: Change::Write, completed: Some(0), obsolete: None };
        Self { now: 1, next_seq: 1, sectors: vec![vec![first]; sectors as usize], reads: BTreeMap::new() }
    }

    const fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    /// Records a change that is about to be submitted.
    pub fn submit_write(&mut self, sectors: Range<u64>, change: Change) -> Write {
        let submitted = self.tick();
        let seq = self.next_seq;
        self.next_seq += 1;
        let oldest_read = self.reads.first_key_value().map_or(submitted, |(&moment, ())| moment);
        for sector in sectors.clone() {
            let candidates = &mut self.sectors[sector as usize];
            // No read in flight can return a value that became obsolete before its submission.
            candidates.retain(|c| c.obsolete.is_none_or(|obsolete| obsolete > oldest_read));
            candidates.push(Candidate { seq, change, completed: None, obsolete: None });
        }
        Write { submitted, seq, change, sectors }
    }

    /// Records the completion of a change.
    pub fn complete_write(&mut self, write: &Write) {
        let now = self.tick();
        for sector in write.sectors() {
            for candidate in &mut self.sectors[sector as usize] {
                if candidate.seq == write.seq {
                    candidate.completed = Some(now);
                } else if write.change != Change::Discard && candidate.completed_before(write.submitted) {
                    candidate.obsolete.get_or_insert(now);
                }
            }
        }
    }

    /// Records a read that is about to be submitted.
    pub fn submit_read(&mut self, sectors: Range<u64>) -> Read {
        let submitted = self.tick();
        self.reads.insert(submitted, ());
        Read { submitted, sectors }
    }

    /// Records the completion of a read, with the contents of its buffer, sector by sector.
    ///
    /// # Errors
    /// The first content that the read must not return.
    pub fn complete_read(
        &mut self,
        read: &Read,
        contents: impl IntoIterator<Item = Content>,
    ) -> Result<(), WrongValue> {
        let now = self.tick();
        self.reads.remove(&read.submitted);
        for (sector, content) in read.sectors().zip(contents) {
            self.see(sector, content, read.submitted, now)?;
        }
        Ok(())
    }

    fn see(&mut self, sector: u64, content: Content, since: Moment, now: Moment) -> Result<(), WrongValue> {
        let candidates = &mut self.sectors[sector as usize];
        let may_see = |c: &Candidate| c.obsolete.is_none_or(|obsolete| obsolete > since);
        if !candidates.iter().any(|c| c.is(content) && may_see(c)) {
            let allowed = candidates.iter().filter(|c| may_see(c)).map(ToString::to_string).collect();
            return Err(WrongValue { sector, saw: content, allowed });
        }
        // At some moment since `since` the sector held this content: different values whose requests had completed before
        // are obsolete.
        for candidate in candidates.iter_mut().filter(|c| !c.is(content) && c.completed_before(since)) {
            candidate.obsolete.get_or_insert(now);
        }
        Ok(())
    }

    /// Checks a sector's content in the file, past the device, while no request is in flight.
    ///
    /// # Errors
    /// The sector has another content.
    pub fn check_at_rest(&mut self, sector: u64, content: Content) -> Result<(), WrongValue> {
        let now = self.tick();
        self.see(sector, content, now, now)
    }
}

#[cfg(test)]
mod tests;
