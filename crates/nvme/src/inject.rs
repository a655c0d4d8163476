//! Error statuses that an operator injects into commands, to see what a failing drive would cause. Any context.
//!
//! Each owner of a queue looks here before and after it submits a command, if there are injections at all. A status counts as
//! the controller's answer from then on.

use crate::spec::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An error for the commands with one opcode.
#[derive(Debug)]
pub struct Injection {
    /// The opcode.
    pub opcode: u8,
    /// The status of the commands: an error.
    pub status: Status,
    /// Which commands the controller gets.
    pub how: How,
    /// Commands for which this still holds.
    left: AtomicU32,
    /// Counts the commands that got the status.
    total: Arc<AtomicU64>,
}

/// What the controller has to do with a command that gets an injected status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The controller executes the command; the status replaces its answer.
    Replace,
    /// The controller does not get the command; the status comes after so many nanoseconds.
    Withhold(u64),
}

impl Injection {
    /// An injection into `times` commands, which `total` counts.
    pub const fn new(opcode: u8, status: Status, how: How, times: u32, total: Arc<AtomicU64>) -> Self {
        Self { opcode, status, how, left: AtomicU32::new(times), total }
    }

    /// Commands for which this still holds.
    pub fn left(&self) -> u32 {
        self.left.load(Ordering::Relaxed)
    }

    /// Takes one command; `false` if there have been enough. The queues of several threads may share an injection.
    fn take(&self) -> bool {
        let took =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        self.total.fetch_add(took.into(), Ordering::Relaxed);
        took
    }
}

/// The injections into the commands of a queue: at most one for each opcode.
#[derive(Clone, Debug, Default)]
pub struct Injections(Vec<Arc<Injection>>);

impl Injections {
    /// Adds an injection, in place of the one with the same opcode.
    pub fn add(&mut self, injection: Arc<Injection>) {
        self.remove(injection.opcode);
        self.0.push(injection);
    }

    /// Ends the injection into commands with this opcode.
    pub fn remove(&mut self, opcode: u8) {
        self.0.retain(|injection| injection.opcode != opcode);
    }

    /// Whether no command gets an injected status.
    pub fn are_over(&self) -> bool {
        self.0.iter().all(|injection| injection.left() == 0)
    }

    /// The injections.
    pub fn list(&self) -> &[Arc<Injection>] {
        &self.0
    }

    /// Whether a command that is about to be submitted is withheld: its status, and the nanoseconds until it comes.
    pub fn withhold(&self, opcode: u8) -> Option<(Status, u64)> {
        self.0.iter().find_map(|injection| match injection.how {
            How::Withhold(after) if injection.opcode == opcode && injection.take() => {
                Some((injection.status, after))
            }
            _ => None,
        })
    }

    /// The status that replaces the controller's answer to a command that was submitted.
    pub fn replace(&self, opcode: u8) -> Option<Status> {
        let mut of_opcode = self.0.iter().filter(|one| one.opcode == opcode && one.how == How::Replace);
        of_opcode.find_map(|injection| injection.take().then_some(injection.status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::status::Code;

    #[test]
    fn an_injection_holds_for_its_opcode_and_its_number_of_commands() {
        let total: Arc<AtomicU64> = Arc::default();
        let error = Status::new(Code::WRITE_FAULT.0);
        let new =
            |opcode, how, times| Arc::new(Injection::new(opcode, error, how, times, Arc::clone(&total)));
        let mut injections = Injections::default();
        assert!(injections.are_over());
        injections.add(new(1, How::Replace, 2));
        injections.add(new(2, How::Withhold(7), 1));
        assert_eq!(
            (injections.withhold(1), injections.replace(2), injections.replace(3)),
            (None, None, None)
        );
        assert_eq!((injections.replace(1), injections.withhold(2)), (Some(error), Some((error, 7))));
        assert_eq!((injections.replace(1), injections.withhold(2)), (Some(error), None));
        assert_eq!((injections.replace(1), total.load(Ordering::Relaxed)), (None, 3));
        assert!(injections.are_over());
        // Another one with the same opcode takes its place.
        injections.add(new(1, How::Replace, 1));
        assert_eq!((injections.list().len(), injections.are_over()), (2, false));
        injections.remove(1);
        assert_eq!((injections.list().len(), injections.replace(1)), (1, None));
    }
}
