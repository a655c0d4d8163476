//! Command-line arguments.

use crate::log::Format;
use aryk_metrics::Address;
use aryk_reactor::{CoreSet, Engine, SleepPolicy};
use aryk_rpc::methods::log::PrintLevel;
use aryk_rpc::rights::Rule;
use clap::{CommandFactory, Parser};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Back-end for the disks of virtual machines: serves vhost-user block and SCSI devices.
///
/// Needs no root, no hugepages and no configuration file: the command 'aryk' creates disks and attaches them to VMs. SIGTERM and
/// SIGINT make it complete the requests in flight and exit; a second signal ends it at once, with exit code 3.
#[derive(Debug, Parser)]
#[command(name = "arykd", version, max_term_width = 80)]
pub struct Cli {
    /// Cores to run on, one reactor each: 0x3 or [0,2-3] [default: the first one allowed]
    #[arg(short = 'm', long = "cpumask", value_name = "CORES")]
    pub cores: Option<CoreSet>,

    /// Path of the RPC socket
    #[arg(short = 'r', long = "rpc-socket", value_name = "PATH", default_value = "/var/tmp/spdk.sock", value_parser = socket_path)]
    pub rpc_socket: PathBuf,

    /// Permissions of the RPC socket, octal; 660 lets the daemon's group connect [default: 660 with --rpc-socket-group, 666 with
    /// --rpc-allow, whose rules then decide, and 600 otherwise]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub rpc_socket_mode: Option<u32>,

    /// Group of the RPC socket, by name or number; its members may connect unless --rpc-socket-mode says otherwise
    #[arg(long, value_name = "GROUP", value_parser = aryk_rpc::rights::gid)]
    pub rpc_socket_group: Option<u32>,

    /// Permit RPC methods by caller: uid:USER=RIGHTS, gid:GROUP=RIGHTS or any=RIGHTS; RIGHTS is full or read-only; the first
    /// matching rule counts. Root and the daemon's own user may call all methods; a caller without a matching rule may call none
    /// [default: each caller that can open the socket may call all methods]
    #[arg(long, value_name = "RULE")]
    pub rpc_allow: Vec<Rule>,

    /// Serve RPC by HTTP POST too, for clients with a password: 127.0.0.1:8000
    #[arg(long, value_name = "ADDRESS", requires = "rpc_http_auth")]
    pub rpc_http: Option<SocketAddr>,

    /// File of lines user:password for RPC by HTTP; only its owner may have the right to read it
    #[arg(long, value_name = "FILE", requires = "rpc_http")]
    pub rpc_http_auth: Option<PathBuf>,

    /// Encrypt RPC by HTTP: file of the certificate and its issuers, as PEM [default: not encrypted]
    #[arg(long, value_name = "FILE", requires = "rpc_http", requires = "rpc_http_tls_key")]
    pub rpc_http_tls_cert: Option<PathBuf>,

    /// File of the certificate's private key, as PEM; others must not have the right to read it
    #[arg(long, value_name = "FILE", requires = "rpc_http_tls_cert")]
    pub rpc_http_tls_key: Option<PathBuf>,

    /// Serve metrics (OpenMetrics, for Prometheus), to each client that can connect: ADDRESS:PORT, a PORT of 127.0.0.1, or the
    /// PATH of a socket [default: not served]
    #[arg(long, value_name = "WHERE")]
    pub metrics: Option<Address>,

    /// Serve a read-only web page to browsers on this host: ADDRESS:PORT, or a PORT of 127.0.0.1 [default: not served]
    #[arg(long, value_name = "WHERE", value_parser = loopback)]
    pub web: Option<Address>,

    /// Directory of the controllers' sockets [default: aryk in $XDG_RUNTIME_DIR, or /run/aryk]
    #[arg(short = 'S', long = "vhost-dir", value_name = "DIR")]
    pub vhost_dir: Option<PathBuf>,

    /// Largest size of a virtqueue in descriptors; QEMU uses 128 or 256 by default, and at most 1024
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub queue_size_max: u16,

