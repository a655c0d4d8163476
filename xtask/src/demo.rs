//! `cargo xtask demo`: shows a VM on a disk that `arykd` serves, from start to end.
//!
//! Everything that it starts is a child process that is killed when this function returns, for any reason, and works in a
//! temporary directory.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use aryk_guest_tests::fio::{self, Measured};
use aryk_guest_tests::vm::Front;
use aryk_guest_tests::{Daemon, Disk, Guest, Image, Vm};
use aryk_nvme_model::{Config, Model};
use aryk_pci::vfio_user;
use comfy_table::{CellAlignment, Table, presets};

use crate::progress::Clock;
use crate::{install, workspace};

/// Timeout of the guest: it takes ten to twenty seconds, several times that on a busy test machine.
const TIMEOUT: Duration = Duration::from_secs(180);
const QUEUES: u16 = 2;

/// The jobs: name, title, and their fio options; `@VERIFY@` stands for the verified area.
const JOBS: &[(&str, &str, &str)] = &[
    (
        "write4k",
        "4 KiB random write, QD 32, verified",
        "--rw=randwrite --bs=4k --iodepth=32 --size=32M @VERIFY@",
    ),
    (
        "write1m",
        "1 MiB sequential write, QD 4, verified",
        "--rw=write --bs=1M --iodepth=4 --size=64M @VERIFY@",
    ),
    (
        "read1",
        "4 KiB random read, QD 1",
        "--rw=randread --bs=4k --iodepth=1 --size=64M --runtime=3 --time_based",
    ),
    (
        "read32",
        "4 KiB random read, QD 32",
        "--rw=randread --bs=4k --iodepth=32 --size=64M --runtime=3 --time_based",
    ),
];

/// The controller of the NVMe drive, and the disk of its namespace.
const DRIVE: &str = "drive";
const NAMESPACE: &str = "driven1";

/// The pool, the SCSI controller of its volume, and the line with which the guest asks for a snapshot and a clone of it.
const POOL: &str = "pool";
const SCSI: &str = "scsi";
const SNAPSHOT: &str = "-- snapshot";

