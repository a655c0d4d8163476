//! What a request costs a daemon that shares a disk, and one that uses it, over TCP and over RDMA, in one guest, whose kernel has
//! RDMA over its network device.

use super::linux;
use crate::report::{Report, Section};
use crate::settings::Settings;
use anyhow::{Context, Result};
use aryk_guest_tests::cases::rdma::Cost;
use aryk_guest_tests::cases::{Lab, rdma};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const INTRO: &str = "Processor time of a request in one guest with two processors, of the daemon and of the whole guest: fio, the kernel's initiator, \
    both sides of the network, the daemons. *share*: the kernel's initiator uses a disk that the daemon shares. *use*: the daemon \
    uses it, and the kernel reaches that daemon over TCP. QEMU emulates the processors, and the kernel does RDMA in software (`rdma_rxe`) over \
    an emulated network device: **only the ratios mean something**, and nothing is said of a device's speed.";

/// The workloads' costs over TCP and over RDMA.
type Pairs<'a> = BTreeMap<(&'a str, &'a str), [Option<&'a Cost>; 2]>;

pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("nvmf/rdma") {
        return Ok(());
    }
    let bin = settings.arykd.parent().map(Path::to_owned).context("arykd is in no directory")?;
    let costs = rdma::costs(&Lab { image: linux::image(settings)?, bin, tests: PathBuf::new() })?;
    report.section(table(&costs)?);
    Ok(())
}

fn table(costs: &[Cost]) -> Result<Section> {
    let columns = [
        "the daemon",
        "workload",
        "µs of the daemon, TCP",
        "RDMA",
        "ratio",
        "µs of the guest, TCP",
        "RDMA",
        "ratio",
    ];
    let mut pairs = Pairs::new();
    for cost in costs {
        let (role, transport) = cost.transport.split_once('/').context("a transport without a role")?;
        let pair = pairs.entry((role, &cost.workload)).or_default();
        pair[usize::from(transport == "rdma")] = Some(cost);
    }
    let mut section = Section::new("RDMA beside TCP", INTRO, columns.map(str::to_owned).to_vec());
    for ((role, workload), pair) in pairs {
        let [Some(tcp), Some(rdma)] = pair else {
            anyhow::bail!("{role}, {workload}: one of both is missing")
        };
        let cells = |of: fn(&Cost) -> u64| {
            let [tcp, rdma] = [tcp, rdma].map(of);
            [tcp.to_string(), rdma.to_string(), format!("{:.2}", rdma as f64 / tcp as f64)]
        };
        let daemon = cells(|cost| cost.of_daemon_us);
        let guest = cells(|cost| cost.of_guest_us);
        section.row([role.to_owned(), workload.to_owned()].into_iter().chain(daemon).chain(guest).collect());
    }
    Ok(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(transport: &str, of_daemon_us: u64) -> Cost {
        Cost {
            transport: transport.to_owned(),
            workload: "randread 4k".to_owned(),
            of_daemon_us,
            of_guest_us: 4 * of_daemon_us,
        }
    }

    #[test]
    fn both_transports_of_a_workload_are_one_row() {
        let costs =
            [cost("share/tcp", 100), cost("share/rdma", 50), cost("use/tcp", 10), cost("use/rdma", 20)];
        let text = table(&costs).unwrap().markdown();
        assert!(text.contains("share") && text.contains("0.50") && text.contains("2.00"), "{text}");
        assert!(table(&costs[..1]).is_err());
    }
}
