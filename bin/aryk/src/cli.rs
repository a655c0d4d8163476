//! The arguments.

mod examples;

use crate::bench::BenchArgs;
use crate::completion::{controllers, disks, disks_and_controllers, groups, methods};
use crate::limits::Limits;
use crate::size::Size;
use crate::top::TopArgs;
use crate::watch::Watch;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::{ArgValueCandidates, Shell};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Disks for virtual machines, served by arykd.
#[derive(Debug, Parser)]
#[command(name = "aryk", version, max_term_width = 80, after_help = examples::EXIT_CODES)]
pub struct Cli {
    /// The daemon's RPC socket
    #[arg(short, long, global = true, env = "ARYK_SOCKET", default_value_os_t = default_socket())]
    pub socket: PathBuf,

    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,

    /// Seconds to wait for the daemon's answer
    #[arg(long, global = true, default_value = "30", value_parser = seconds)]
    pub timeout: Duration,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// How often to show it again.
    pub const fn watch(&self) -> Option<Duration> {
        match self.command {
            Command::Disk(DiskCommand::List(watch) | DiskCommand::Stat { watch, .. })
            | Command::Controller(ControllerCommand::List(watch))
            | Command::Qos(QosCommand::List(watch) | QosCommand::Group(GroupCommand::List(watch)))
            | Command::Reactor(ReactorCommand::List(watch))
            | Command::Scheduler(SchedulerCommand::Show(watch))
            | Command::Trace { watch, .. }
            | Command::Latency { watch, .. }
            | Command::Status(watch) => watch.every,
            _ => None,
        }
    }
}

/// The service's socket where it is installed, and otherwise that of a daemon that was started by hand.
pub fn default_socket() -> PathBuf {
    let service = PathBuf::from("/run/aryk/rpc.sock");
    if service.exists() { service } else { "/var/tmp/spdk.sock".into() }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make, list and remove disks
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Offer a disk to a virtual machine
    #[command(after_help = examples::ATTACH)]
    Attach(AttachArgs),
    /// Take disks back from their virtual machines
    Detach {
        /// The controllers, or the disks
        #[arg(required = true, value_name = "NAME", add = ArgValueCandidates::new(disks_and_controllers))]
        names: Vec<String>,
        /// Take them away even if a VM is connected: what it has not written is lost
        #[arg(long)]
        force: bool,
    },
    /// List the controllers, through which virtual machines reach disks
    #[command(subcommand)]
    Controller(ControllerCommand),
    /// Limit what disks do in a second, each by itself or in groups
    #[command(subcommand)]
    Qos(QosCommand),
    /// Make disks and controllers as a file describes them
    #[command(after_help = examples::APPLY)]
    Apply(ApplyArgs),
    /// Write a file that describes all disks and controllers, for 'apply'
    Export,
    /// Show how the daemon is
    Status(Watch),
    /// Show what the daemon has logged
    Logs(LogsArgs),
    /// End the daemon in good order: what runs is finished first
    Stop {
        /// Even if VMs are connected, whose disks do not answer until a daemon is back, and if a disk's file is deleted: its data is lost
        #[arg(long)]
        force: bool,
    },
    /// List, add and remove reactors, the threads that carry the I/O
    #[command(subcommand)]
    Reactor(ReactorCommand),
    /// Choose who says which queue runs on which reactor
    #[command(subcommand)]
    Scheduler(SchedulerCommand),
    /// Measure a disk through its vhost-user socket, as a virtual machine would use it
    Bench(BenchArgs),
    /// Show what disks, controllers and reactors do, live
    Top(TopArgs),
    /// Show where a disk's time goes, layer by layer
    Latency {
        /// The disk
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        #[command(flatten)]
        watch: Watch,
    },
    /// Show what happened to requests last, layer by layer
    Trace {
        /// The disk; its queues and others with this in their names are shown too [without: all]
        #[arg(add = ArgValueCandidates::new(disks_and_controllers))]
        disk: Option<String>,
        /// How many events
        #[arg(long, value_name = "N", default_value = "50")]
        count: u32,
        #[command(flatten)]
        watch: Watch,
    },
    /// Look at what this host has, what it lacks, and say how to mend it
    Doctor,
    /// Call any JSON-RPC method
    #[command(disable_help_flag = true, after_help = examples::RPC)]
    Rpc {
        /// Its name; rpc_get_methods lists them
        #[arg(required_unless_present = "help", add = ArgValueCandidates::new(methods))]
        method: Option<String>,
        /// Its parameters as a JSON object; '-' reads them from the standard input
        params: Option<String>,
        /// Print help; of a method, if one is named: what it takes and gives, and an example
        #[arg(short, long)]
        help: bool,
    },
    /// Write manual pages into a directory
    Man {
        /// Where to
        dir: PathBuf,
    },
    /// Print a script that completes commands, and names of disks, in a shell
    #[command(after_help = examples::COMPLETION)]
    Completions {
        /// Which shell
        shell: Shell,
    },
}

