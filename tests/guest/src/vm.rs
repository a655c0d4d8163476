//! One VM: boots an [`Image`] with disks under test, runs a shell script in the guest, and collects its output.
//!
//! The script runs as root under `sh -eu` with the functions of `helpers.sh`. Its standard output comes to the host line
//! by line ([`Guest::wait_line`], [`Report`]), its standard input comes from [`Guest::send`]; its stderr and the kernel's
//! messages go to `console.log`. The guest powers off when the script ends.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::image::{Image, Kernel, script_archive};
use crate::process::{Process, Signal, Stdin, TICK, check_interrupt, tail, wait_until};
use crate::qmp::Qmp;

/// KiB of a VM's memory above whole MiB. QEMU before 9.0 loses dirty pages of a migrating TCG VM whose memory is a
/// multiple of 256 KiB: where it takes a whole word of its bitmap at once, it does not notify the vCPUs. Seen as kernel
/// crashes after a migration, with QEMU's own disks too.
const ODD_KIB: u64 = 8;

/// The PCI slot of the first disk under test; `helpers.sh` uses the same number.
const FIRST_DISK_SLOT: usize = 0x10;
/// Each disk has a slot of its own on the root bus.
const DISKS_MAX: usize = 8;

/// How QEMU and the back-end connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// QEMU connects, once.
    Client,
    /// QEMU connects, and again each second after losing the back-end.
    Reconnect,
    /// QEMU listens, and the back-end connects at any time.
    Server,
}

/// The device type that the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// One disk: `vhost-user-blk-pci`.
    Blk,
    /// A SCSI controller with hotplug disks: `vhost-user-scsi-pci`.
    Scsi,
}

/// A disk of the guest, or a controller of several disks.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The device type.
    pub front: Front,
    /// The socket between QEMU and the back-end.
    pub socket: PathBuf,
    /// Number of virtqueues; the guest's driver uses at most one per CPU.
    pub queues: u16,
    /// The direction of the connection.
    pub link: Link,
    /// Further properties of QEMU's device, e.g. `queue-size=256`.
    pub properties: String,
}

impl Disk {
    /// A disk with `queues` queues, whose back-end listens at `socket`.
    #[must_use]
    pub fn new(socket: &Path, queues: u16) -> Self {
        let (front, link) = (Front::Blk, Link::Client);
        Self { front, socket: socket.to_owned(), queues, link, properties: String::new() }
    }
}

/// Numbers and PCI slots of the ports that have no drive at first.
const SPARE: usize = 16;
const SPARE_SLOT: usize = 0x1c;

/// Where a drive is plugged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// Where the drive is when the VM boots.
    First,
    /// A port of its own, at another PCI address.
    Spare,
}

/// An emulated NVMe drive: a PCIe function behind a virtual IOMMU.
#[derive(Clone, Debug)]
pub struct Nvme {
    /// The file with the blocks of each namespace; there is at least one.
    pub images: Vec<PathBuf>,
    /// Device and function number on the root bus, as `18.0`, from 18 to 1b; a VM without disks also has 10 to 17.
    pub slot: &'static str,
    /// Whether a port is in that slot, and the drive behind it, where it can be unplugged; it then has a [`Port::Spare`] too.
    pub is_pluggable: bool,
    /// Further properties of QEMU's device, e.g. `max_ioqpairs=4`.
    pub properties: String,
}