/// What the guest does with the volume: its snapshot is taken while files are copied, and the clone is mounted beside it.
const ON_VOLUME: &str = r"
    until [ -b /dev/sda ]; do sleep 0.1; done
    mkfs.ext4 -q /dev/sda
    mount -t ext4 /dev/sda /mnt
    cp -r /usr/bin /mnt/
    (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
    sync
    (while [ ! -e /tmp/enough ]; do cp -r /usr/sbin /mnt/more; rm -r /mnt/more; done) &
    load=$!
    echo - on the volume: copied $(wc -l </tmp/sums) files, and goes on with copies
    echo -- snapshot
    until [ -b /dev/sdb ]; do sleep 0.1; done
    mkdir /clone
    mount -t ext4 /dev/sdb /clone
    (cd /clone && sha256sum -c /tmp/sums) >/tmp/checked
    echo - mounted the clone beside the volume: $(wc -l </tmp/checked) files, all checksums are right
    umount /clone
    e2fsck -fn /dev/sdb >/dev/null 2>&1
    touch /tmp/enough
    wait $load
    umount /mnt
    echo - the file system of the clone is clean
";

/// What the guest does with the disk on the NVMe drive, before the other disk's turn.
const ON_DRIVE: &str = r"
    mkfs.ext4 -q $(disk 1)
    mount -t ext4 $(disk 1) /mnt
    cp -r /usr/bin /mnt/
    (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
    sync
    echo 3 >/proc/sys/vm/drop_caches
    (cd /mnt && sha256sum -c /tmp/sums) >/tmp/checked
    echo - on the NVMe drive: copied $(wc -l </tmp/checked) files, dropped all caches, all checksums are right
    umount /mnt
";

/// The disk that the guest uses over the network, its name there, and the line with which the guest asks who uses it.
const SHARED: &str = "shared";
const NQN: &str = "nqn.2026-11.io.aryk:demo";
const HOSTS: &str = "-- hosts";

/// What the guest does with the disk that it reaches over NVMe/TCP.
const ON_SHARE: &str = r"
    load_modules nvme-tcp
    ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
    nvme connect -t tcp -a 10.0.2.2 -s @PORT@ -n @NQN@ --nr-io-queues 2 \
        --hostnqn nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31 >/dev/null
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    mkfs.ext4 -q /dev/nvme0n1
    mount -t ext4 /dev/nvme0n1 /mnt
    cp -r /usr/bin /mnt/
    (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
    sync
    echo 3 >/proc/sys/vm/drop_caches
    (cd /mnt && sha256sum -c /tmp/sums) >/tmp/checked
    echo - over NVMe/TCP: copied $(wc -l </tmp/checked) files, dropped all caches, all checksums are right
    echo -- hosts
    umount /mnt
    nvme disconnect -n @NQN@ >/dev/null
";

/// Lines that start with `-` are printed for the reader.
const FILES: &str = r"
    read -r up idle </proc/uptime
    echo - Linux $(uname -r) is up after $up s and sees $(disk 0): $(cat /sys/block/$(basename $(disk 0))/size) sectors, $(ls /sys/block/$(basename $(disk 0))/mq | wc -l) queues
    mkfs.ext4 -q $(disk 0)
    mount -t ext4 $(disk 0) /mnt
    echo - made and mounted an ext4 file system
    cp -r /usr/bin /usr/sbin /usr/lib /mnt/
    (cd /usr && find bin sbin lib -type f | xargs sha256sum) >/tmp/sums
    sync
    umount /mnt
    echo 3 >/proc/sys/vm/drop_caches
    mount -t ext4 $(disk 0) /mnt
    (cd /mnt && sha256sum -c /tmp/sums) >/tmp/checked
    echo - copied $(wc -l </tmp/checked) files, $(du -sm /mnt | cut -f1) MiB, dropped all caches, mounted again: all checksums are right
    umount /mnt
    e2fsck -fn $(disk 0) >/dev/null 2>&1
    echo - the file system is clean
";

pub(crate) fn run() -> Result<()> {
    let clock = Clock::start();
    println!(
        "A Linux guest on a disk of arykd's: less than two minutes, and before that, the first time, some for building.\n"
    );
    clock.say("Checking that QEMU and the other programs for a guest are installed.");
    install::ensure(install::GUEST)?;
    clock.say("Building arykd and aryk; cargo shows the progress:");
    let bin = workspace::build_programs()?;
    clock.say("Preparing the guest: Debian's kernel and some tools (once: it is kept in target/guest).");
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let directory = tempfile::Builder::new().prefix("aryk-demo-").tempdir()?;
    clock.say("Starting a model of an NVMe drive, which arykd drives itself, over a socket in place of the PCI bus.");
    let socket = directory.path().join("drive.sock");
    let model = serve_model(&socket)?;
    let _running = model.run()?;
    clock.say("Starting arykd, and creating two disks, a volume in a pool, and a disk that is shared over the network:");
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let daemon = serve(&bin, directory.path(), &socket, port)?;
    let result = boot(&daemon, &image, directory.path(), port, &clock)
        .with_context(|| format!("arykd said:\n{}", daemon.log_tail()));
    println!("\n{}", result?);
    for disk in ["demo", NAMESPACE] {
        println!("{}", daemon.aryk(&["disk", "stat", disk])?.trim_end());
    }
    daemon.stop()?;
    drop(directory);
    println!("\nAll processes have ended, and their files are deleted.");
    Ok(())
}

/// Serves a model of a drive at a socket, from a thread that lives as long as this process.
fn serve_model(socket: &Path) -> Result<Arc<Model>> {
    let model = Model::new("demo", Config::default())?;
    let (listener, served) = (UnixListener::bind(socket)?, Arc::clone(&model));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // A client that breaks the protocol is shown by what it does next.
            let _ = vfio_user::serve(stream, &*served);
        }
    });
    Ok(model)
}

