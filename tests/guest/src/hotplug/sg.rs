//! Responses of disks to sg3-utils in a guest, command by command: the exit status, and parts of the output. One thread.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::bench::{Bench, CONTROLLER, DISK_MIB};
use crate::cases::{Site, TIMEOUT};
use crate::vm::Front;
use crate::{Disk, Vm};

/// Exit codes of sg3-utils, beside 0.
const ILLEGAL_REQUEST: i32 = 5;
const UNIT_ATTENTION: i32 = 6;
const INVALID_OPCODE: i32 = 9;
const MISCOMPARE: i32 = 14;
const LBA_OUT_OF_RANGE: i32 = 22;

/// A command line, its expected status, and strings in its expected output.
struct Step {
    command: &'static str,
    status: i32,
    says: &'static [&'static str],
}

const fn step(command: &'static str, status: i32, says: &'static [&'static str]) -> Step {
    Step { command, status, says }
}

/// Prepares the guest for the steps. Blocks are of 512 bytes.
const PREPARE: &str = r#"
    for block in /sys/bus/scsi/devices/*:0:0:0/block/sd*; do d=/dev/${block##*/}; done
    yes one | head -c 512 >/tmp/one
    yes two | head -c 512 >/tmp/two
    cat /tmp/one /tmp/two >/tmp/one-two
    yes all | head -c 1048576 >/tmp/all
    # Writes the beginning, as it is before each step that changes it.
    fill() { dd if=/tmp/all of=$d bs=64k oflag=direct 2>/dev/null; }
    # Whether blocks from $1 on, $2 in number, are all as the file $3 is.
    are() {
        dd if=$d bs=512 skip=$1 count=$2 iflag=direct of=/tmp/read 2>/dev/null
        for _ in $(seq $2); do cat $3; done | cmp - /tmp/read
    }
    head -c 512 /dev/zero >/tmp/zeroes
    head -c 512 /tmp/all >/tmp/block
"#;

const IDENTITY: &[Step] = &[
    step(
        "sg_inq $d",
        0,
        &["Vendor identification: ARYK", "Product identification: DISK", "PDT=0", "[SPC-4]", "CmdQue=1"],
    ),
    step("sg_inq --page=0x00 $d", 0, &["0x0", "0x80", "0x83", "0xb0", "0xb1", "0xb2"]),
    step("sg_inq --page=0x80 $d", 0, &["Unit serial number: @SERIAL@"]),
    step("sg_inq --page=0x83 $d", 0, &["NAA 3", "[0x@NAA@]", "vendor id: ARYK", "@SERIAL@"]),
    step(
        "sg_vpd --page=0xb0 $d",
        0,
        &[
            "Maximum compare and write length: 128 blocks",
            "Maximum unmap LBA count: 8388608",
            "Maximum unmap block descriptor count: 256",
            "Maximum write same length: 0x800000 blocks",
        ],
    ),
    step("sg_vpd --page=0xb1 $d", 0, &["Non-rotating medium"]),
    step(
        "sg_vpd --page=0xb2 $d",
        0,
        &[
            "Unmap command supported (LBPU): 1",
            "Write same (16) with unmap bit supported (LBPWS): 1",
            "Write same (10) with unmap bit supported (LBPWS10): 1",
            "thin provisioned",
        ],
    ),
    step("sg_raw -r 96 $d 12 01 b7 00 60 00", ILLEGAL_REQUEST, &["Invalid field in cdb"]),
    step("sg_readcap $d", 0, &["Last LBA=32767", "Logical block length=512 bytes"]),
    step("sg_readcap --16 $d", 0, &["Number of logical blocks=32768", "lbpme=1", "prot_en=0"]),
    step("sg_luns $d", 0, &["Lun list length = 8", "0000000000000000"]),
    step("sg_luns --select=1 $d", 0, &["Lun list length = 0"]),
    step(
        "sg_opcodes $d",
        0,
        &["Read(10)", "Write(16)", "Compare and write", "Unmap", "Persistent reserve out, preempt"],
    ),
    step("sg_opcodes --opcode=0x89 $d", 0, &["Opcode=0x89", "conforming to SCSI standard", "89 18 ff ff"]),
    step("sg_opcodes --opcode=0xc1 $d", 0, &["NOT supported"]),
    step("sg_modes --all $d", 0, &["Caching", "Control", "Informational exceptions"]),
    step("sg_modes --six --page=8 $d", 0, &["Caching", "00     08 12 04"]),
    step("sg_modes --page=1 $d", ILLEGAL_REQUEST, &[]),
];