impl Nvme {
    /// QEMU's arguments for the drive with this index.
    fn arguments(&self, index: usize) -> Vec<(&'static str, String)> {
        let Self { images, slot, is_pluggable, properties } = self;
        let comma = if properties.is_empty() { "" } else { "," };
        let mut arguments = Vec::new();
        let name = |nsid: usize| format!("nvme{index}-{nsid}");
        for (image, nsid) in images.iter().zip(1..) {
            // Drives never return a mix of two writes for one sector. The host's page cache does: a buffered read that
            // runs beside a buffered write was seen to return the start of the old sector and the end of the new one.
            let cache = "cache.direct=on,cache.no-flush=on";
            let file = format!("file.driver=file,file.filename={},{cache}", image.display());
            arguments.push(("-blockdev", format!("driver=raw,node-name={},{file}", name(nsid))));
        }
        let mut bus = format!("addr=0x{slot}");
        if *is_pluggable {
            let port = format!("pcie-root-port,id=port{index},chassis={index},slot={index},{bus}");
            arguments.push(("-device", port));
            let (number, slot) = (index + SPARE, index + SPARE_SLOT);
            let spare =
                format!("pcie-root-port,id=spare{index},chassis={number},slot={number},addr={slot:#x}");
            arguments.push(("-device", spare));
            bus = format!("bus=port{index}");
        }
        let device = format!("nvme,id=nvme{index},serial=aryk-nvme{index},{bus}");
        let drive = if images.len() == 1 { format!(",drive={}", name(1)) } else { String::new() };
        arguments.push(("-device", format!("{device}{drive}{comma}{properties}")));
        let namespaces = if images.len() == 1 { 0 } else { images.len() };
        for nsid in 1..=namespaces {
            let (drive, bus) = (name(nsid), format!("nvme{index}"));
            arguments.push(("-device", format!("nvme-ns,id={drive},drive={drive},bus={bus},nsid={nsid}")));
        }
        arguments
    }
}

/// The hardware of a VM.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Virtual CPUs.
    pub cpus: u16,
    /// Memory, shared with the back-ends, in MiB.
    pub memory_mib: u32,
    /// Disks under test, in PCI order.
    pub disks: Vec<Disk>,
    /// NVMe drives. With any, the VM has an IOMMU.
    pub nvme: Vec<Nvme>,
    /// Programs of this host that the script runs with `program NAME`.
    pub programs: Vec<PathBuf>,
    /// Whether a reboot boots again; otherwise it ends QEMU.
    pub reboots: bool,
    /// The socket at which QEMU waits for the migration of an equal VM, instead of booting.
    pub incoming: Option<PathBuf>,
    /// A script that starts QEMU with its own memory, processors and disk, instead of this module: the script, and the
    /// disk's socket.
    pub example: Option<(PathBuf, PathBuf)>,
    /// Whether the guest's clock counts instructions: while its one processor is busy, an instruction takes a nanosecond.
    pub counts_instructions: bool,
    /// Further parameters of the kernel.
    pub kernel: String,
    /// Further arguments of QEMU.
    pub arguments: Vec<String>,
}

impl Vm {
    /// A VM with these disks and a CPU for each queue of the largest disk, but at least two.
    #[must_use]
    pub fn with_disks(disks: Vec<Disk>) -> Self {
        let widest = disks.iter().map(|disk| disk.queues).max().unwrap_or(0);
        Self {
            cpus: widest.max(2),
            memory_mib: 256,
            disks,
            nvme: Vec::new(),
            programs: Vec::new(),
            reboots: false,
            incoming: None,
            example: None,
            counts_instructions: false,
            kernel: String::new(),
            arguments: Vec::new(),
        }
    }

