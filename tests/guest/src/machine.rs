//! One guest: boots an [`Image`] with disks under test, runs a shell script in it, and reports.
//!
//! The script runs as root under `sh -eu` with the functions of `helpers.sh`. Its standard output comes to
//! the host line by line ([`Guest::wait_line`], [`Report`]), its standard input is what [`Guest::send`]
//! sent; its stderr and the kernel's messages go to `console.log`. The guest powers off when it ends.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::image::{Image, script_archive};
use crate::process::{Process, Signal, Stdin, TICK, check_interrupt, tail, wait_until};
use crate::qmp::Qmp;

/// KiB that a machine has above whole MiB. QEMU before 9.0 loses dirty pages of a TCG machine that moves, if its memory is a multiple of 256 KiB: where
/// it takes a whole word of its bitmap at once, it forgets to tell the vCPUs. Seen as kernel crashes after a move, with QEMU's own disks too.
const ODD_KIB: u64 = 8;

/// The PCI slot of the first disk under test; `helpers.sh` knows it too.
const FIRST_DISK_SLOT: usize = 0x10;
/// Each disk has a slot of its own on the root bus.
const DISKS_MAX: usize = 8;

/// How QEMU and the back end find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// QEMU connects, once.
    Client,
    /// QEMU connects, and again each second after losing the back end.
    Reconnect,
    /// QEMU listens, and the back end connects whenever it likes.
    Server,
}

/// What a guest sees of a back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// One disk: `vhost-user-blk-pci`.
    Blk,
    /// A SCSI controller, whose disks come and go: `vhost-user-scsi-pci`.
    Scsi,
}

/// A disk of the guest, or a controller of some.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Which of both.
    pub front: Front,
    /// The socket between QEMU and the back end.
    pub socket: PathBuf,
    /// Virtqueues; the guest's driver uses no more than the machine has CPUs.
    pub queues: u16,
    /// Who connects to whom.
    pub link: Link,
    /// Further properties of QEMU's device, e.g. `queue-size=256`.
    pub properties: String,
}

impl Disk {
    /// A disk with `queues` queues, whose back end listens at `socket`.
    #[must_use]
    pub fn new(socket: &Path, queues: u16) -> Self {
        let (front, link) = (Front::Blk, Link::Client);
        Self { front, socket: socket.to_owned(), queues, link, properties: String::new() }
    }
}

/// The hardware of a guest.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Virtual CPUs.
    pub cpus: u16,
    /// Memory, shared with the back ends, MiB.
    pub memory_mib: u32,
    /// Disks under test, in PCI order.
    pub disks: Vec<Disk>,
    /// Whether a reboot boots again; otherwise it ends QEMU.
    pub reboots: bool,
    /// The socket at which it waits for another machine, alike, to move in, instead of booting.
    pub incoming: Option<PathBuf>,
    /// A script that starts QEMU with the memory, the processors and the one disk it has itself, in place of ours: the script, and the disk's socket.
    pub example: Option<(PathBuf, PathBuf)>,
}

impl Machine {
    /// A guest with these disks and a CPU for each queue of the widest, but at least two.
    #[must_use]
    pub fn with_disks(disks: Vec<Disk>) -> Self {
        let widest = disks.iter().map(|disk| disk.queues).max().unwrap_or(0);
        Self { cpus: widest.max(2), memory_mib: 256, disks, reboots: false, incoming: None, example: None }
    }

    fn arguments(&self, image: &Image, initrd: &Path, console: &Path, monitor: &Path) -> Vec<String> {
        let memory = u64::from(self.memory_mib) * 1024 + ODD_KIB;
        let mut words: Vec<String> = [
            // The plainest CPU boots fastest under TCG; fio wants the crc32 instruction.
            "-nodefaults -display none -accel tcg,thread=multi -cpu qemu64,+ssse3,+sse4.1,+sse4.2",
            "-chardev stdio,id=script,signal=off",
        ]
        .iter()
        .flat_map(|line| line.split_whitespace().map(str::to_owned))
        .collect();
        let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
        if self.example.is_none() {
            option("-M", "q35,memory-backend=mem0".to_owned());
            option("-smp", self.cpus.to_string());
            option("-m", format!("{memory}K"));
            option("-object", format!("memory-backend-memfd,id=mem0,size={memory}K,share=on"));
        }
        option("-kernel", image.vmlinux.display().to_string());
        option("-initrd", initrd.display().to_string());
        // Without no_timer_check a busy host's late timer ticks are taken for a broken timer. Debian's kernel fills pages with zeros when it
        // hands them out, which makes them dirty for a migration whether or not a disk says that it has written to them. The kernel's tests of
        // its own ciphers were seen to spin forever under TCG ("soft lockup … cryptomgr_test"), once in hundreds of boots; no test needs them.
        let append = "console=ttyS0 panic=-1 quiet nokaslr mitigations=off no_timer_check init_on_alloc=0 cryptomgr.notests";
        option("-append", append.to_owned());
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
        if !self.reboots {
            words.push("-no-reboot".to_owned());
        }
        words
    }
}

/// A machine on its way to another QEMU.
#[derive(Debug)]
pub struct Move(Qmp);