const CONDITION: &[Step] = &[
    step("sg_turs --num=20 $d", 0, &["Completed 20 Test Unit Ready commands with 0 errors"]),
    step("sg_requests $d", 0, &["No Sense"]),
    step("sg_reset -N --device $d && dmesg | tail -n 1", 0, &["device reset"]),
    step("sg_turs $d", UNIT_ATTENTION, &["Unit Attention", "Bus device reset function occurred"]),
    step("sg_turs $d", 0, &[]),
    step("sg_start --stop $d", 0, &[]),
    step("sg_start --start $d", 0, &[]),
    step("sg_sync $d", 0, &[]),
    step("sg_sync --16 --lba=8 --count=8 $d", 0, &[]),
    step("sg_sync --lba=40000 --count=8 $d", LBA_OUT_OF_RANGE, &[]),
    step(
        "sg_raw $d ff 00 00 00 00 00",
        INVALID_OPCODE,
        &["Illegal Request", "Invalid command operation code"],
    ),
    step(
        "sg_raw -r 512 $d 28 00 00 00 80 00 00 00 01 00",
        LBA_OUT_OF_RANGE,
        &["Illegal Request", "Logical block address out of range"],
    ),
];

const BLOCKS: &[Step] = &[
    step("sg_write_same --in=/tmp/one --lba=16 --num=32 $d && are 16 32 /tmp/one", 0, &[]),
    step("are 0 16 /tmp/block && are 48 100 /tmp/block", 0, &[]),
    step(
        "sg_write_same --16 --in=/tmp/two --lba=32 --num=8 $d && are 32 8 /tmp/two && are 40 8 /tmp/one",
        0,
        &[],
    ),
    step("sg_write_same --in=/tmp/one --lba=32760 --num=9 $d", LBA_OUT_OF_RANGE, &[]),
    step("sg_write_same --16 --ndob --lba=16 --num=32 $d && are 16 32 /tmp/zeroes", 0, &[]),
    step(
        "fill && sg_write_same --unmap --in=/tmp/zeroes --lba=64 --num=64 $d && are 64 64 /tmp/zeroes",
        0,
        &[],
    ),
    step("fill && sg_unmap --force --lba=128,512 --num=128,8 $d", 0, &[]),
    step(
        "are 128 128 /tmp/zeroes && are 512 8 /tmp/zeroes && are 256 256 /tmp/block && are 520 8 /tmp/block",
        0,
        &[],
    ),
    step("sg_unmap --force --lba=32767 --num=2 $d", LBA_OUT_OF_RANGE, &[]),
    step("fill && sg_write_same --in=/tmp/one --lba=8 --num=1 $d", 0, &[]),
    step("sg_compare_and_write --in=/tmp/one-two --lba=8 $d && are 8 1 /tmp/two", 0, &[]),
    step("sg_compare_and_write --in=/tmp/one-two --lba=8 $d", MISCOMPARE, &["iscompare"]),
    step("are 8 1 /tmp/two && are 9 8 /tmp/block && are 0 8 /tmp/block", 0, &[]),
    step("sg_get_lba_status --lba=8 $d", 0, &["LBA: 0x0000000000000008", "mapped"]),
    step("sg_get_lba_status --lba=32768 $d", LBA_OUT_OF_RANGE, &[]),
    step("sg_verify --lba=0 --count=1000 $d", 0, &[]),
    step("sg_verify --16 --lba=8 --count=1 --ndo=512 --in=/tmp/two $d", 0, &[]),
    step("sg_verify --16 --lba=8 --count=1 --ndo=512 --in=/tmp/one $d", MISCOMPARE, &[]),
    step("sg_verify --lba=32767 --count=2 $d", LBA_OUT_OF_RANGE, &[]),
];

