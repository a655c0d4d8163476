//! Serves an NVMe drive at /dev/NAME, and its namespaces at /dev/NAMEnN, while a command runs, by the driver of this project.
//!
//!     cargo run -p aryk-cuse --example cuse -- 0000:3d:00.0 drive smartctl -a -d nvme /dev/drive
//!     # Callers may change the drive.
//!     cargo run -p aryk-cuse --example cuse -- --change /run/vfio-user.sock drive nvme format --force -n 1 /dev/drive
//!     # No command is answered, as by a drive that hangs.
//!     cargo run -p aryk-cuse --example cuse -- --hang 0000:3d:00.0 drive nvme id-ctrl /dev/drive

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use aryk_cuse::{
    Access, AdminCommand, Answer, Caller, Completion, Data, Device, Errno, Node, NvmeDevice, Request,
};
use aryk_nvme::admin;
use aryk_nvme::controller::{AdminAnswer, Controller, End, Event, Options, Refused, ResetReason};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::register::Shutdown;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Address, Function, vfio_user};

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<(), Box<dyn Error>> {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let mut option = |name: &str| {
        let is_first = words.first().is_some_and(|word| word == name);
        words.drain(..usize::from(is_first));
        is_first
    };
    let access = if option("--change") { Access::Change } else { Access::Read };
    let hangs = option("--hang");
    let [place, name, program, arguments @ ..] = &words[..] else {
        return Err("usage: cuse [--change] [--hang] ADDRESS|SOCKET NAME COMMAND…".into());
    };
    let function: Arc<dyn Function> = match place.parse::<Address>() {
        Ok(address) => Arc::new(Vfio::new().open(address)?),
        Err(_) => Arc::new(vfio_user::Client::connect(Path::new(place))?),
    };
    let clock = Clock::start();
    let controller = Controller::attach(function, Options::default(), clock.now())?;
    let (sender, requests) = channel();
    let mut drive = Drive { controller, clock, requests, hangs, commands: BTreeMap::new(), kept: Vec::new() };
    drive.run(|drive| drive.controller.is_ready().then_some(()))?;

    let owner: Arc<dyn NvmeDevice> = Arc::new(Owner(sender));
    let mut devices = vec![Device::create(name, Node { nsid: None, access }, Arc::clone(&owner))?];
    for listed in drive.controller.namespaces() {
        let nsid = Some(listed.nsid);
        let name = format!("{name}n{}", listed.nsid);
        devices.push(Device::create(&name, Node { nsid, access }, Arc::clone(&owner))?);
    }
    let mut child = Command::new(program).args(arguments).spawn()?;
    let status: ExitStatus = drive.run(|_| child.try_wait().ok().flatten())?;

    let before = clock.now();
    drop(devices);
    println!("removed /dev/{name} in {} ms", (clock.now() - before) / 1_000_000);
    drive.controller.shut_down(Shutdown::Normal, clock.now());
    drive.run(|drive| (drive.controller.next_poll(0) == u64::MAX).then_some(()))?;
    if status.success() { Ok(()) } else { Err(format!("{program}: {status}").into()) }
}

/// Passes requests to the thread that has the controller.
struct Owner(Sender<(Request, Caller, Answer)>);

impl NvmeDevice for Owner {
    fn serve(&self, request: Request, caller: Caller, answer: Answer) {
        // Without a receiver, the answer is dropped, and the caller receives EIO.
        let _ = self.0.send((request, caller, answer));
    }
}

/// The controller, with the answers that it owes.
struct Drive {
    controller: Controller,
    clock: Clock,
    requests: Receiver<(Request, Caller, Answer)>,
    /// No request reaches the controller.
    hangs: bool,
    /// By the number of the command.
    commands: BTreeMap<u64, Answer>,
    /// Of resets, and of the requests to a drive that hangs.
    kept: Vec<Answer>,
}

impl Drive {
    /// Drives the controller and serves requests until `find` finds what it looks for.
    fn run<T>(&mut self, mut find: impl FnMut(&mut Self) -> Option<T>) -> Result<T, Box<dyn Error>> {
        loop {
            while let Some(event) = self.controller.poll(self.clock.now()) {
                self.take(event)?;
            }
            while let Ok((request, caller, answer)) = self.requests.try_recv() {
                self.begin(request, caller, answer);
            }
            if let Some(found) = find(self) {
                return Ok(found);
            }
            self.clock.sleep();
        }
    }

    fn begin(&mut self, request: Request, caller: Caller, answer: Answer) {
        let now = self.clock.now();
        match request {
            _ if self.hangs => self.kept.push(answer),
            Request::Admin(command) => {
                if command.is_change() {
                    println!("process {} sends opcode {:#x}", caller.pid, command.opcode);
                }
                match self.controller.admin(&translate(command), now) {
                    Ok(id) => drop(self.commands.insert(id, answer)),
                    Err(Refused::Busy) => answer.complete(Err(Errno::BUSY)),
                    Err(Refused::NotReady) => answer.complete(Err(Errno::AGAIN)),
                    Err(Refused::TooLong(_)) => answer.complete(Err(Errno::MSGSIZE)),
                    Err(_) => answer.complete(Err(Errno::IO)),
                }
            }
            Request::Reset => {
                self.controller.reset(ResetReason::Request, now);
                self.kept.push(answer);
            }
            // The controller reports changed namespaces by an event, after which the driver reads them.
            Request::Rescan => answer.complete(Ok(Completion::default())),
        }
    }

    fn take(&mut self, event: Event) -> Result<(), Box<dyn Error>> {
        match event {
            Event::Admin { id, answer } => {
                if let Some(waiting) = self.commands.remove(&id) {
                    waiting.complete(answer.map(completion).ok_or(Errno::IO));
                }
            }
            Event::Recovered { .. } => {
                self.kept.drain(..).for_each(|reset| reset.complete(Ok(Completion::default())));
            }
            Event::Ended(End::Failed(failure)) => return Err(failure.into()),
            _ => {}
        }
        Ok(())
    }
}

fn translate(command: AdminCommand) -> admin::Command {
    let [cdw10, cdw11, cdw12, cdw13, cdw14, cdw15] = command.cdw10_15;
    let entry = SubmissionEntry::new(command.opcode, command.nsid)
        .with_cdw10_11(cdw10, cdw11)
        .with_cdw12_13(cdw12, cdw13)
        .with_cdw14_15(cdw14, cdw15);
    let patience = if command.is_change() { admin::Patience::Long } else { admin::Patience::Normal };
    let data = match command.data {
        Data::None => admin::Data::None,
        Data::FromController(len) => admin::Data::FromController(len),
        Data::ToController(bytes) => admin::Data::ToController(bytes),
    };
    admin::Command { entry, data, patience }
}

fn completion(answer: AdminAnswer) -> Completion {
    Completion { status: answer.status.bits(), result: answer.result, data: answer.data }
}

/// Time since the start of the program.
#[derive(Clone, Copy)]
struct Clock(Instant);

#[expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]
impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn now(self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    fn sleep(self) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