impl Move {
    /// Has it arrive; the QEMU that it leaves stands still from then on.
    ///
    /// # Errors
    /// It arrived before this was asked, so that nothing was tested on the way; the move fails, or takes longer than a minute.
    pub fn end(mut self) -> Result<()> {
        let status = self.0.call("query-migrate", &json!({}))?["status"].clone();
        ensure!(status == "active", "the machine was to be on its way, and is {status}");
        self.0
            .call("migrate-set-parameters", &json!({"downtime-limit": 2000, "max-bandwidth": 1_u64 << 40}))?;
        wait_until("the machine to move", Duration::from_secs(60), || {
            let info = self.0.call("query-migrate", &json!({}))?;
            match info["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed") => bail!("the machine stays: {}", info["error-desc"]),
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

/// What a finished script told the host.
#[derive(Debug, Default)]
pub struct Report {
    /// Its standard output, but for published files.
    pub lines: Vec<String>,
    /// The files that it published, by name.
    pub files: BTreeMap<String, String>,
    /// From QEMU's start to its end.
    pub elapsed: Duration,
}

impl Guest {
    /// Starts `machine` with `script` in it. `directory` receives logs and the script's archive, and must
    /// not be shared with another running guest.
    ///
    /// # Errors
    /// QEMU cannot be started. (What QEMU itself refuses is found by the first wait.)
    pub fn boot(image: &Image, machine: &Machine, script: &str, directory: &Path) -> Result<Self> {
        ensure!(machine.disks.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        let initrd = directory.join("initrd");
        let mut archive = std::fs::read(&image.initrd)?;
        archive.extend_from_slice(&script_archive(script));
        std::fs::write(&initrd, archive)?;
        let console = directory.join("console.log");
        let monitor = directory.join("qmp.sock");
        let mut arguments = machine.arguments(image, &initrd, &console, &monitor);
        let log = directory.join("qemu.log");
        let mut program = Path::new("qemu-system-x86_64");
        if let Some((script, socket)) = &machine.example {
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
                bail!("the script ended ({status}) before {prefix:?}\n{}", self.last_words());
            }
            self.take(line, deadline)?;
        }
    }

    /// Waits until the script has ended well and the guest has powered off.
    ///
    /// # Errors
    /// The script failed, QEMU ended early, `timeout` passed, or the process was interrupted.
    pub fn finish(mut self, timeout: Duration) -> Result<Report> {
        let deadline = Instant::now() + timeout;
        loop {
            let line = self.next_line(deadline).context("waiting for the script's end")?;
            match line.strip_prefix("aryk-done ") {
                Some("0") => break,
                Some(status) => bail!("the script failed with {status}\n{}", self.last_words()),
                None => self.take(line, deadline)?,
            }
        }
        let status = self.qemu.wait(deadline.saturating_duration_since(Instant::now()))?;
        ensure!(status.success(), "QEMU ended with {status}\n{}", self.last_words());
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

    /// Sends QEMU a signal: `STOP` and `CONT` freeze and thaw the whole machine.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        self.qemu.signal(signal)
    }

    /// Begins to move the running machine to the QEMU that waits for it at `socket` ([`Machine::incoming`]). Returns when all of its memory has
    /// gone there once. What it writes from then on goes again, and again, until [`Move::end`].
    ///
    /// # Errors
    /// There is no such QEMU, this one refuses, or it takes longer than a minute.
    pub fn begin_move(&self, socket: &Path) -> Result<Move> {
        wait_until("the QEMU to move to", Duration::from_secs(20), || Ok(socket.exists().then_some(())))?;
        let mut qmp = Qmp::connect(&self.monitor)?;
        // So short, in milliseconds, that a machine that does anything never arrives.
        qmp.call("migrate-set-parameters", &json!({"downtime-limit": 1, "max-bandwidth": 64 << 20}))?;
        qmp.call("migrate", &json!({"uri": format!("unix:{}", socket.display())}))?;
        wait_until("the machine's memory to go", Duration::from_secs(60), || {
            let info = qmp.call("query-migrate", &json!({}))?;
            let passes_begun = info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
            Ok((passes_begun >= 2).then_some(()))
        })?;
        Ok(Move(qmp))
    }

    /// Has QEMU hold all of the machine's processors: its script stands still, while QEMU itself goes on.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn freeze(&self) -> Result<()> {
        Qmp::connect(&self.monitor)?.call("stop", &json!({})).map(drop)
    }

    /// Has the processors go on.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn thaw(&self) -> Result<()> {
        Qmp::connect(&self.monitor)?.call("cont", &json!({})).map(drop)
    }

    /// Kills QEMU, as a crash would.
    pub fn kill(mut self) {
        self.qemu.kill();
    }

    /// Files a line of output away; a published file's lines are collected up to its end.
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
            None => bail!("out of time\n{}", self.last_words()),
        }
    }

    /// The script's next line of output, and when it came, if there is one in time.
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
                    bail!("QEMU ended before the script\n{}", self.last_words())
                }
            }
        }
    }

    /// What it said last, to explain a failure.
    pub(crate) fn last_words(&self) -> String {
        let said = self.report.lines.join("\n");
        let console = tail(&self.console, 30);
        format!("script: {said}\nconsole: {console}\nqemu: {}", self.qemu.last_words())
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