    /// Directory in which the configuration is stored, so that a restart restores it [default: not stored]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// The key that encrypts keys of encrypted disks in the state directory: a FILE of 32 bytes or 64 hexadecimal digits, which
    /// only the daemon's user may read, or 'keyring:NAME' for a key of the kernel [default: systemd's credential
    /// aryk-wrapping-key if there is one, else wrapping.key in the state directory, created when it is needed]
    #[arg(long, value_name = "FILE")]
    pub wrapping_key: Option<PathBuf>,

    /// Make the calls of this file of 'save_config', SPDK's or Aryk's, at the start; with --state-dir, at the first start only
    #[arg(
        short = 'c',
        long = "json",
        visible_alias = "config",
        value_name = "FILE",
        conflicts_with = "wait_for_rpc"
    )]
    pub config: Option<PathBuf>,

    /// Skip the calls of that file that fail, and log them [default: the daemon exits]
    #[arg(long, requires = "config")]
    pub json_ignore_init_errors: bool,

    /// Allow disks beneath this directory only; repeat it for more, or name a block device. Sockets and state may be elsewhere
    /// [default: anywhere]
    #[arg(long, value_name = "DIR")]
    pub allow_dir: Vec<PathBuf>,

    /// Largest guest memory of one VM, such as 16T: a front-end that announces more is refused
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = size)]
    pub guest_memory_max: u64,

    /// Largest total of mapped guest memory, counted once per controller of a VM [a process can map 128T]
    #[arg(long, value_name = "SIZE", default_value = "112T", value_parser = size)]
    pub guest_memory_total: u64,

    /// Longest time in seconds that a VM's new memory waits for devices that access it by themselves to register it
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub memory_patience: u16,

    /// Ceph's library for disks in Ceph images [default: librbd.so.1, where the dynamic linker finds it]
    #[arg(long, value_name = "PATH")]
    pub librbd: Option<PathBuf>,

    /// Cores for the threads of Ceph's clients: 0x3 or [0,2-3] [default: all but those of the reactors, if there are others]
    #[arg(long, value_name = "CORES")]
    pub client_cpus: Option<CoreSet>,

    /// Run the daemon as a child process, and restart it at once when it dies
    #[arg(long, requires = "state_dir")]
    pub supervise: bool,

    /// Behaviour of a core without work: poll, adaptive (sleep after a while) or interrupt (sleep at once)
    #[arg(long, value_name = "POLICY", default_value = "adaptive")]
    pub sleep_policy: SleepPolicy,

    /// Kernel interface: auto, io_uring, or epoll where io_uring is forbidden
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub io_engine: Engine,

    /// Log level: error, warning, notice, info or debug
    #[arg(short = 'L', long = "log", value_name = "LEVEL", default_value = "notice", value_parser = level)]
    pub log: PrintLevel,

    /// Log format: text, json (one object per line) or journal (with the priorities of journald) [default: journal under systemd,
    /// else text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<Format>,

    /// Accept no other RPC before framework_start_init
    #[arg(long)]
    pub wait_for_rpc: bool,

    /// Print this as a man page, for packagers
    #[arg(long, hide = true, exclusive = true)]
    pub man_page: bool,
}

/// Writes the arguments as a man page of section 8.
///
/// # Errors
/// `to` cannot be written.
pub fn write_man_page(to: &mut impl Write) -> io::Result<()> {
    clap_mangen::Man::new(Cli::command()).section("8").render(to)
}

fn level(text: &str) -> Result<PrintLevel, String> {
    match text.to_ascii_lowercase().as_str() {
        "error" => Ok(PrintLevel::Error),
        "warning" => Ok(PrintLevel::Warning),
        "notice" => Ok(PrintLevel::Notice),
        "info" => Ok(PrintLevel::Info),
        "debug" => Ok(PrintLevel::Debug),
        _ => Err("give error, warning, notice, info or debug".into()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    let units = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let unit = units.iter().find_map(|&(unit, bits)| Some((text.strip_suffix(unit)?, bits)));
    let (number, bits) = unit.unwrap_or((text, 0));
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << bits));
    bytes
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| "give a number of bytes, or a number with K, M, G or T, such as 16T".into())
}