/// Starts arykd and creates two disks for a VM, a volume, and a disk that is shared at `port`.
fn serve(bin: &Path, directory: &Path, drive: &Path, port: u16) -> Result<Daemon> {
    println!("$ arykd -r {0}/rpc.sock -S {0}/vhost", directory.display());
    let daemon = Daemon::start(bin, directory, &[])?;
    let file = directory.join("demo.img").display().to_string();
    println!("$ aryk disk create demo --file {file} --size 1G");
    daemon.aryk(&["disk", "create", "demo", "--file", &file, "--size", "1G"])?;
    println!("$ aryk attach demo");
    let call = format!(r#"{{"name": "{DRIVE}", "trtype": "VFIOUSER", "traddr": "{}"}}"#, drive.display());
    println!("$ aryk rpc bdev_nvme_attach_controller '{call}'");
    daemon.aryk(&["rpc", "bdev_nvme_attach_controller", &call])?;
    println!("$ aryk attach {NAMESPACE}");
    let store = directory.join("store.img").display().to_string();
    let volume = format!("{POOL}/vm");
    for arguments in [
        &["disk", "create", "store", "--file", &store, "--size", "1G"][..],
        &["pool", "create", POOL, "--disk", "store"],
        &["volume", "create", &volume, "--size", "512M"],
        &["attach", &volume, "--scsi", "--controller", SCSI],
        &["disk", "create", SHARED, "--memory", "--size", "64M"],
        &["share", SHARED, "--nqn", NQN, "--listen", &format!("127.0.0.1:{port}")],
    ] {
        say_and_run(&daemon, arguments)?;
    }
    Ok(daemon)
}

/// Prints a command, and runs it.
fn say_and_run(daemon: &Daemon, arguments: &[&str]) -> Result<()> {
    println!("$ aryk {}", arguments.join(" "));
    daemon.aryk(arguments).map(drop)
}

/// Takes a snapshot of the volume, and plugs a clone of it into the running guest.
fn clone_volume(daemon: &Daemon) -> Result<()> {
    let [volume, snapshot, clone] = ["vm", "vm@now", "clone"].map(|name| format!("{POOL}/{name}"));
    say_and_run(daemon, &["snapshot", "create", &snapshot])?;
    say_and_run(daemon, &["volume", "clone", &snapshot, "clone"])?;
    say_and_run(daemon, &["attach", &clone, "--scsi", "--controller", SCSI, "--target", "1"])?;
    say_and_run(daemon, &["volume", "changed", &volume, "--since", &snapshot])
}

/// Boots the guest, prints its progress lines, and returns the table.
fn boot(daemon: &Daemon, image: &Image, directory: &Path, port: u16, clock: &Clock) -> Result<Table> {
    let socket = daemon.attach("demo", &[])?;
    let drive = daemon.attach(NAMESPACE, &[])?;
    clock.say(&format!("A guest boots from {} with its disk at {}:", image.kernel, socket.display()));
    let scsi = socket.with_file_name(SCSI);
    let scsi = Disk { front: Front::Scsi, ..Disk::new(&scsi, QUEUES) };
    let network = "-netdev user,id=net0 -device virtio-net-pci,netdev=net0,romfile=";
    let vm = Vm {
        arguments: network.split_whitespace().map(str::to_owned).collect(),
        ..Vm::with_disks(vec![Disk::new(&socket, QUEUES), Disk::new(&drive, 1), scsi])
    };
    let mut guest = Guest::boot(image, &vm, &script(port), directory)?;
    loop {
        let line = guest.wait_line("-", TIMEOUT)?;
        if line == "-- done" {
            break;
        }
        if line == SNAPSHOT {
            clone_volume(daemon)?;
            continue;
        }
        if line == HOSTS {
            println!("$ aryk hosts\n{}", daemon.aryk(&["hosts"])?.trim_end());
            continue;
        }
        clock.say(&format!("  {line}"));
    }
    let report = guest.finish(TIMEOUT)?;
    clock.say(&format!("  - powered off {:.1} s after power-on", report.elapsed.as_secs_f32()));
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(["in the guest", "requests", "IOPS", "MiB/s", "mean µs", "p50 µs", "p99 µs"]);
    for (name, title, _) in JOBS {
        let json = report.files.get(*name).with_context(|| format!("no report of {name}"))?;
        let job = fio::parse(json)?.pop().context("fio ran no job")?;
        let measured = job.write.or(job.read).context("fio's job did no I/O")?;
        table.add_row(row(title, &measured));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Ok(table)
}

fn script(port: u16) -> String {
    let on_share = ON_SHARE.replace("@PORT@", &port.to_string()).replace("@NQN@", NQN);
    let mut script = ON_VOLUME.to_owned() + &on_share + ON_DRIVE + FILES;
    for (name, title, options) in JOBS {
        let options = options.replace("@VERIFY@", "--verify=crc32c --verify_fatal=1");
        script.push_str(&format!(
            "    measure {name} --filename=$(disk 0) {options}\n    echo - fio: {title}\n"
        ));
    }
    script.push_str("    echo -- done\n");
    script
}

fn row(title: &str, measured: &Measured) -> [String; 7] {
    let us = |ns: f64| format!("{:.0}", ns / 1000.0);
    [
        title.to_owned(),
        measured.ios.to_string(),
        format!("{:.0}", measured.iops),
        format!("{:.0}", measured.bytes_per_second / f64::from(1 << 20)),
        us(measured.latency_ns_mean),
        format!("{}", measured.latency_ns_p50 / 1000),
        format!("{}", measured.latency_ns_p99 / 1000),
    ]
}
