//! Reads of a pool that was just opened: its index and its checksums are not in memory.

use super::{Pool, base};
use crate::frontend::FrontEnd;
use crate::report::{Report, Section, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::Result;

const INTRO: &str = "4 KiB random reads, one at a time, of a volume over a file: it was filled, a fourth of its blocks were written again at \
    random, and the daemon was started again, so that the pool's cache was empty. Each row is of the reads after the row above.";

/// Requests of each row.
const ROWS: [u64; 4] = [100, 1_000, 10_000, 100_000];

/// Measures the case, if it is selected.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("volume/cold") {
        return Ok(());
    }
    let columns = ["reads", "K requests/s", "reads of data", "reads of the index", "index pages looked at"];
    let mut section = Section::new("Cold reads, per request", INTRO, columns.map(str::to_owned).to_vec());
    let (dir, base) = (settings.sockets.path().join("cold"), base(settings, "cold", "file")?);
    let pool = Pool::start(settings, &base, &dir, 0.5)?;
    let mut writes = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(100, 4 << 10, 32))?;
    writes.count(super::pool_bytes(settings) / 2 / 4 / 4096)?;
    drop(writes);
    pool.back_end.process.end()?;
    let mut pool = Pool::reopen(settings, &base, &dir)?;
    let mut reads = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(0, 4 << 10, 1))?;
    for count in ROWS {
        let before = pool.counters()?;
        let closed = reads.count(count)?;
        let after = pool.counters()?;
        let per = |all: f64| number(all / closed.requests as f64);
        section.row(vec![
            count.to_string(),
            number(closed.rate() / 1e3),
            per((after.data_read - before.data_read) / 4096.0),
            per((after.index_read - before.index_read) / 4096.0),
            per(after.lookups - before.lookups),
        ]);
    }
    report.section(section);
    Ok(())
}
