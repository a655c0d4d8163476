//! Command-line arguments.

pub mod examples;

use crate::bench::BenchArgs;
use crate::commands::luks::LuksCommand;
use crate::commands::nvme::NvmeCommand;
use crate::commands::nvme::drive::{DriveCommand, NamespaceAddress};
use crate::commands::pool::PoolCommand;
use crate::commands::snapshot::SnapshotCommand;
use crate::commands::volume::VolumeCommand;
use crate::completion::{controllers, disks, disks_and_controllers, groups, keys, methods};
use crate::doctor::Subject;
use crate::image::ImageSpec;
use crate::limits::Limits;
use crate::size::Size;
use crate::top::TopArgs;
use crate::watch::Watch;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::{ArgValueCandidates, Shell};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Control arykd, the back-end for virtual machines' disks.
#[derive(Debug, Parser)]
#[command(name = "aryk", version, max_term_width = 80, after_help = examples::EXIT_CODES)]
pub struct Cli {
    /// The daemon's RPC socket
    #[arg(short, long, global = true, env = "ARYK_SOCKET", default_value_os_t = default_socket())]
    pub socket: PathBuf,

    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,

    /// Seconds to wait for a reply of the daemon
    #[arg(long, global = true, default_value = "30", value_parser = seconds)]
    pub timeout: Duration,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The interval of `--watch`.
    pub const fn watch(&self) -> Option<Duration> {
        match self.command {
            Command::Disk(DiskCommand::List(watch) | DiskCommand::Stat { watch, .. })
            | Command::Controller(ControllerCommand::List(watch))
            | Command::Qos(QosCommand::List(watch) | QosCommand::Group(GroupCommand::List(watch)))
            | Command::Nvme(
                NvmeCommand::List(watch) | NvmeCommand::Drive(DriveCommand::Smart { watch, .. }),
            )
            | Command::Reactor(ReactorCommand::List(watch))
            | Command::Pool(PoolCommand::List(watch))
            | Command::Volume(VolumeCommand::List(watch))
            | Command::Snapshot(SnapshotCommand::List(watch))
            | Command::Scheduler(SchedulerCommand::Show(watch))
            | Command::Trace { watch, .. }
            | Command::Latency { watch, .. }
            | Command::Memory(watch)
            | Command::Hosts(watch)
            | Command::Status(watch) => watch.every,
            _ => None,
        }
    }
}