/// Commands about disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Make a disk
    #[command(after_help = examples::CREATE)]
    Create(CreateArgs),
    /// List all disks
    List(Watch),
    /// Show all about one disk
    Show {
        /// Its name, alias or uuid
        #[arg(add = ArgValueCandidates::new(disks))]
        name: String,
    },
    /// Remove disks; their files stay
    Remove {
        /// Their names, aliases or uuids
        #[arg(required = true, value_name = "NAME", add = ArgValueCandidates::new(disks))]
        names: Vec<String>,
        /// Remove them even if they are used, with the disks made of them and their controllers: VMs that are connected lose them, and data whose file is deleted is lost
        #[arg(long)]
        force: bool,
    },
    /// Make a disk in a file larger; its machine is told
    Resize {
        /// Its name, alias or uuid
        #[arg(add = ArgValueCandidates::new(disks))]
        name: String,
        /// The new size: 40G
        size: Size,
    },
    /// Show what disks have done; with --watch, what they do per second
    Stat {
        /// Only this one
        #[arg(add = ArgValueCandidates::new(disks))]
        name: Option<String>,
        #[command(flatten)]
        watch: Watch,
    },
}

/// Arguments of `disk create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The new disk's name
    pub name: String,
    #[command(flatten)]
    pub kind: KindArgs,
    /// Make the file, a new one, of this raw or qcow2 image; it is sparse
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["memory", "null", "readonly"])]
    pub from: Option<PathBuf>,
    /// The image's format, as qemu-img calls it [default: what it begins with]. Name it for images that you do not trust
    #[arg(long, value_name = "FORMAT", requires = "from")]
    pub from_format: Option<String>,
    /// How large: 20G, 1.5T, 512M (powers of 1024), 20GB (of 1000). A file that does not exist is made sparse, of this size
    #[arg(long, required_if_eq_any([("memory", "true"), ("null", "true")]))]
    pub size: Option<Size>,
    /// Bytes of a block: 512 or 4096
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u32>,
    /// Refuse all writes
    #[arg(long, conflicts_with_all = ["memory", "null"])]
    pub readonly: bool,
    /// When the file's file system is full: fail the write, or hold it and try again
    #[arg(long, value_enum, conflicts_with_all = ["memory", "null"])]
    pub enospc: Option<Enospc>,
    /// Keep others from the file: always, or only while a machine is connected, so that two daemons can have it and a
    /// machine be moved between them
    #[arg(long, value_enum, conflicts_with_all = ["memory", "null"])]
    pub lock: Option<Lock>,
    /// Its uuid, instead of a random one
    #[arg(long)]
    pub uuid: Option<String>,
}

/// Where a disk's data lives.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct KindArgs {
    /// Keep the data in this file or block device
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Keep the data in memory: gone when the daemon ends
    #[arg(long)]
    pub memory: bool,
    /// Keep nothing: for measuring
    #[arg(long)]
    pub null: bool,
}

/// For how long others are kept from a disk's file.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    Always,
    InUse,
}

impl Lock {
    /// As the daemon calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::InUse => "in_use",
        }
    }
}

/// What a full file system does to a write.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Enospc {
    Error,
    Hold,
}

impl Enospc {
    /// As the daemon calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Hold => "hold",
        }
    }
}

/// Arguments of `attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The disk
    #[arg(add = ArgValueCandidates::new(disks))]
    pub disk: String,
    /// The controller's name, and its socket's [default: the disk's name]
    #[arg(long, value_name = "NAME", add = ArgValueCandidates::new(controllers))]
    pub controller: Option<String>,
    /// Queues [default: one for each of the machine's processors, up to 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues: Option<u16>,
    /// Cores that may serve it: 0x3 or [0,2-3] [default: all]
    #[arg(long, value_name = "CORES")]
    pub cpumask: Option<String>,
    /// Let the machine read only
    #[arg(long)]
    pub readonly: bool,
    /// Offer a disk that another controller offers, too: for file systems of clusters (OCFS2, GFS2) only, others are destroyed
    #[arg(long)]
    pub shared: bool,
    /// Be a disk of a SCSI controller, which is made if there is none of that name: up to eight come and go while the machine runs
    #[arg(long, conflicts_with = "readonly")]
    pub scsi: bool,
    /// Which of the SCSI controller's eight targets [default: the first that is free]
    #[arg(long, value_name = "N", requires = "scsi", value_parser = clap::value_parser!(u8).range(..8))]
    pub target: Option<u8>,
    /// What disks know the SCSI controller by when its machine reserves them: 'naa.' and 16 hexadecimal digits [default: made of its name]
    #[arg(long, value_name = "NAA", requires = "scsi")]
    pub transport_id: Option<String>,
    /// Connect to this socket, at which QEMU listens, instead of listening: the machine can start before, and outlives, the daemon
    #[arg(long, value_name = "PATH", conflicts_with_all = ["socket_mode", "socket_owner", "socket_group"])]
    pub connect: Option<PathBuf>,
    /// The socket's permissions [default: 660 with --socket-group, and 600 otherwise]
    #[arg(long, value_name = "OCTAL", value_parser = mode)]
    pub socket_mode: Option<u32>,
    /// The socket's owner: a user's name or number
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,
    /// The socket's group, which may connect unless --socket-mode says otherwise: a name or number
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Go on as there is more
    #[arg(short, long)]
    pub follow: bool,
    /// How many lines to begin with
    #[arg(short = 'n', long, value_name = "N", default_value = "50")]
    pub lines: u32,
}