    const fn accelerator(&self, kernel: Kernel) -> &'static str {
        // An idle processor sleeps in real time: if its clock jumped to the next timer, commands of the kernel would time out.
        if self.counts_instructions {
            return "-accel tcg,thread=single -icount shift=0,sleep=on";
        }
        match kernel {
            Kernel::Current | Kernel::Rdma => "-accel tcg,thread=multi",
            // Linux patches its code at boot while other processors run it. With a thread for each processor, one of them was
            // seen to run a breakpoint of that patching too late, and to panic ("RIP: sched_clock_cpu+0x9"), once in some dozen
            // boots.
            Kernel::Iommufd => "-accel tcg,thread=single",
        }
    }

    fn command_line(&self, image: &Image, initrd: &Path, console: &Path, monitor: &Path) -> Vec<String> {
        let memory = u64::from(self.memory_mib) * 1024 + ODD_KIB;
        let mut words: Vec<String> = [
            // The simplest CPU boots fastest under TCG; fio needs the crc32 instruction.
            "-nodefaults -display none -cpu qemu64,+ssse3,+sse4.1,+sse4.2",
            "-chardev stdio,id=script,signal=off",
            self.accelerator(image.kind),
        ]
        .iter()
        .flat_map(|line| line.split_whitespace().map(str::to_owned))
        .collect();
        let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
        if self.example.is_none() {
            // The IOMMU remaps interrupts only if QEMU delivers them itself.
            let chip = if self.nvme.is_empty() { "" } else { ",kernel-irqchip=split" };
            option("-M", format!("q35,memory-backend=mem0{chip}"));
            option("-smp", self.cpus.to_string());
            option("-m", format!("{memory}K"));
            option("-object", format!("memory-backend-memfd,id=mem0,size={memory}K,share=on"));
        }
        option("-kernel", image.vmlinux.display().to_string());
        option("-initrd", initrd.display().to_string());
        // Without no_timer_check, the kernel takes the late timer ticks of a busy host for a broken timer. Debian's
        // kernel zeroes pages when it allocates them, which makes them dirty for a migration whether or not a disk logs
        // its writes to them. The kernel's tests of its own ciphers were seen to spin forever under TCG ("soft lockup …
        // cryptomgr_test"), once in hundreds of boots; no test needs them.
        let append = "console=ttyS0 panic=-1 quiet nokaslr mitigations=off no_timer_check init_on_alloc=0 cryptomgr.notests";
        let iommu = if self.nvme.is_empty() { "" } else { " intel_iommu=on" };
        option("-append", format!("{append}{iommu} {}", self.kernel));
        if !self.nvme.is_empty() {
            option("-device", "intel-iommu,intremap=on,caching-mode=on".to_owned());
        }
        option("-serial", format!("file:{}", console.display()));
        option("-serial", "chardev:script".to_owned());
        option("-qmp", format!("unix:{},server=on,wait=off", monitor.display()));
        if let Some(socket) = &self.incoming {
            option("-incoming", format!("unix:{}", socket.display()));
        }
        let tools = image.tools.display();
        option("-drive", format!("file={tools},if=none,id=tools,format=raw,readonly=on,cache=unsafe"));
        option("-device", "virtio-blk-pci,drive=tools,serial=aryk-tools,addr=0x8".to_owned());
        for (index, disk) in self.disks.iter().enumerate() {
            let link = match disk.link {
                Link::Client => "",
                Link::Reconnect => ",reconnect=1",
                Link::Server => ",server=on,wait=off",
            };
            option("-chardev", format!("socket,id=c{index},path={}{link}", disk.socket.display()));
            let (queues, slot) = (disk.queues, FIRST_DISK_SLOT + index);
            let comma = if disk.properties.is_empty() { "" } else { "," };
            let properties = &disk.properties;
            let device = match disk.front {
                Front::Blk => format!("vhost-user-blk-pci,num-queues={queues}"),
                Front::Scsi => format!("vhost-user-scsi-pci,num_queues={queues}"),
            };
            option("-device", format!("{device},chardev=c{index},addr={slot:#x}{comma}{properties}"));
        }
        for (index, drive) in self.nvme.iter().enumerate() {
            for (name, value) in drive.arguments(index) {
                option(name, value);
            }
        }
        if !self.reboots {
            words.push("-no-reboot".to_owned());
        }
        words.extend_from_slice(&self.arguments);
        words
    }
}

/// A VM that migrates to another QEMU.
#[derive(Debug)]
pub struct Move(Qmp);