const RESERVATIONS: &[Step] = &[
    step("sg_persist --in --read-keys $d", 0, &["there are NO registered reservation keys"]),
    step("sg_persist --in --report-capabilities $d", 0, &["Persist Through Power Loss Capable(PTPL_C): 0"]),
    step("sg_persist --out --register --param-sark=abc123 $d", 0, &[]),
    step("sg_persist --in --read-keys $d", 0, &["1 registered reservation key follows", "0xabc123"]),
    step("sg_persist --out --reserve --param-rk=abc123 --prout-type=1 $d", 0, &[]),
    step("sg_persist --in --read-reservation $d", 0, &["Key=0xabc123", "type: Write Exclusive"]),
    step("sg_persist --out --reserve --param-rk=bad --prout-type=1 $d", 24, &["Reservation conflict"]),
    step("sg_persist --out --reserve --param-rk=abc123 --prout-type=3 $d", 24, &["Reservation conflict"]),
    step("dd if=/tmp/one of=$d bs=512 seek=8 oflag=direct && are 8 1 /tmp/one", 0, &[]),
    step("sg_persist --in --read-full-status $d", 0, &["Key=0xabc123", "Reservation holder"]),
    step("sg_persist --out --release --param-rk=abc123 --prout-type=1 $d", 0, &[]),
    step("sg_persist --in --read-reservation $d", 0, &["there is NO reservation held"]),
    step("sg_persist --out --reserve --param-rk=abc123 --prout-type=5 $d", 0, &[]),
    step("sg_persist --out --preempt --param-rk=abc123 --param-sark=abc123 --prout-type=3 $d", 0, &[]),
    step("sg_persist --in --read-reservation $d", 0, &["Key=0xabc123", "type: Exclusive Access"]),
    step("sg_persist --out --clear --param-rk=abc123 $d", 0, &[]),
    step("sg_persist --in --read-keys $d", 0, &["there are NO registered reservation keys"]),
];

const ALL: [&[Step]; 4] = [IDENTITY, CONDITION, BLOCKS, RESERVATIONS];

/// Runs all steps and checks each command's status and output.
pub(crate) fn asked(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut disk = bench.file_disk(site, "disk")?;
    ensure!(DISK_MIB == 16, "the steps know how large the disk is");
    bench.plug(&mut disk, 0)?;
    let (bdevs, _) = bench.daemon.call("bdev_get_bdevs", &json!({"name": "disk"}))?;
    let serial = bdevs[0]["uuid"].as_str().context("a disk without a uuid")?.replace('-', "");
    let socket = site.path("vhost").join(CONTROLLER);
    let vm = Vm::with_disks(vec![Disk { front: Front::Scsi, ..Disk::new(&socket, 2) }]);
    let steps = || ALL.into_iter().flatten().enumerate();
    let mut script = format!("{PREPARE}\nfill\n");
    for (number, step) in steps() {
        let command = step.command;
        let status = "echo \"status $?\" >>/tmp/said";
        writeln!(
            script,
            "( {command} ) >/tmp/said 2>&1 && {status} || {status}\npublish {number} /tmp/said"
        )?;
    }
    let report = site.boot(&vm, &script)?.finish(TIMEOUT)?;
    let mut wrong = String::new();
    for (number, step) in steps() {
        let said = report.files.get(&number.to_string()).context("a step is missing")?;
        let is_said =
            |what: &&str| said.contains(&what.replace("@SERIAL@", &serial).replace("@NAA@", &naa(&serial)));
        let missing: Vec<_> = step.says.iter().filter(|what| !is_said(what)).collect();
        let ended = said.contains(&format!("status {}\n", step.status));
        if !missing.is_empty() || !ended {
            writeln!(
                wrong,
                "$ {} (expected status {}; missing: {missing:?})\n{said}",
                step.command, step.status
            )?;
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    bench.daemon.stop()
}

/// The NAA designator of a disk, derived from its uuid: 60 of its bits, after a 3.
fn naa(serial: &str) -> String {
    let (high, low) = serial.split_at(16);
    let parse = |half| u64::from_str_radix(half, 16).expect("a uuid");
    format!("3{:015x}", (parse(high) ^ parse(low)) & (u64::MAX >> 4))
}
