//! What a simulation of several shards did. Any context.

/// What a simulation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that ended.
    pub requests: u64,
    /// Writes in more than one shard.
    pub wide_writes: u64,
    /// Writes that were held back.
    pub held: u64,
    /// Snapshots that were taken.
    pub snapshots: u64,
    /// Clones that were made.
    pub clones: u64,
    /// Snapshots and clones that were deleted.
    pub deletions: u64,
    /// Times that the volume or a clone became larger.
    pub grown: u64,
    /// Times that one became smaller.
    pub shrunk: u64,
    /// Times that one was reverted to a snapshot.
    pub reverts: u64,
    /// Changes of a size and reverts that a crash has interrupted when some shards had made them.
    pub mixed: u64,
    /// Requests that were refused beyond the end of the volume.
    pub refused: u64,
    /// Slots in which a refused write may have left other parts, which were read.
    pub torn: u64,
    /// Reads of the volume while it was written and changed.
    pub looks: u64,
    /// Snapshots and clones that a crash has interrupted, and that are in all shards nevertheless.
    pub kept: u64,
    /// Snapshots and clones that a crash has interrupted when some shards had them, and that were deleted.
    pub undone: u64,
    /// Values that were compared.
    pub values: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Crashes.
    pub crashes: u64,
    /// Differs between two runs if they did different things.
    pub digest: u64,
}

impl Counts {
    /// Adds those of another simulation.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.wide_writes += other.wide_writes;
        self.held += other.held;
        self.snapshots += other.snapshots;
        self.clones += other.clones;
        self.deletions += other.deletions;
        self.grown += other.grown;
        self.shrunk += other.shrunk;
        self.reverts += other.reverts;
        self.mixed += other.mixed;
        self.refused += other.refused;
        self.torn += other.torn;
        self.looks += other.looks;
        self.kept += other.kept;
        self.undone += other.undone;
        self.values += other.values;
        self.operations += other.operations;
        self.crashes += other.crashes;
    }

    /// All of them, for the report.
    pub fn told(&self) -> String {
        [
            (self.requests, "requests"),
            (self.wide_writes, "writes in more than one shard"),
            (self.held, "writes held back"),
            (self.snapshots, "snapshots"),
            (self.clones, "clones"),
            (self.deletions, "deletions"),
            (self.grown, "growths"),
            (self.shrunk, "shrinks"),
            (self.reverts, "reverts"),
            (self.mixed, "sizes and reverts interrupted in some shards"),
            (self.refused, "requests refused beyond the end"),
            (self.torn, "slots with refused writes"),
            (self.looks, "reads under load"),
            (self.kept, "interrupted snapshots and clones kept"),
            (self.undone, "undone"),
            (self.values, "values compared"),
            (self.operations, "operations of the disk"),
            (self.crashes, "crashes"),
        ]
        .map(|(count, what)| format!("{count} {what}"))
        .join(", ")
    }
}