impl Move {
    /// Completes the migration; the source QEMU is stopped from then on.
    ///
    /// # Errors
    /// The migration completed before this call, so that nothing was tested during it; it failed, or takes longer than a
    /// minute.
    pub fn end(mut self) -> Result<()> {
        let status = self.0.call("query-migrate", &json!({}))?["status"].clone();
        ensure!(status == "active", "the migration should be active, and is {status}");
        self.0
            .call("migrate-set-parameters", &json!({"downtime-limit": 2000, "max-bandwidth": 1_u64 << 40}))?;
        wait_until("the migration", Duration::from_secs(60), || {
            let info = self.0.call("query-migrate", &json!({}))?;
            match info["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed") => bail!("the migration failed: {}", info["error-desc"]),
                _ => Ok(None),
            }
        })
    }
}

/// A running guest; killed when dropped.
#[derive(Debug)]
pub struct Guest {
    qemu: Process,
    to_script: ChildStdin,
    from_script: Receiver<(Instant, String)>,
    console: PathBuf,
    monitor: PathBuf,
    report: Report,
    started: Instant,
}

/// The output of a finished script.
#[derive(Debug, Default)]
pub struct Report {
    /// Its standard output, without published files.
    pub lines: Vec<String>,
    /// The files that it published, by name.
    pub files: BTreeMap<String, String>,
    /// From QEMU's start to its end.
    pub elapsed: Duration,
}

impl Guest {
    /// Starts `vm` with `script` in it. `directory` receives logs and the script's archive, and must not be shared
    /// with another running guest.
    ///
    /// # Errors
    /// QEMU cannot be started. (The first wait finds errors of QEMU itself.)
    pub fn boot(image: &Image, vm: &Vm, script: &str, directory: &Path) -> Result<Self> {
        ensure!(vm.disks.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        let initrd = directory.join("initrd");
        let mut archive = std::fs::read(&image.initrd)?;
        archive.extend_from_slice(&script_archive(script, &vm.programs)?);
        std::fs::write(&initrd, archive)?;
        let console = directory.join("console.log");
        let monitor = directory.join("qmp.sock");
        let mut arguments = vm.command_line(image, &initrd, &console, &monitor);
        let log = directory.join("qemu.log");
        let mut program = Path::new("qemu-system-x86_64");
        if let Some((script, socket)) = &vm.example {
            program = script;
            arguments.insert(0, socket.display().to_string());
        }
        let started = Instant::now();
        let mut qemu = Process::spawn(program, &arguments, Stdin::Piped, &log)?;
        let (to_script, output) = qemu.take_pipes().context("QEMU was spawned with pipes")?;
        let report = Report::default();
        let from_script = lines(output);
        Ok(Self { qemu, to_script, from_script, console, monitor, report, started })
    }

    /// Waits for a line that starts with `prefix` and returns it; earlier lines go to the report.
    ///
    /// # Errors
    /// The script or QEMU ended, `timeout` passed, or the process was interrupted.
    pub fn wait_line(&mut self, prefix: &str, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        loop {
            let line = self.next_line(deadline).with_context(|| format!("waiting for {prefix:?}"))?;
            if line.starts_with(prefix) {
                self.report.lines.push(line.clone());
                return Ok(line);
            }
            if let Some(status) = line.strip_prefix("aryk-done ") {
                bail!("the script ended ({status}) before {prefix:?}\n{}", self.log_tail());
            }
            self.take(line, deadline)?;
        }
    }

    /// Waits until the script has succeeded and the guest has powered off.
    ///
    /// # Errors
    /// The script failed, QEMU ended early, `timeout` passed, or the process was interrupted.
    pub fn finish(mut self, timeout: Duration) -> Result<Report> {
        let deadline = Instant::now() + timeout;
        loop {
            let line = self.next_line(deadline).context("waiting for the script's end")?;
            match line.strip_prefix("aryk-done ") {
                Some("0") => break,
                Some(status) => bail!("the script failed with {status}\n{}", self.log_tail()),
                None => self.take(line, deadline)?,
            }
        }
        let status = self.qemu.wait(deadline.saturating_duration_since(Instant::now()))?;
        ensure!(status.success(), "QEMU ended with {status}\n{}", self.log_tail());
        self.report.elapsed = self.started.elapsed();
        Ok(std::mem::take(&mut self.report))
    }

    /// Sends the script a line.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn send(&mut self, line: &str) -> Result<()> {
        writeln!(self.to_script, "{line}").context("writing to the guest")
    }

