//! Disks over NVMe/RDMA. The guest's kernel has RDMA over its network device; `arykd` runs in the guest, and shares disks with
//! the kernel of the same guest.

use anyhow::Result;

use super::{Case, Lab, Site, TIMEOUT};
use crate::Vm;
use crate::image::Kernel;

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("rdma/linux", linux), Case::new("rdma/hostile", hostile)]
}

/// Boots a guest with RDMA that runs a script with the daemon. `helpers.sh` of this directory has its functions.
fn run(site: &Site<'_>, script: &str) -> Result<()> {
    let lab = Lab { image: site.lab.image.beside(Kernel::Rdma)?, ..site.lab.clone() };
    let site = &Site { lab: &lab, directory: site.directory };
    let network = "-netdev user,id=net0 -device virtio-net-pci,netdev=net0,romfile=";
    let vm = Vm {
        memory_mib: 640,
        programs: vec![site.program("arykd"), site.program("aryk"), site.example("hostile_rdma")],
        arguments: network.split_whitespace().map(str::to_owned).collect(),
        ..Vm::with_disks(Vec::new())
    };
    let helpers = include_str!("rdma/helpers.sh");
    site.boot(&vm, &format!("{helpers}{script}"))?.finish(TIMEOUT).map(drop)
}

/// The kernel's initiator: discovery, verified I/O of all sizes, a file system, trims, a daemon that is killed under load, and a
/// target that ends while it is used.
fn linux(site: &Site<'_>) -> Result<()> {
    run(site, include_str!("rdma/linux.sh"))
}

/// A host that violates the protocol in all ways, beside the kernel's.
fn hostile(site: &Site<'_>) -> Result<()> {
    run(site, include_str!("rdma/hostile.sh"))
}
