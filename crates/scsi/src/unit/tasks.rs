//! The commands of a channel that are in flight, by their submitter's tags. Reactor context.

use super::jobs::Job;
use aryk_bdev::{Lba, Op, Status};

/// Whether and why a command was aborted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AbortCause {
    /// The command was not aborted.
    None,
    /// The command was aborted.
    Aborted,
    /// Other initiators' reservations deny the command.
    Refused,
}

/// A command in flight.
pub(super) struct Task {
    /// The initiator's tag.
    pub name: u64,
    pub lba: Lba,
    /// The state of a command that takes more than one request.
    pub job: Option<Box<Job>>,
    pub moved: u32,
    pub op: Op,
    /// The status with which the command will end.
    pub status: Status,
    pub abort_cause: AbortCause,
    pub runs: bool,
}

impl Task {
    const NONE: Self = Self {
        name: 0,
        lba: Lba::ZERO,
        job: None,
        moved: 0,
        op: Op::Read,
        status: Status::Ok,
        abort_cause: AbortCause::None,
        runs: false,
    };
}

// Two tasks fit in one cache line.
const _: () = assert!(size_of::<Task>() == 32);

/// The table of commands. The submitter chooses the tags, so that no search is needed.
pub(super) struct Tasks {
    all: Box<[Task]>,
    len: u32,
}

impl Tasks {
    pub fn new(depth: u16) -> Self {
        Self { all: (0..depth).map(|_| Task::NONE).collect(), len: 0 }
    }

    /// Capacity of the table: tags are below this number.
    pub fn depth(&self) -> usize {
        self.all.len()
    }

    /// Number of commands in the table.
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Adds a command.
    ///
    /// # Panics
    /// If the tag is out of range, or in use.
    // Always inlined, since a task passed as an argument would be stored twice.
    #[inline(always)]
    pub fn insert(&mut self, tag: u16, task: Task) {
        let place = &mut self.all[usize::from(tag)];
        assert!(!place.runs && place.job.is_none(), "tag {tag} is in use");
        *place = task;
        self.len += 1;
    }

    /// The command with a tag, for which an event has arrived.
    ///
    /// # Panics
    /// If the tag is not in use: each request completes once.
    #[inline]
    pub fn get(&mut self, tag: u16) -> &mut Task {
        let task = &mut self.all[usize::from(tag)];
        assert!(task.runs, "tag {tag} is not in use");
        task
    }

    /// Removes a command, whose job has ended.
    ///
    /// # Panics
    /// If the tag is not in use.
    #[inline]
    pub fn remove(&mut self, tag: u16) {
        self.get(tag).runs = false;
        self.len -= 1;
    }

    /// All commands in flight, with their tags.
    pub fn iter(&mut self) -> impl Iterator<Item = (u16, &mut Task)> {
        (0..).zip(&mut self.all).filter(|(_, task)| task.runs)
    }

    /// As [`Tasks::iter`], to read.
    pub fn running(&self) -> impl Iterator<Item = (u16, &Task)> {
        (0..).zip(&self.all).filter(|(_, task)| task.runs)
    }
}