    /// Sends QEMU a signal: `STOP` and `CONT` freeze and thaw the whole VM.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.qemu.signal(signal)
    }

    /// Starts the migration of the running VM to the QEMU that waits at `socket` ([`Vm::incoming`]). Returns when
    /// all of its memory was transferred once. Pages that are written from then on are transferred again, until
    /// [`Move::end`].
    ///
    /// # Errors
    /// No QEMU listens there, this one refuses, or it takes longer than a minute.
    pub fn begin_move(&self, socket: &Path) -> Result<Move> {
        wait_until("the QEMU of the migration's target", Duration::from_secs(20), || {
            Ok(socket.exists().then_some(()))
        })?;
        let mut qmp = Qmp::connect(&self.monitor)?;
        // So short, in milliseconds, that the migration of a busy VM never converges.
        qmp.call("migrate-set-parameters", &json!({"downtime-limit": 1, "max-bandwidth": 64 << 20}))?;
        qmp.call("migrate", &json!({"uri": format!("unix:{}", socket.display())}))?;
        wait_until("the transfer of the VM's memory", Duration::from_secs(60), || {
            let info = qmp.call("query-migrate", &json!({}))?;
            let passes_begun = info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
            Ok((passes_begun >= 2).then_some(()))
        })?;
        Ok(Move(qmp))
    }

    /// Makes QEMU stop all of the VM's processors: its script stops, while QEMU itself continues.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn freeze(&self) -> Result<()> {
        Qmp::connect(&self.monitor)?.call("stop", &json!({})).map(drop)
    }

    /// Makes the processors continue.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn thaw(&self) -> Result<()> {
        Qmp::connect(&self.monitor)?.call("cont", &json!({})).map(drop)
    }

    /// Asks the VM's kernel to give a pluggable NVMe drive back, which is unplugged when it has done so. A kernel that is busy
    /// may miss the press of the slot's button: one that still has the drive after 10 s is asked once more, as an operator
    /// does.
    ///
    /// # Errors
    /// QEMU has ended, or there is no such drive.
    pub fn unplug_nvme(&self, index: usize) -> Result<()> {
        let id = format!("nvme{index}");
        let mut qmp = Qmp::connect(&self.monitor)?;
        qmp.call("device_del", &json!({ "id": id }))?;
        let unplugged = wait_until("the drive to be unplugged", Duration::from_secs(10), || {
            let devices = qmp.call("qom-list", &json!({"path": "/machine/peripheral"}))?;
            let is_there =
                devices.as_array().is_some_and(|all| all.iter().any(|device| device["name"] == id));
            Ok((!is_there).then_some(()))
        });
        if unplugged.is_err() {
            qmp.call("device_del", &json!({ "id": id }))?;
        }
        Ok(())
    }

    /// Plugs an NVMe drive with one namespace back in, once it is unplugged.
    ///
    /// # Errors
    /// QEMU has ended, or the drive is not unplugged within 20 s.
    pub fn plug_nvme(&self, index: usize, port: Port) -> Result<()> {
        let bus = match port {
            Port::First => format!("port{index}"),
            Port::Spare => format!("spare{index}"),
        };
        let mut qmp = Qmp::connect(&self.monitor)?;
        let drive = json!({"driver": "nvme", "id": format!("nvme{index}"), "serial": format!("aryk-nvme{index}"),
            "drive": format!("nvme{index}-1"), "bus": bus});
        let mut last = None;
        let plugged = wait_until("the drive to be unplugged", Duration::from_secs(20), || {
            Ok(qmp.call("device_add", &drive).map_err(|error| last = Some(error)).ok())
        });
        plugged.map(drop).with_context(|| format!("QEMU's last answer: {last:?}"))
    }

    /// Reports an error of PCI Express at the port of a pluggable NVMe drive, as `COMP_TIME` (not fatal) or `DLP` (fatal).
    ///
    /// # Errors
    /// QEMU has ended, or there is no such port or error.
    pub fn inject_pcie_error(&self, index: usize, error: &str) -> Result<()> {
        let line = json!({"command-line": format!("pcie_aer_inject_error port{index} {error}")});
        let said = Qmp::connect(&self.monitor)?.call("human-monitor-command", &line)?;
        ensure!(said.as_str().is_some_and(|said| said.starts_with("OK")), "QEMU refuses: {said}");
        Ok(())
    }

    /// Makes QEMU execute at most this number of commands of an NVMe drive with one namespace each second; 0: any number. The
    /// others wait in QEMU, until the drive is reset: that waits for them.
    ///
    /// # Errors
    /// QEMU has ended, or there is no such drive.
    pub fn limit_nvme(&self, index: usize, per_second: u64) -> Result<()> {
        self.limit(&format!("nvme{index}"), per_second)
    }

    /// As [`Guest::limit_nvme`], for one namespace of a drive with several.
    ///
    /// # Errors
    /// QEMU has ended, or there is no such namespace.
    pub fn limit_namespace(&self, index: usize, nsid: u32, per_second: u64) -> Result<()> {
        self.limit(&format!("nvme{index}-{nsid}"), per_second)
    }

    fn limit(&self, device: &str, per_second: u64) -> Result<()> {
        let limits = json!({"id": device, "iops": per_second, "iops_rd": 0, "iops_wr": 0,
            "bps": 0, "bps_rd": 0, "bps_wr": 0});
        Qmp::connect(&self.monitor)?.call("block_set_io_throttle", &limits).map(drop)
    }

    /// Kills QEMU like a crash.
    pub fn kill(mut self) {
        self.qemu.kill();
    }

    /// Stores a line of output; collects a published file's lines up to its end.
    fn take(&mut self, line: String, deadline: Instant) -> Result<()> {
        let Some(name) = line.strip_prefix("aryk-file ") else {
            if !line.is_empty() {
                self.report.lines.push(line);
            }
            return Ok(());
        };
        let end = format!("aryk-end {name}");
        let mut text = String::new();
        loop {
            let line = self.next_line(deadline).with_context(|| format!("reading {name} from the guest"))?;
            if line == end {
                self.report.files.insert(name.to_owned(), text);
                return Ok(());
            }
            text.push_str(&line);
            text.push('\n');
        }
    }

    fn next_line(&mut self, deadline: Instant) -> Result<String> {
        match self.line_within(deadline)? {
            Some((_, line)) => Ok(line),
            None => bail!("out of time\n{}", self.log_tail()),
        }
    }

    /// The script's next line of output, and its time, if there is one before the deadline.
    ///
    /// # Errors
    /// QEMU ended, or the process was interrupted.
    pub(crate) fn line_within(&mut self, deadline: Instant) -> Result<Option<(Instant, String)>> {
        loop {
            check_interrupt()?;
            match self.from_script.recv_timeout(TICK) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    // Its output ended, so it is about to.
                    let status = self.qemu.wait(Duration::from_secs(10));
                    let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                    bail!("QEMU ended before the script: {status}\n{}", self.log_tail())
                }
            }
        }
    }

    /// The end of all logs, to explain a failure.
    pub(crate) fn log_tail(&self) -> String {
        let said = self.report.lines.join("\n");
        let console = tail(&self.console, 30);
        format!("script: {said}\nconsole: {console}\nqemu: {}", self.qemu.log_tail())
    }
}

/// Reads the script's output on a thread of its own, which ends with QEMU.
fn lines(output: ChildStdout) -> Receiver<(Instant, String)> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(output);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\r', '\n']).to_owned();
            if sender.send((Instant::now(), line)).is_err() {
                return;
            }
            bytes.clear();
        }
    });
    receiver
}
