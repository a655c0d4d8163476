//! Disks over NVMe/RDMA. The guest's kernel has RDMA over its network device; `arykd` runs in the guest, and shares disks with
//! the kernel of the same guest, or uses disks that the kernel or another `arykd` of the same guest shares.

use anyhow::{Context, Result};

use super::{Case, Lab, Site, TIMEOUT, with_site};
use crate::Vm;
use crate::image::Kernel;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("rdma/linux", linux),
        Case::new("rdma/hostile", hostile),
        Case::new("rdma/shared", shared),
        Case::new("rdma/daemons", daemons),
        Case::new("rdma/nvmet", nvmet),
        Case::new("rdma/direct", direct),
        Case::new("rdma/direct-nvmet", direct_nvmet),
        Case::new("rdma/target", target),
        Case::new("rdma/fence", fence),
        Case::new("rdma/paths", paths),
        Case::new("rdma/far", far),
        Case::new("rdma/down", down),
    ]
}

/// Functions for a daemon that uses disks of others.
const USER: &str = include_str!("rdma/user.sh");
/// The kernel's target.
const KERNEL: &str = include_str!("rdma/kernel.sh");

/// Runs a script with the daemon in a guest with RDMA, which may also run these examples. `helpers.sh` of this directory has its
/// functions. Returns the lines that the script prints.
fn run(site: &Site<'_>, examples: &[&str], script: &str) -> Result<Vec<String>> {
    let lab = Lab { image: site.lab.image.beside(Kernel::Rdma)?, ..site.lab.clone() };
    let site = &Site { lab: &lab, directory: site.directory };
    let network = "-netdev user,id=net0 -device virtio-net-pci,netdev=net0,romfile=";
    let examples = examples.iter().map(|name| site.example(name));
    let vm = Vm {
        memory_mib: 640,
        programs: ["arykd", "aryk"].into_iter().map(|name| site.program(name)).chain(examples).collect(),
        arguments: network.split_whitespace().map(str::to_owned).collect(),
        ..Vm::with_disks(Vec::new())
    };
    let helpers = include_str!("rdma/helpers.sh");
    Ok(site.boot(&vm, &format!("{helpers}{script}"))?.finish(TIMEOUT)?.lines)
}

/// The kernel's initiator: discovery, verified I/O of all sizes, a file system under load, trims, a daemon that is killed, and a
/// listener that goes.
fn linux(site: &Site<'_>) -> Result<()> {
    run(site, &[], include_str!("rdma/linux.sh")).map(drop)
}

/// A host that violates the protocol in all ways, beside the kernel's.
fn hostile(site: &Site<'_>) -> Result<()> {
    run(site, &["hostile_rdma"], include_str!("rdma/hostile.sh")).map(drop)
}

/// The same with receives that all queues share, and with queues that move.
fn shared(site: &Site<'_>) -> Result<()> {
    run(site, &["hostile_rdma"], include_str!("rdma/shared.sh")).map(drop)
}

/// Two daemons: one shares a disk, which the other one uses under load, while either is killed and starts again.
fn daemons(site: &Site<'_>) -> Result<()> {
    run(site, &[], &format!("{USER}{}", include_str!("rdma/daemons.sh"))).map(drop)
}

/// A disk of the kernel's target, which the daemon uses while the target ends its connections.
fn nvmet(site: &Site<'_>) -> Result<()> {
    run(site, &[], &format!("{USER}{KERNEL}{}", include_str!("rdma/nvmet.sh"))).map(drop)
}

/// Two daemons: the target accesses the memory of a VM by itself, while its connections end and it is killed.
fn direct(site: &Site<'_>) -> Result<()> {
    run(site, &[], &format!("{USER}{}", include_str!("rdma/direct.sh"))).map(drop)
}

/// The same with the kernel's target, which ends its connections.
fn direct_nvmet(site: &Site<'_>) -> Result<()> {
    run(site, &[], &format!("{USER}{KERNEL}{}", include_str!("rdma/direct_nvmet.sh"))).map(drop)
}

/// A target that violates the protocol in all ways and reaches for memory, beside one that does not.
fn target(site: &Site<'_>) -> Result<()> {
    run(site, &["hostile_rdma_target"], &format!("{USER}{}", include_str!("rdma/target.sh"))).map(drop)
}

/// Two hosts of the kernel, which fence each other by reservations.
fn fence(site: &Site<'_>) -> Result<()> {
    run(site, &[], include_str!("rdma/fence.sh")).map(drop)
}

/// The kernel's initiator, with access by paths (ANA) that changes, and queues that move between reactors, under verified load.
fn paths(site: &Site<'_>) -> Result<()> {
    run(site, &[], include_str!("rdma/paths.sh")).map(drop)
}

/// The same between two daemons, and fused operations.
fn far(site: &Site<'_>) -> Result<()> {
    run(site, &["hostile_rdma"], &format!("{USER}{}", include_str!("rdma/far.sh"))).map(drop)
}

/// Two daemons whose network goes down under load.
fn down(site: &Site<'_>) -> Result<()> {
    run(site, &[], &format!("{USER}{}", include_str!("rdma/down.sh"))).map(drop)
}

/// What the requests of a workload cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// What the daemon does, and the transport: `share/tcp`, `use/rdma`.
    pub transport: String,
    /// The workload, as fio names it, and the bytes of a request.
    pub workload: String,
    /// Microseconds of processor time that a request costs the daemon.
    pub of_daemon_us: u64,
    /// Microseconds that a request costs the whole guest: host, network and target.
    pub of_guest_us: u64,
}

/// Measures requests over TCP and over RDMA in one guest: the daemon that shares a disk, and one that uses it.
///
/// # Errors
/// The guest's script fails.
pub fn costs(lab: &Lab) -> Result<Vec<Cost>> {
    let lines = with_site(lab, |site| run(site, &[], &format!("{USER}{}", include_str!("rdma/cost.sh"))))?;
    lines.iter().filter_map(|line| line.strip_prefix("cost ")).map(parse).collect()
}

/// A line such as `share/tcp randread 4k 100 400`.
fn parse(line: &str) -> Result<Cost> {
    let words: Vec<&str> = line.split(' ').collect();
    let &[transport, workload, size, of_daemon, of_guest] = &words[..] else { anyhow::bail!("{line:?}") };
    let number = |text: &str| text.parse().with_context(|| format!("{line:?}"));
    Ok(Cost {
        transport: transport.to_owned(),
        workload: format!("{workload} {size}"),
        of_daemon_us: number(of_daemon)?,
        of_guest_us: number(of_guest)?,
    })
}