/// The service's socket if the service is installed, otherwise the socket of a daemon started by hand.
pub fn default_socket() -> PathBuf {
    let service = PathBuf::from("/run/aryk/rpc.sock");
    if service.exists() { service } else { "/var/tmp/spdk.sock".into() }
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create, list and remove disks
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Create and delete pools, which have volumes
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Create, clone and delete volumes: thin disks in a pool, with snapshots
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Take, revert to and delete snapshots of volumes
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Encrypt disks behind LUKS headers, and unlock them
    #[command(subcommand)]
    Luks(LuksCommand),
    /// Attach a disk to a virtual machine: create a controller
    #[command(after_help = examples::ATTACH)]
    Attach(AttachArgs),
    /// Detach disks from their virtual machines: remove controllers
    Detach {
        /// The controllers, or their disks
        #[arg(required = true, value_name = "NAME", add = ArgValueCandidates::new(disks_and_controllers))]
        names: Vec<String>,
        /// Detach even if a VM is connected: data that it has not written yet is lost
        #[arg(long)]
        force: bool,
    },
    /// Share a disk with hosts on the network, over NVMe/TCP
    #[command(after_help = examples::SHARE)]
    Share(ShareArgs),
    /// Share a disk no longer
    Unshare(UnshareArgs),
    /// List the shared disks, and the hosts that use them
    Hosts(Watch),
    /// Create, list and delete the keys of encrypted disks
    #[command(subcommand)]
    Key(KeyCommand),
    /// List the controllers, through which VMs use disks
    #[command(subcommand)]
    Controller(ControllerCommand),
    /// Limit the rates of disks, one by one or in groups
    #[command(subcommand)]
    Qos(QosCommand),
    /// Create disks and controllers as described in a file
    #[command(after_help = examples::APPLY)]
    Apply(ApplyArgs),
    /// Write a file of all disks and controllers, for 'apply'
    Export,
    /// Show the daemon's state
    Status(Watch),
    /// Show the daemon's log
    Logs(LogsArgs),
    /// Stop the daemon in order: requests in flight complete first
    Stop {
        /// Stop even if VMs are connected, whose disks do not respond until a daemon runs again, and even if the data of a
        /// deleted file is lost
        #[arg(long)]
        force: bool,
    },
    /// List, add and remove reactors, the threads that do the I/O
    #[command(subcommand)]
    Reactor(ReactorCommand),
    /// Choose the scheduler, which assigns queues to reactors
    #[command(subcommand)]
    Scheduler(SchedulerCommand),
    /// Show the devices that access VMs' memory by themselves, and the memory that they cannot access
    #[command(after_help = examples::MEMORY)]
    Memory(Watch),
    /// Measure a disk through its vhost-user socket, as a VM uses it
    Bench(BenchArgs),
    /// Show the activity of disks, controllers and reactors, live
    Top(TopArgs),
    /// Show a disk's latency, layer by layer
    Latency {
        /// The disk
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        #[command(flatten)]
        watch: Watch,
    },
    /// Show the latest events of requests, layer by layer
    Trace {
        /// The disk; queues and other objects with this text in their names are shown too [without: all]
        #[arg(add = ArgValueCandidates::new(disks_and_controllers))]
        disk: Option<String>,
        /// Number of events
        #[arg(long, value_name = "N", default_value = "50")]
        count: u32,
        #[command(flatten)]
        watch: Watch,
    },
    /// List the NVMe drives of this host, and choose those that Aryk drives itself
    #[command(subcommand)]
    Nvme(NvmeCommand),
    /// Check this host's setup, and say how to correct problems
    Doctor {
        #[command(subcommand)]
        subject: Option<Subject>,
    },
    /// Call any JSON-RPC method
    #[command(disable_help_flag = true, after_help = examples::RPC)]
    Rpc {
        /// The method's name; rpc_get_methods lists all
        #[arg(required_unless_present = "help", add = ArgValueCandidates::new(methods))]
        method: Option<String>,
        /// The method's parameters as a JSON object; '-' reads them from the standard input
        params: Option<String>,
        /// Print help; with a method, its parameters, its result and an example
        #[arg(short, long)]
        help: bool,
    },
    /// Write manual pages into a directory
    Man {
        /// The directory
        dir: PathBuf,
    },
    /// Print a shell script that completes commands and names of disks
    #[command(after_help = examples::COMPLETION)]
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Commands for disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create a disk
    #[command(
        after_help = examples::CREATE,
        override_usage = "aryk disk create [OPTIONS] <NAME>\n       <--file|--memory|--null|--nvme|--nvme-tcp|--nvme-rdma|--rbd>"
    )]
    Create(Box<CreateArgs>),
    /// List all disks
    List(Watch),
    /// Show all details of a disk
    Show {
        /// The disk's name, alias or uuid
        #[arg(add = ArgValueCandidates::new(disks))]
        name: String,
    },
    /// Remove disks; their files stay
    Remove {
        /// The disks' names, aliases or uuids
        #[arg(required = true, value_name = "NAME", add = ArgValueCandidates::new(disks))]
        names: Vec<String>,
        /// Remove them even if they are in use, with the disks on top of them and their controllers: connected VMs lose them, and
        /// the data of a deleted file is lost
        #[arg(long)]
        force: bool,
    },
    /// Grow a disk in a file; its VM is notified
    Resize {
        /// The disk's name, alias or uuid
        #[arg(add = ArgValueCandidates::new(disks))]
        name: String,
        /// The new size: 40G
        size: Size,
    },
    /// Encrypt a disk with another key, while VMs use it
    #[command(after_help = examples::REKEY, override_usage = "aryk disk rekey [OPTIONS] <NAME> <KEY|--stop>")]
    Rekey(RekeyArgs),
    /// Show counts of disks; with --watch, rates per second
    Stat {
        /// Only this disk
        #[arg(add = ArgValueCandidates::new(disks))]
        name: Option<String>,
        #[command(flatten)]
        watch: Watch,
    },
}