/// The web page has no authentication, so it is for users of this host only.
fn loopback(text: &str) -> Result<Address, String> {
    match text.parse() {
        Ok(Address::Tcp(address)) if address.ip().is_loopback() => Ok(Address::Tcp(address)),
        Ok(_) | Err(_) => Err("give a port of this host, such as 8080, 127.0.0.1:8080 or [::1]:8080".into()),
    }
}

/// SPDK also accepts HOST:PORT here, and then each client that reaches it may call all methods.
fn socket_path(text: &str) -> Result<PathBuf, String> {
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    match text.rsplit_once(':') {
        Some((host, port)) if !host.contains('/') && is_port(port) => {
            Err("give the path of a socket; RPC over TCP needs a password: --rpc-http ADDRESS:PORT --rpc-http-auth FILE".into())
        }
        Some(_) | None => Ok(text.into()),
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        Ok(_) | Err(_) => Err("give octal digits, such as 660".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_man_page_has_each_option() {
        let mut page = Vec::new();
        write_man_page(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap().replace("\\-", "-");
        assert!(page.contains(".TH arykd 8"), "{page}");
        for arg in Cli::command().get_arguments().filter(|arg| !arg.is_hide_set()) {
            let long = format!("--{}", arg.get_long().expect("each has a long name"));
            assert!(page.contains(&long), "{long}");
        }
    }

    #[test]
    fn flags_as_spdk_has_them() {
        let line = "arykd -m [0,2-3] -r /tmp/r.sock -S /tmp/v --sleep-policy poll --io-engine epoll -L debug";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(cli.cores.unwrap().to_string(), "0xd");
        assert_eq!(cli.sleep_policy, SleepPolicy::Poll);
        assert_eq!((cli.io_engine, cli.log), (Engine::Epoll, PrintLevel::Debug));
        assert_eq!((cli.guest_memory_max, cli.guest_memory_total), (16 << 40, 112 << 40));
        for line in ["arykd -c f --json-ignore-init-errors", "arykd --json f", "arykd --config f"] {
            assert_eq!(Cli::try_parse_from(line.split(' ')).unwrap().config.unwrap().to_str(), Some("f"));
        }
        let line = "arykd --guest-memory-max 512G --guest-memory-total 4398046511104";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        assert_eq!((cli.guest_memory_max, cli.guest_memory_total), (512 << 30, 4 << 40));
        assert_eq!(cli.memory_patience, 10);
        let line = "arykd --memory-patience 3600";
        assert_eq!(Cli::try_parse_from(line.split(' ')).unwrap().memory_patience, 3600);
        let line = "arykd --rpc-socket-mode 660 --rpc-socket-group 0 --rpc-allow uid:1000=full --rpc-allow any=read-only";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(
            (cli.rpc_socket_mode, cli.rpc_socket_group, cli.rpc_allow.len()),
            (Some(0o660), Some(0), 2)
        );
        for wrong in [
            "-m 0",
            "-r 127.0.0.1:5260",
            "-r [::1]:5260",
            "-r :5260",
            "-m x",
            "--sleep-policy never",
            "--io-engine aio",
            "-L loud",
            "--log-format xml",
            "--rpc-socket-mode 888",
            "--rpc-socket-mode 7777",
            "--rpc-http 127.0.0.1:1",
            "--rpc-http-auth x",
            "--rpc-http-tls-cert x --rpc-http-tls-key y",
            "--rpc-http 127.0.0.1:1 --rpc-http-auth x --rpc-http-tls-cert x",
            "--rpc-http 127.0.0.1:1 --rpc-http-auth x --rpc-http-tls-key x",
            "--metrics localhost",
            "--web 10.0.0.1:80",
            "--web 0.0.0.0:80",
            "--web /run/web.sock",
            "--guest-memory-max 0",
            "--guest-memory-max 1X",
            "--guest-memory-max 99999999T",
            "--memory-patience 0",
            "--memory-patience 3601",
            "--rpc-socket-mode rw",
            "--rpc-allow uid:0=all",
            "--rpc-socket-group no-such-group",
            "--json f --wait-for-rpc",
            "--json-ignore-init-errors",
        ] {
            assert!(Cli::try_parse_from(format!("arykd {wrong}").split(' ')).is_err(), "{wrong}");
        }
    }
}
