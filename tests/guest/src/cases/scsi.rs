//! A guest with a SCSI controller: its disks come and go, and grow, while it works.

use anyhow::{Context, Result};

use super::{Case, PATIENCE, Site};
use crate::machine::Front;
use crate::{Disk, Machine};

/// Functions of the scripts here.
const TARGETS: &str = "
    # The block device of target $1, if it is there.
    lun() {
        for block in /sys/bus/scsi/devices/*:0:$1:0/block/sd*; do
            [ -e $block ] && echo /dev/${block##*/} && return
        done
        return 1
    }
    # Waits up to 20 s until a command succeeds.
    until_so() {
        n=0
        until \"$@\"; do
            n=$((n + 1))
            [ $n -lt 200 ] || { echo \"never: $*\" >&2; return 1; }
            sleep 0.1
        done
    }
    is_there() { lun $1 >/dev/null; }
    is_gone() { ! lun $1 >/dev/null; }
    has_sectors() { [ $(cat /sys/block/${1##*/}/size) = $2 ]; }
    verified() {
        fio --name=verified --filename=$1 --direct=1 --ioengine=io_uring --eta=never --rw=randwrite --bs=4k --iodepth=32 \\
            --thread --size=$2 --verify=crc32c --verify_fatal=1 >/tmp/fio 2>&1 || { cat /tmp/fio >&2; return 1; }
    }
";

/// Rounds of plugging and unplugging.
const ROUNDS: u32 = 5;
/// The same in the long form.
const ROUNDS_LONG: u32 = 50;

pub(super) fn cases(long: bool) -> Vec<Case> {
    let rounds = if long { ROUNDS_LONG } else { ROUNDS };
    let mut cases = Vec::new();
    for ring in ["split", "packed"] {
        cases.push(Case::new(format!("scsi/plug,{ring}"), move |site| plugged(site, ring, rounds)));
    }
    cases
}

/// One disk is written and verified all the while. Beside it another is plugged, used, unplugged under load; the first grows.
fn plugged(site: &Site<'_>, ring: &str, rounds: u32) -> Result<()> {
    let arykd = site.daemon(&["-m", "0x3"])?;
    site.file_disk(&arykd, "stays", "64M")?;
    site.file_disk(&arykd, "comes", "32M")?;
    let socket = arykd.attach("stays", &["--scsi", "--controller", "s0"])?;

    let script = format!(
        "{TARGETS}
        until_so is_there 0
        d=$(lun 0)
        (until [ -e /tmp/enough ]; do verified $d 16M; done; touch /tmp/well) &
        for round in $(seq {rounds}); do
            echo plug
            until_so is_there 1
            e=$(lun 1)
            verified $e 4M
            # It goes under load, whose errors are its own.
            fio --name=load --filename=$e --direct=1 --ioengine=io_uring --eta=never --rw=randwrite --bs=4k --iodepth=32 \\
                --size=32M --time_based --runtime=100 >/dev/null 2>&1 &
            load=$!
            until_so grep -q '[1-9]' /sys/block/${{e##*/}}/inflight
            echo unplug
            until_so is_gone 1
            wait $load || true
        done
        echo grow
        until_so has_sectors $d 196608
        touch /tmp/enough
        until_so test -e /tmp/well
        "
    );
    let properties = format!("packed={}", if ring == "packed" { "on" } else { "off" });
    let controller = Disk { front: Front::Scsi, properties, ..Disk::new(&socket, 2) };
    let mut guest = site.boot(&Machine::with_disks(vec![controller]), &script)?;
    for round in 0..rounds {
        guest.wait_line("plug", PATIENCE).with_context(|| format!("round {round}"))?;
        arykd.attach("comes", &["--scsi", "--controller", "s0", "--target", "1"])?;
        guest.wait_line("unplug", PATIENCE).with_context(|| format!("round {round}"))?;
        arykd.aryk(&["detach", "comes"])?;
    }
    guest.wait_line("grow", PATIENCE)?;
    arykd.aryk(&["disk", "resize", "stays", "96M"])?;
    guest.finish(PATIENCE)?;
    arykd.stop()
}