/// Arguments of `disk create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the new disk
    pub name: String,
    #[command(flatten)]
    pub kind: KindArgs,
    /// Create the file from this raw or qcow2 image; the new file is sparse
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["memory", "null", "readonly"])]
    pub from: Option<PathBuf>,
    /// Format of the image, as in qemu-img [default: detected]. Give it for images that you do not trust
    #[arg(long, value_name = "FORMAT", requires = "from")]
    pub from_format: Option<String>,
    /// Size: 20G, 1.5T, 512M (powers of 1024), 20GB (of 1000). A file that does not exist is created sparse, with this size
    #[arg(long, required_if_eq_any([("memory", "true"), ("null", "true")]))]
    pub size: Option<Size>,
    /// Block size in bytes: 512 or 4096
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u32>,
    /// Refuse all writes
    #[arg(long, conflicts_with_all = ["memory", "null"])]
    pub readonly: bool,
    /// If the file's file system is full: fail the write, or hold and retry it
    #[arg(long, value_enum, conflicts_with_all = ["memory", "null"])]
    pub enospc: Option<Enospc>,
    /// Lock the file against other processes: always, or only while a VM is connected, so that two daemons can open it and a VM
    /// can migrate between them
    #[arg(long, value_enum, conflicts_with_all = ["memory", "null"])]
    pub lock: Option<Lock>,
    /// The disk's uuid, instead of a random one
    #[arg(long)]
    pub uuid: Option<String>,
    /// Encrypt the data by this key of 'aryk key create'. A second disk, NAME.store, has the encrypted data, and is removed
    /// together with this one. Data that the file has already reads as random bytes
    #[arg(long, value_name = "KEY", conflicts_with_all = ["from", "uuid"], add = ArgValueCandidates::new(keys))]
    pub encrypt: Option<String>,
    /// Encrypt also a disk that has a file system, a partition table or another known format, which is lost
    #[arg(long, requires = "encrypt")]
    pub overwrite: bool,
    /// Create the Ceph image with this size, such as 20G, if there is none
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["file", "memory", "null", "nvme", "nvme_tcp", "nvme_rdma", "readonly"])]
    pub create: Option<Size>,
    /// Ceph's configuration file [default: that of Ceph's own programs]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "memory", "null", "nvme", "nvme_tcp", "nvme_rdma"])]
    pub conf: Option<PathBuf>,
    /// Ceph's user, without 'client.' [default: admin]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["file", "memory", "null", "nvme", "nvme_tcp", "nvme_rdma"])]
    pub user: Option<String>,
    /// Name of a key in the daemon's keyring ('keyring_file_add_key'): of Ceph's user [default: Ceph's own key file of the
    /// user], or the secret by which this host proves to the other who it is
    #[arg(long, value_name = "NAME", conflicts_with_all = ["file", "memory", "null", "nvme"])]
    pub key: Option<String>,
    /// A client of 'bdev_rbd_register_cluster', instead of the one that all disks of the same user and configuration share
    #[arg(long, value_name = "NAME", conflicts_with_all = ["file", "memory", "null", "nvme", "nvme_tcp", "nvme_rdma", "conf", "user", "key"])]
    pub cluster: Option<String>,
    /// Which memory of VMs the NVMe drive accesses by itself [default: auto]. With --nvme-rdma: by 'pin', the other host can read
    /// and write all memory of VMs at any time [default: bounce]
    #[arg(long, value_enum, conflicts_with_all = ["file", "memory", "null", "nvme_tcp", "rbd"])]
    pub dma: Option<Dma>,
    /// The subsystem of the other host: 'aryk share' prints it there
    #[arg(long, value_name = "NQN", conflicts_with_all = ["file", "memory", "null", "nvme", "rbd"])]
    pub subsystem: Option<String>,
    /// The namespace of the subsystem [default: 1]
    #[arg(long, value_name = "NSID", conflicts_with_all = ["file", "memory", "null", "nvme", "rbd"])]
    pub ns: Option<u32>,
    /// The name by which this host connects, if the other host allows only some [default: a random one]
    #[arg(long, value_name = "NQN", conflicts_with_all = ["file", "memory", "null", "nvme", "rbd"])]
    pub host_nqn: Option<String>,
    /// Name of the secret by which the other host is to prove who it is
    #[arg(long, value_name = "NAME", requires = "key", conflicts_with_all = ["file", "memory", "null", "nvme", "rbd"])]
    pub controller_key: Option<String>,
    /// Name of the TLS key that this host and the other share: the connection is encrypted
    #[arg(long, value_name = "NAME", conflicts_with_all = ["file", "memory", "null", "nvme", "nvme_rdma", "rbd"])]
    pub tls_key: Option<String>,
}

