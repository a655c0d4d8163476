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
    uses it, and the kernel reaches that daemon over TCP. *vm*: the daemon uses it for a VM, a process; *pinned*: the target accesses the VM's memory \
    by itself (`--dma pin`). QEMU emulates the processors, and the kernel does RDMA in software (`rdma_rxe`) over \
    an emulated network device: **only the ratios mean something**, and nothing is said of a device's speed.";

/// The transports, in the order of the table's columns.
const TRANSPORTS: [&str; 3] = ["tcp", "rdma", "rdma-pin"];

/// The costs of a workload over each transport.
type Costs<'a> = BTreeMap<(&'a str, &'a str), [Option<&'a Cost>; 3]>;

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
    let of = |what: &str| {
        [format!("µs of the {what}, TCP"), "RDMA".into(), "ratio".into(), "pinned".into(), "ratio".into()]
    };
    let columns =
        ["the daemon".to_owned(), "workload".to_owned()].into_iter().chain(of("daemon")).chain(of("guest"));
    let mut rows = Costs::new();
    for cost in costs {
        let (role, transport) = cost.transport.split_once('/').context("a transport without a role")?;
        let place = TRANSPORTS.iter().position(|known| *known == transport);
        let place = place.with_context(|| format!("the transport {transport}"))?;
        rows.entry((role, &cost.workload)).or_default()[place] = Some(cost);
    }
    let mut section = Section::new("RDMA beside TCP", INTRO, columns.collect());
    for ((role, workload), [tcp, rdma, pinned]) in rows {
        let (Some(tcp), Some(rdma)) = (tcp, rdma) else {
            anyhow::bail!("{role}, {workload}: one of both is missing")
        };
        let cells = |of: fn(&Cost) -> u64| {
            let beside = |other: Option<&Cost>| match other.map(of) {
                Some(us) => [us.to_string(), format!("{:.2}", us as f64 / of(tcp) as f64)],
                None => ["–".to_owned(), "–".to_owned()],
            };
            [of(tcp).to_string()].into_iter().chain(beside(Some(rdma))).chain(beside(pinned))
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
    fn all_transports_of_a_workload_are_one_row() {
        let vm = [cost("vm/tcp", 100), cost("vm/rdma", 50), cost("vm/rdma-pin", 25)];
        let text = table(&vm).unwrap().markdown();
        let row = text.lines().last().unwrap().replace(' ', "");
        assert_eq!(row, "|vm|randread4k|100|50|0.50|25|0.25|400|200|0.50|100|0.25|");
        let share = [cost("share/tcp", 10), cost("share/rdma", 20)];
        let text = table(&share).unwrap().markdown();
        assert!(text.contains("2.00") && text.contains("–"), "{text}");
        assert!(table(&share[..1]).is_err());
        assert!(table(&[cost("share/udp", 1)]).is_err());
    }
}
