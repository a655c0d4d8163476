//! Workloads: sizes, directions and depths of requests, and their random source.

/// A stream of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Share of writes, in percent; the rest are reads.
    pub write_percent: u32,
    /// Bytes in a request.
    pub block: u32,
    /// Requests in flight; in an open loop, the upper bound.
    pub depth: usize,
    /// Sequential through the disk, instead of uniformly at random.
    pub sequential: bool,
}

impl Workload {
    /// Requests at random places.
    pub const fn random(write_percent: u32, block: u32, depth: usize) -> Self {
        Self { write_percent, block, depth, sequential: false }
    }

    /// Sequential requests.
    pub const fn sequential(write_percent: u32, block: u32, depth: usize) -> Self {
        Self { write_percent, block, depth, sequential: true }
    }

    /// The name, such as `randread-4k/qd32`.
    pub fn name(&self) -> String {
        format!("{}-{}k/qd{}", self.rw(), self.block >> 10, self.depth)
    }

    /// fio's name for the direction and order.
    pub const fn rw(&self) -> &'static str {
        match (self.sequential, self.write_percent) {
            (false, 0) => "randread",
            (false, 100) => "randwrite",
            (false, _) => "randrw",
            (true, 0) => "read",
            (true, 100) => "write",
            (true, _) => "rw",
        }
    }
}

/// All closed-loop workloads.
pub fn all() -> Vec<Workload> {
    let mut all = Vec::new();
    for write_percent in [0, 100, 30] {
        all.extend([1, 32, 128].map(|depth| Workload::random(write_percent, 4 << 10, depth)));
    }
    all.extend([0, 100].map(|write_percent| Workload::sequential(write_percent, 128 << 10, 8)));
    all
}