/// Arguments of `disk rekey`.
#[derive(Debug, Args)]
pub struct RekeyArgs {
    /// The disk's name, alias or uuid
    #[arg(add = ArgValueCandidates::new(disks))]
    pub name: String,
    /// The new key, of 'aryk key create'; to continue a rotation, the same key
    #[arg(required_unless_present = "stop", add = ArgValueCandidates::new(keys))]
    pub key: Option<String>,
    /// Bytes of the disk that are encrypted again in a second, at most: 200M [default: no limit]
    #[arg(long, value_name = "BYTES")]
    pub bandwidth: Option<Size>,
    /// Wait until the disk has the new key only
    #[arg(long)]
    pub wait: bool,
    /// Stop the rotation. The disk then needs both keys
    #[arg(long, conflicts_with_all = ["key", "bandwidth", "wait"])]
    pub stop: bool,
}

/// The store of a disk.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct KindArgs {
    /// Store the data in this file or block device
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Store the data in memory: lost when the daemon ends
    #[arg(long)]
    pub memory: bool,
    /// Store no data: for measurements
    #[arg(long)]
    pub null: bool,
    /// Store the data in a namespace of an NVMe drive, which the daemon then drives itself: 0000:3d:00.0, or 0000:3d:00.0:2 for
    /// namespace 2. The drive must be bound to vfio-pci: 'aryk nvme bind'
    #[arg(long, value_name = "PCI[:NSID]", conflicts_with_all = ["block_size", "from", "readonly", "enospc", "lock", "size", "uuid"])]
    pub nvme: Option<NamespaceAddress>,
    /// Use a disk that another host shares over NVMe/TCP: the IP address and the port of its target. Repeat it for several paths
    #[arg(
        long,
        value_name = "ADDR:PORT",
        requires = "subsystem",
        conflicts_with_all = ["block_size", "from", "readonly", "enospc", "lock", "size", "uuid", "encrypt"]
    )]
    pub nvme_tcp: Vec<SocketAddr>,
    /// As --nvme-tcp, for a disk that another host shares over NVMe/RDMA
    #[arg(
        long,
        value_name = "ADDR:PORT",
        requires = "subsystem",
        conflicts_with_all = ["block_size", "from", "readonly", "enospc", "lock", "size", "uuid", "encrypt"]
    )]
    pub nvme_rdma: Vec<SocketAddr>,
    /// Store the data in an image of a Ceph cluster: POOL/IMAGE, POOL/NAMESPACE/IMAGE, or a snapshot, POOL/IMAGE@SNAPSHOT
    #[arg(long, value_name = "POOL/IMAGE", conflicts_with_all = ["from", "enospc", "lock", "size"])]
    pub rbd: Option<ImageSpec>,
}

