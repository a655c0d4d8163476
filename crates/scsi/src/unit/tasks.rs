//! The commands of a channel that are in flight, by their submitter's tags. Reactor context.

use super::jobs::Job;
use aryk_bdev::{Op, Status};

/// Why nobody waits for a command any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GivenUp {
    /// It is waited for.
    No,
    /// It was aborted.
    Aborted,
    /// Others' reservations do not let it.
    Refused,
}

/// A command in flight.
pub(super) struct Task {
    /// The initiator's tag.
    pub name: u64,
    pub lba: u64,
    /// What there is to it besides one request.
    pub job: Option<Box<Job>>,
    pub moved: u32,
    pub op: Op,
    /// How it will have ended.
    pub status: Status,
    pub given_up: GivenUp,
    pub runs: bool,
}

impl Task {
    const NONE: Self = Self {
        name: 0,
        lba: 0,
        job: None,
        moved: 0,
        op: Op::Read,
        status: Status::Ok,
        given_up: GivenUp::No,
        runs: false,
    };
}

// Two to a cache line.
const _: () = assert!(size_of::<Task>() == 32);

/// The table. Its places are named by whoever submits, so that there is nothing to look for.
pub(super) struct Tasks {
    all: Box<[Task]>,
    len: u32,
}

impl Tasks {
    pub fn new(depth: u16) -> Self {
        Self { all: (0..depth).map(|_| Task::NONE).collect(), len: 0 }
    }

    /// Commands that it has room for: tags are below.
    pub fn depth(&self) -> usize {
        self.all.len()
    }

    /// Commands in it.
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Notes that a command runs.
    ///
    /// # Panics
    /// If there is no such tag, or something runs with it.
    // Always, as a task that is handed over would be stored twice.
    #[inline(always)]
    pub fn insert(&mut self, tag: u16, task: Task) {
        let place = &mut self.all[usize::from(tag)];
        assert!(!place.runs && place.job.is_none(), "tag {tag} is in use");
        *place = task;
        self.len += 1;
    }

    /// The command with a tag, to which something has happened.
    ///
    /// # Panics
    /// If there is none: each request completes once.
    #[inline]
    pub fn get(&mut self, tag: u16) -> &mut Task {
        let task = &mut self.all[usize::from(tag)];
        assert!(task.runs, "nothing runs with tag {tag}");
        task
    }

    /// Forgets a command, whose job is over.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn remove(&mut self, tag: u16) {
        self.get(tag).runs = false;
        self.len -= 1;
    }

    /// All that run, and their tags.
    pub fn iter(&mut self) -> impl Iterator<Item = (u16, &mut Task)> {
        (0..).zip(&mut self.all).filter(|(_, task)| task.runs)
    }
}
