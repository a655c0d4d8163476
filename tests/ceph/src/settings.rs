//! The configuration file of a cluster whose daemons, data and logs are in one directory. Test tool, any thread.

use std::path::Path;

use crate::cluster::{Kind, Store};

/// Settings of every cluster: one host, little memory, and no wait that is there to save work on a large cluster.
///
/// - A monitor accepts pools with one copy, and does not warn about the file system of its data.
/// - One OSD's report that another one is gone is enough.
/// - Copies of an object may be on OSDs of the same host.
/// - A change of the monitor's maps is proposed at once, instead of after a second.
/// - Nothing caches data in the client, so each request of a test reaches the OSDs.
const GENERAL: &str = "\
mon allow pool size one = true
mon allow pool delete = true
mon data avail warn = 1
mon data avail crit = 1
mon max pg per osd = 1000
mon osd min down reporters = 1
mon osd reporter subtree level = osd
mon warn on pool no redundancy = false
auth allow insecure global id reclaim = false
paxos propose interval = 0.05
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush initial weight = 1
osd max object name len = 256
osd max object namespace len = 64
osd op num shards = 2
osd op num threads per shard = 1
ms async op threads = 2
rbd cache = false
rbd default pool = rbd
";

/// Bytes that an OSD in memory reports as its capacity, and the size of the sparse file of an OSD on a file.
const OSD_BYTES: u64 = 4 << 30;
/// Memory that an OSD on a file keeps as its cache.
const OSD_MEMORY: u64 = 1 << 30;

/// The text of the file. `monitor` is an IPv4 address with a port; OSDs listen at the same address.
pub(crate) fn text(directory: &Path, fsid: &str, monitor: &str, kind: &Kind) -> String {
    let address = monitor.split(':').next().unwrap_or_default();
    let directory = directory.display();
    let method = if kind.authenticated { "cephx" } else { "none" };
    let store = match kind.store {
        Store::Memory => format!("osd objectstore = memstore\nmemstore device bytes = {OSD_BYTES}\n"),
        Store::File => format!(
            "osd objectstore = bluestore\nbluestore block size = {OSD_BYTES}\nosd memory target = {OSD_MEMORY}\n"
        ),
    };
    let copies = kind.copies;
    // Objects of an OSD that is gone are read from the others after 2 s instead of 16 s. An OSD without others that was
    // stopped for longer than its lease does not get a new one, and would read no more: its lease is a minute.
    let lease = if copies > 1 { "0.1" } else { "3" };
    format!(
        "[global]\n\
         fsid = {fsid}\n\
         mon host = [v2:{monitor}]\n\
         auth cluster required = {method}\n\
         auth service required = {method}\n\
         auth client required = {method}\n\
         {GENERAL}\
         osd pool default size = {copies}\n\
         osd pool default read lease ratio = {lease}\n\
         keyring = {directory}/keyring\n\
         run dir = {directory}\n\
         admin socket = {directory}/$name.asok\n\
         log file = {directory}/$name.log\n\
         mon cluster log file = {directory}/cluster.log\n\
         crash dir = {directory}\n\
         \n[mon]\n\
         mon data = {directory}/mon.$id\n\
         \n[osd]\n\
         osd data = {directory}/osd.$id\n\
         public addr = {address}\n\
         cluster addr = {address}\n\
         {store}\
         \n[client]\n\
         log file =\n\
         admin socket =\n"
    )
}