/// Commands for keys.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Create a key for AES-XTS: random, unless a file has it
    #[command(after_help = examples::KEY)]
    Create(KeyCreateArgs),
    /// List the keys, and the disks that use them
    List,
    /// Delete keys that no disk uses: data that was encrypted by them cannot be read any more
    Delete {
        /// The keys
        #[arg(required = true, value_name = "NAME", add = ArgValueCandidates::new(keys))]
        names: Vec<String>,
    },
}

/// Arguments of `key create`.
#[derive(Debug, Args)]
pub struct KeyCreateArgs {
    /// Name of the new key
    pub name: String,
    /// Bits of AES [default: 256]
    #[arg(long, value_enum, conflicts_with = "from_file")]
    pub bits: Option<KeyBits>,
    /// Take the key from this file: 32 or 64 bytes, or 64 or 128 hexadecimal digits, the key of the data before the key of the
    /// tweaks; '-' is the standard input
    #[arg(long, value_name = "FILE")]
    pub from_file: Option<PathBuf>,
    /// How the position of data on a disk becomes its tweak, as in SPDK [default: simple-lba]
    #[arg(long, value_enum, value_name = "MODE")]
    pub tweak_mode: Option<TweakMode>,
}

/// Bits of a key of AES; AES-XTS has two keys.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum KeyBits {
    #[value(name = "128")]
    Bits128,
    #[value(name = "256")]
    Bits256,
}

impl KeyBits {
    pub const fn number(self) -> u64 {
        match self {
            Self::Bits128 => 128,
            Self::Bits256 => 256,
        }
    }
}

/// How the position of data becomes its tweak.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum TweakMode {
    #[value(name = "simple-lba")]
    Simple,
    #[value(name = "join-neg-lba-with-lba")]
    JoinNeg,
    #[value(name = "incr-512-full-lba")]
    Incr512Full,
    #[value(name = "incr-512-upper-lba")]
    Incr512Upper,
}

impl TweakMode {
    /// The RPC's name of the value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simple => "SIMPLE_LBA",
            Self::JoinNeg => "JOIN_NEG_LBA_WITH_LBA",
            Self::Incr512Full => "INCR_512_FULL_LBA",
            Self::Incr512Upper => "INCR_512_UPPER_LBA",
        }
    }
}

/// Which memory of VMs an NVMe drive or another host accesses by itself; the kernel pins that memory.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Dma {
    /// Huge pages; other memory is copied
    Auto,
    /// All: for VMs without a balloon, free page reporting and post-copy migration
    Pin,
    /// None: all data is copied
    Bounce,
}

impl Dma {
    /// The RPC's name of the value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Pin => "pin",
            Self::Bounce => "bounce",
        }
    }
}

/// For how long a disk's file is locked.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    Always,
    InUse,
}

impl Lock {
    /// The RPC's name of the value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::InUse => "in_use",
        }
    }
}

/// The result of a write on a full file system.
#[derive(Debug, Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Enospc {
    Error,
    Hold,
}

impl Enospc {
    /// The RPC's name of the value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Hold => "hold",
        }
    }
}

/// What the daemon does between the requests of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SleepPolicy {
    /// As the daemon was started: 'arykd --sleep-policy'
    Default,
    /// Sleep at once: the least processor time
    Interrupt,
    /// Poll a short time, then sleep
    Adaptive,
    /// Poll always: the lowest latency, and a whole core while a VM is connected
    Poll,
}