/// Arguments of `apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// A TOML or JSON file, as 'export' writes it, or SPDK's JSON; '-' is the standard input
    pub file: PathBuf,
    /// Only show what would be done; exit with 2 if that is anything
    #[arg(long)]
    pub plan: bool,
    /// Remove disks and controllers that are not in the file; files stay
    #[arg(long)]
    pub prune: bool,
    /// Make anew what cannot be changed in place: machines lose it for a moment, disks in memory lose their data
    #[arg(long)]
    pub replace: bool,
    /// With --prune or --replace: even what a connected VM uses, and data whose file is deleted
    #[arg(long)]
    pub force: bool,
}

/// Commands about controllers.
#[derive(Debug, Subcommand)]
pub enum ControllerCommand {
    /// List all controllers
    List(Watch),
}

/// Commands about limits.
#[derive(Debug, Subcommand)]
pub enum QosCommand {
    /// Limit a disk; what is not given stays as it is
    #[command(after_help = examples::QOS)]
    Set {
        /// The disk
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// List the disks that are limited
    List(Watch),
    /// Limit disks together
    #[command(subcommand)]
    Group(GroupCommand),
}

/// Commands about groups of disks.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Make a group
    Create {
        /// Its name
        name: String,
        /// The group that it is in
        #[arg(long, value_name = "GROUP")]
        parent: Option<String>,
        #[command(flatten)]
        limits: Limits,
    },
    /// Limit a group; what is not given stays as it is
    Set {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        name: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// Put disks into a group, from whichever they are in
    Add {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        group: String,
        /// The disks
        #[arg(required = true, value_name = "DISK", add = ArgValueCandidates::new(disks))]
        disks: Vec<String>,
    },
    /// Take disks out of a group
    Remove {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        group: String,
        /// The disks
        #[arg(required = true, value_name = "DISK", add = ArgValueCandidates::new(disks))]
        disks: Vec<String>,
    },
    /// Delete a group in which there is nothing
    Delete {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        name: String,
    },
    /// List all groups
    List(Watch),
}

/// Commands about reactors.
#[derive(Debug, Subcommand)]
pub enum ReactorCommand {
    /// List all reactors
    List(Watch),
    /// Start one on another core, until the daemon ends
    Add {
        /// The core's number
        core: u16,
    },
    /// End one, when all that it does has been given to the others
    Remove {
        /// The core's number
        core: u16,
    },
}

/// Commands about the scheduler.
#[derive(Debug, Subcommand)]
pub enum SchedulerCommand {
    /// Show which one there is, and what it has done
    Show(Watch),
    /// Choose one; what is not given stays as it is
    Set {
        /// 'static': queues stay where they are. 'dynamic': they leave busy reactors, and come together when idle
        name: SchedulerName,
        /// Time between two decisions, such as 100ms
        #[arg(long, value_name = "TIME", value_parser = crate::bench::time)]
        period: Option<Duration>,
        /// A queue that is less busy than that is nearly idle
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
        load_limit: Option<u8>,
        /// No reactor is filled over that
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
        core_limit: Option<u8>,
        /// Queues leave a reactor that is as busy as that
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
        core_busy: Option<u8>,
    },
}

/// The schedulers.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SchedulerName {
    /// Queues stay where they are
    Static,
    /// They leave busy reactors, and come together when idle
    Dynamic,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds.into())),
        _ => Err("a whole number of seconds, at least 1".into()),
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ ..=0o777) => Ok(mode),
        _ => Err("octal digits, such as 660".into()),
    }
}

#[cfg(test)]
mod tests;
