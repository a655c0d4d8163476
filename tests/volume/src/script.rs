//! What a simulation does: a list of steps, made from a seed. A part of the list is a simulation too, so a failing list is made
//! shorter by leaving out steps.

use fastrand::Rng;

use crate::disk::{Crash, Faults};

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes; whether durably.
    Write(bool),
    /// Writes zeroes, or discards.
    Zero {
        /// Whether it may leave parts of blocks as they are.
        whole_blocks: bool,
        /// Whether durably.
        fua: bool,
    },
    /// Flushes.
    Flush,
}

/// One step. Numbers choose among what there is when the step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A request to a volume, or to a snapshot.
    Request {
        /// Which volume.
        volume: u32,
        /// Which part of the volume.
        spot: u32,
        /// Where in the part.
        at: u32,
        /// How long.
        units: u32,
        /// The operation.
        kind: Kind,
    },
    /// Writes most of a range, in pieces all over it.
    Scatter {
        /// Which volume.
        volume: u32,
        /// The places of the pieces.
        seed: u64,
    },
    /// Creates a volume as large as the pool has room for, and writes all of it.
    Fill {
        /// How much of the usable space it has.
        percent: u32,
        /// Whether its writes wait while the pool is full.
        waits: bool,
        /// Whether its space is reserved: then others may be written, too.
        is_thick: bool,
    },
    /// Writes anywhere in a volume.
    Overwrite {
        /// Which volume.
        volume: u32,
        /// The places of the writes.
        seed: u64,
    },
    /// Discards a whole volume.
    DiscardAll {
        /// Which volume.
        volume: u32,
    },
    /// Creates a volume.
    Create {
        /// Its size.
        mib: u32,
        /// Whether its blocks have 512 bytes.
        has_small_blocks: bool,
        /// Whether it begins with the content of a foreign disk.
        is_overlay: bool,
        /// Whether its writes wait while the pool is full.
        waits: bool,
        /// Whether its space is reserved.
        is_thick: bool,
    },
    /// Reserves space for a volume, or gives it up.
    SetThick {
        /// Which volume.
        volume: u32,
        /// Whether space is reserved.
        is_thick: bool,
    },
    /// Takes snapshots of some volumes at once.
    Snapshot {
        /// The first volume.
        volume: u32,
        /// How many.
        count: u32,
    },
    /// Creates a volume from a snapshot.
    Clone {
        /// Which snapshot.
        snapshot: u32,
    },
    /// Deletes a volume or a snapshot.
    Delete {
        /// Which.
        volume: u32,
    },
    /// Changes the size of a volume.
    Resize {
        /// Which.
        volume: u32,
        /// The new size.
        mib: u32,
    },
    /// Gives a volume or snapshot another name.
    Rename {
        /// Which.
        volume: u32,
    },
    /// Gives a volume the content of one of its snapshots.
    Revert {
        /// Which snapshot.
        snapshot: u32,
    },
    /// Gives a volume the content of another one, which ends: of one of its size, or of a new one.
    Adopt {
        /// Which volume.
        volume: u32,
    },
    /// Makes a volume independent of its base.
    Inflate {
        /// Which volume.
        volume: u32,
    },
    /// Compares a snapshot with its volume.
    Changed {
        /// Which snapshot.
        snapshot: u32,
    },
    /// Checks the pool.
    Check,
    /// Waits until everything has ended.
    Settle,
    /// Waits, and reads everything.
    Verify,
    /// A crash; then the pool is opened again.
    Crash(Crash),
    /// Rebuilds the pool on a copy of the disk without checkpoints.
    Rebuild,
    /// Makes the base disk larger.
    Grow,
    /// Changes what goes wrong from now on. After failed writes, the pool may be read-only until the next crash.
    Faults(Faults),
    /// Makes some sectors unreadable that were written.
    Lose {
        /// How many.
        sectors: u32,
    },
}

/// A step, and how many events of the disk follow before the next step.
pub type Paced = (Step, u32);

/// The settings of a simulation, apart from its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of segments.
    pub segments: u32,
    /// Bytes of the disk's block.
    pub block: u32,
    /// Requests in flight.
    pub depth: usize,
    /// Whether the disk's medium fails.
    pub has_faults: bool,
    /// Whether one volume fills the pool and is written all over. None of its writes may fail, or wait for good.
    pub is_full: bool,
}

/// The shape of a seed.
pub fn shape(seed: u64) -> Shape {
    let mut rng = Rng::with_seed(seed ^ 0x5a5a);
    let shape = Shape {
        segments: rng.u32(14..40),
        block: if rng.u32(..4) == 0 { 4096 } else { 512 },
        depth: [1, 4, 16, 64][rng.usize(..4)],
        has_faults: rng.u32(..3) == 0,
        is_full: false,
    };
    if rng.u32(..10) > 0 {
        return shape;
    }
    Shape { segments: rng.u32(14..22), has_faults: false, is_full: true, ..shape }
}