/// Arguments of `share`.
#[derive(Debug, Args)]
pub struct ShareArgs {
    /// The disk
    #[arg(add = ArgValueCandidates::new(disks))]
    pub disk: String,
    /// Address and port at which hosts reach the disk
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:4420")]
    pub listen: SocketAddr,
    /// Share the disk over NVMe/RDMA, at an address of an RDMA device, instead of TCP
    #[arg(long, conflicts_with = "tls_key")]
    pub rdma: bool,
    /// NQN of a host that may connect; may be repeated [default: any host]
    #[arg(long, value_name = "NQN")]
    pub host: Vec<String>,
    /// Name of a secret in the keyring by which the hosts prove who they are
    #[arg(long, value_name = "NAME", requires = "host")]
    pub key: Option<String>,
    /// Name of a secret in the keyring by which the share proves who it is, to hosts that ask
    #[arg(long, value_name = "NAME", requires = "key")]
    pub controller_key: Option<String>,
    /// Name of a TLS key in the keyring that the hosts have, too: connections are encrypted
    #[arg(long, value_name = "NAME", requires = "host")]
    pub tls_key: Option<String>,
    /// Cores that may serve the hosts: 0x3 or [0,2-3] [default: all]
    #[arg(long, value_name = "CORES")]
    pub cpumask: Option<String>,
    /// Name by which hosts connect [default: one with the disk's UUID]
    #[arg(long, value_name = "NQN")]
    pub nqn: Option<String>,
}

/// Arguments of `unshare`.
#[derive(Debug, Args)]
pub struct UnshareArgs {
    /// The disk, or the NQN by which hosts connect
    #[arg(add = ArgValueCandidates::new(disks))]
    pub name: String,
    /// Disconnect hosts that use the disk: data that they have not written yet is lost
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The disk
    #[arg(add = ArgValueCandidates::new(disks))]
    pub disk: String,
    /// Name of the controller and its socket [default: the disk's name]
    #[arg(long, value_name = "NAME", add = ArgValueCandidates::new(controllers))]
    pub controller: Option<String>,
    /// Number of queues [default: one per processor of the VM, up to 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues: Option<u16>,
    /// Cores that may serve the disk: 0x3 or [0,2-3] [default: all]
    #[arg(long, value_name = "CORES")]
    pub cpumask: Option<String>,
    /// Attach the disk read-only
    #[arg(long)]
    pub readonly: bool,
    /// Attach a disk that another controller has too: only for cluster file systems (OCFS2, GFS2), others are corrupted
    #[arg(long)]
    pub shared: bool,
    /// Attach the disk as a target of a SCSI controller, which is created if it does not exist: up to eight targets are
    /// hot-plugged and unplugged while the VM runs
    #[arg(long, conflicts_with = "readonly")]
    pub scsi: bool,
    /// Number of the target in the SCSI controller, 0 to 7 [default: the first free one]
    #[arg(long, value_name = "N", requires = "scsi", value_parser = clap::value_parser!(u8).range(..8))]
    pub target: Option<u8>,
    /// The name by which disks identify the SCSI controller in reservations: 'naa.' and 16 hexadecimal digits [default: made of
    /// the controller's name]
    #[arg(long, value_name = "NAA", requires = "scsi")]
    pub transport_id: Option<String>,
    /// Connect to this socket, on which QEMU listens, instead of listening: the VM can start before the daemon, and outlive it
    #[arg(long, value_name = "PATH", conflicts_with_all = ["socket_mode", "socket_owner", "socket_group"])]
    pub connect: Option<PathBuf>,
    /// Permissions of the socket [default: 660 with --socket-group, and 600 otherwise]
    #[arg(long, value_name = "OCTAL", value_parser = mode)]
    pub socket_mode: Option<u32>,
    /// Owner of the socket: name or number of a user
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<String>,
    /// Group of the socket, by name or number; its members may connect unless --socket-mode says otherwise
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Follow the log
    #[arg(short, long)]
    pub follow: bool,
    /// Number of lines to begin with
    #[arg(short = 'n', long, value_name = "N", default_value = "50")]
    pub lines: u32,
}

/// Arguments of `apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// A TOML or JSON file, as written by 'export', or SPDK's JSON; '-' is the standard input
    pub file: PathBuf,
    /// Only show the steps; exit with 2 if there are any
    #[arg(long)]
    pub plan: bool,
    /// Remove disks and controllers that are not in the file; their data files stay
    #[arg(long)]
    pub prune: bool,
    /// Recreate objects that cannot be changed in place: VMs lose them for a moment, disks in memory lose their data
    #[arg(long)]
    pub replace: bool,
    /// With --prune or --replace: even objects that a connected VM uses, and data whose file is deleted
    #[arg(long)]
    pub force: bool,
}

/// Commands for controllers.
#[derive(Debug, Subcommand)]
pub enum ControllerCommand {
    /// List all controllers
    List(Watch),
    /// Change the settings of a controller; a connected VM keeps running
    Set {
        /// The controller
        #[arg(add = ArgValueCandidates::new(controllers))]
        controller: String,
        /// What the daemon does between the requests of this controller
        #[arg(long, value_name = "POLICY")]
        sleep_policy: SleepPolicy,
    },
}

/// Commands for limits.
#[derive(Debug, Subcommand)]
pub enum QosCommand {
    /// Limit a disk; limits that are not given stay as they are
    #[command(after_help = examples::QOS)]
    Set {
        /// The disk
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// Limit what a host on the network may do with a shared disk; limits that are not given stay as they are
    #[command(after_help = examples::QOS_HOST)]
    Host {
        /// The disk, or the NQN of the share
        #[arg(add = ArgValueCandidates::new(disks))]
        share: String,
        /// The host [default: each host that has no limits of its own, for itself]
        #[arg(long, value_name = "NQN")]
        host: Option<String>,
        #[command(flatten)]
        limits: Limits,
    },
    /// List the disks with limits
    List(Watch),
    /// Limit groups of disks, which share limits
    #[command(subcommand)]
    Group(GroupCommand),
}

/// Commands for groups of disks.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Create a group
    Create {
        /// The group's name
        name: String,
        /// The parent group
        #[arg(long, value_name = "GROUP")]
        parent: Option<String>,
        #[command(flatten)]
        limits: Limits,
    },
    /// Limit a group; limits that are not given stay as they are
    Set {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        name: String,
        #[command(flatten)]
        limits: Limits,
    },
    /// Move disks into a group, out of their present groups
    Add {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        group: String,
        /// The disks
        #[arg(required = true, value_name = "DISK", add = ArgValueCandidates::new(disks))]
        disks: Vec<String>,
    },
    /// Remove disks from a group
    Remove {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        group: String,
        /// The disks
        #[arg(required = true, value_name = "DISK", add = ArgValueCandidates::new(disks))]
        disks: Vec<String>,
    },
    /// Delete an empty group
    Delete {
        /// The group
        #[arg(add = ArgValueCandidates::new(groups))]
        name: String,
    },
    /// List all groups
    List(Watch),
}

/// Commands for reactors.
#[derive(Debug, Subcommand)]
pub enum ReactorCommand {
    /// List all reactors
    List(Watch),
    /// Start a reactor on another core, until the daemon ends
    Add {
        /// The core's number
        core: u16,
    },
    /// End a reactor; its work moves to the others first
    Remove {
        /// The core's number
        core: u16,
    },
}

/// Commands for the scheduler.
#[derive(Debug, Subcommand)]
pub enum SchedulerCommand {
    /// Show the scheduler, and its moves of queues
    Show(Watch),
    /// Choose the scheduler; options that are not given stay as they are
    Set {
        /// 'static': queues stay where they are. 'dynamic': they leave busy reactors, and gather on few reactors when idle
        name: SchedulerName,
        /// Time between two decisions, such as 100ms
        #[arg(long, value_name = "TIME", value_parser = crate::bench::time)]
        period: Option<Duration>,
        /// A queue below this load counts as nearly idle
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
        load_limit: Option<u8>,
        /// No reactor is filled above this load
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
        core_limit: Option<u8>,
        /// Queues leave a reactor at or above this load
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
    /// Queues leave busy reactors, and gather on few reactors when idle
    Dynamic,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u32>() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds.into())),
        _ => Err("give a whole number of seconds, at least 1".into()),
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ ..=0o777) => Ok(mode),
        _ => Err("give octal digits, such as 660".into()),
    }
}

#[cfg(test)]
mod tests;