/// The steps of a seed.
pub fn steps(seed: u64, count: u32) -> Vec<Paced> {
    let mut rng = Rng::with_seed(seed);
    let Shape { has_faults, is_full, .. } = shape(seed);
    if is_full {
        return steps_of_a_full_pool(&mut rng, count);
    }
    // A pool that has become read-only does nothing until the next crash.
    let crashes = rng.u32(1..12) + if has_faults { 8 } else { 0 };
    let commands = rng.u32(5..80);
    let mut steps = vec![(create(&mut rng), 0), (create(&mut rng), 0)];
    for _ in 0..count {
        let step = match rng.u32(..1000) {
            n if n < crashes => Step::Crash(crash(&mut rng)),
            n if n < crashes.max(12) + commands => command(&mut rng),
            948..962 if has_faults => Step::Faults(faults(&mut rng)),
            962..970 if has_faults => Step::Lose { sectors: rng.u32(1..4) },
            975..985 => Step::Scatter { volume: rng.u32(..), seed: rng.u64(..) },
            990..993 => Step::Verify,
            993..996 => Step::Settle,
            996 => Step::Rebuild,
            _ => request(&mut rng),
        };
        let pace = match rng.u32(..20) {
            0..12 => 0,
            12..18 => rng.u32(..4),
            _ => rng.u32(..60),
        };
        steps.push((step, pace));
    }
    steps
}

/// Fewer steps than `count`: those that write a lot take as long as many others.
fn steps_of_a_full_pool(rng: &mut Rng, count: u32) -> Vec<Paced> {
    let is_thick = rng.bool();
    let percent = if is_thick { rng.u32(20..=95) } else { rng.u32(70..=100) };
    let mut steps = vec![(Step::Fill { percent, waits: rng.bool(), is_thick }, 0)];
    if is_thick {
        // Another volume takes all that it can get.
        let others = Step::Create {
            mib: 1000,
            has_small_blocks: rng.bool(),
            is_overlay: false,
            waits: false,
            is_thick: false,
        };
        steps.push((others, 0));
    }
    let volumes = 1 + u32::from(is_thick);
    for _ in 0..count / 10 {
        let step = match rng.u32(..20) {
            0 => Step::Crash(crash(rng)),
            1 => Step::Settle,
            2 => Step::Verify,
            3 => Step::Check,
            _ => Step::Overwrite { volume: rng.u32(..volumes), seed: rng.u64(..) },
        };
        steps.push((step, rng.u32(..60)));
    }
    steps
}

fn crash(rng: &mut Rng) -> Crash {
    match rng.u32(..8) {
        0..2 => Crash::Process,
        2 => Crash::PowerLosesAll,
        3 => Crash::PowerLosesNothing,
        _ => Crash::Power,
    }
}

fn create(rng: &mut Rng) -> Step {
    Step::Create {
        mib: rng.u32(1..70),
        has_small_blocks: rng.bool(),
        is_overlay: rng.u32(..6) == 0,
        waits: rng.bool(),
        is_thick: rng.u32(..4) == 0,
    }
}

fn faults(rng: &mut Rng) -> Faults {
    Faults {
        slow_ppm: rng.u32(..100_000),
        stuck_ppm: if rng.bool() { rng.u32(..1000) } else { 0 },
        read_error_ppm: if rng.bool() { rng.u32(..20_000) } else { 0 },
        write_error_ppm: match rng.u32(..4) {
            0 => rng.u32(..5000),
            1 => rng.u32(..300_000),
            _ => 0,
        },
        flush_error_ppm: if rng.u32(..8) == 0 { rng.u32(..50_000) } else { 0 },
        is_full: rng.u32(..6) == 0,
    }
}

fn request(rng: &mut Rng) -> Step {
    let kind = match rng.u32(..100) {
        0..25 => Kind::Read,
        25..80 => Kind::Write(rng.u32(..10) == 0),
        80..92 => Kind::Zero { whole_blocks: rng.bool(), fua: rng.u32(..10) == 0 },
        _ => Kind::Flush,
    };
    let units = match rng.u32(..10) {
        0..4 => rng.u32(1..9),
        4..8 => 8 * rng.u32(1..17),
        8 => 8 * rng.u32(1..65),
        _ => 8 * rng.u32(1..257),
    };
    Step::Request { volume: rng.u32(..), spot: rng.u32(..), at: rng.u32(..), units, kind }
}

fn command(rng: &mut Rng) -> Step {
    match rng.u32(..100) {
        0..8 => create(rng),
        8..38 => Step::Snapshot { volume: rng.u32(..), count: rng.u32(1..4) },
        38..46 => Step::Clone { snapshot: rng.u32(..) },
        46..66 => Step::Delete { volume: rng.u32(..) },
        66..72 => Step::Resize { volume: rng.u32(..), mib: rng.u32(1..70) },
        72..75 => Step::Rename { volume: rng.u32(..) },
        75..79 => Step::Revert { snapshot: rng.u32(..) },
        79..81 => Step::SetThick { volume: rng.u32(..), is_thick: rng.bool() },
        81..84 => Step::Inflate { volume: rng.u32(..) },
        84..88 => Step::Adopt { volume: rng.u32(..) },
        88..92 => Step::Changed { snapshot: rng.u32(..) },
        92..94 => Step::Grow,
        94..98 => Step::DiscardAll { volume: rng.u32(..) },
        _ => Step::Check,
    }
}
