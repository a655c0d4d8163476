//! The arguments.

use crate::log::Format;
use aryk_metrics::Address;
use aryk_reactor::{CoreSet, Engine, SleepPolicy};
use aryk_rpc::methods::log::PrintLevel;
use aryk_rpc::rights::Rule;
use clap::{CommandFactory, Parser};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Carries the I/O of virtual machines' disks.
///
/// Needs no root, no hugepages and no configuration file: disks are made, and offered to machines, with the command 'aryk'. SIGTERM and
/// SIGINT end it when the requests that run are done; a second one ends it at once, with exit code 3.
#[derive(Debug, Parser)]
#[command(name = "arykd", version, max_term_width = 80)]
pub struct Cli {
    /// Cores to run on, one reactor each: 0x3 or [0,2-3] [default: the first one allowed]
    #[arg(short = 'm', long = "cpumask", value_name = "CORES")]
    pub cores: Option<CoreSet>,

    /// The RPC socket
    #[arg(short = 'r', long = "rpc-socket", value_name = "PATH", default_value = "/var/tmp/spdk.sock", value_parser = socket_path)]
    pub rpc_socket: PathBuf,

    /// Rights of the RPC socket, octal: 660 lets the daemon's group [default: 660 with --rpc-socket-group, 666 with --rpc-allow,
    /// whose rules then decide,
    /// and 600 otherwise]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub rpc_socket_mode: Option<u32>,

    /// Group of the RPC socket, by name or number, which may connect unless --rpc-socket-mode says otherwise
    #[arg(long, value_name = "GROUP", value_parser = aryk_rpc::rights::gid)]
    pub rpc_socket_group: Option<u32>,

    /// Who may call what on the RPC socket: uid:USER=RIGHTS, gid:GROUP=RIGHTS or any=RIGHTS, RIGHTS being full or read-only; the first that fits
    /// counts, root and the daemon's own user may do everything, and others nothing [default: whoever may open the socket may do everything]
    #[arg(long, value_name = "RULE")]
    pub rpc_allow: Vec<Rule>,

    /// Serve RPC by HTTP POST too, to those who know a password: 127.0.0.1:8000
    #[arg(long, value_name = "ADDRESS", requires = "rpc_http_auth")]
    pub rpc_http: Option<SocketAddr>,

    /// File of lines user:password that may call by HTTP, readable by its owner alone
    #[arg(long, value_name = "FILE", requires = "rpc_http")]
    pub rpc_http_auth: Option<PathBuf>,

    /// Encrypt RPC by HTTP: the certificate, and those above it, as PEM [default: it is not encrypted]
    #[arg(long, value_name = "FILE", requires = "rpc_http", requires = "rpc_http_tls_key")]
    pub rpc_http_tls_cert: Option<PathBuf>,

    /// The certificate's private key as PEM, not readable by everybody
    #[arg(long, value_name = "FILE", requires = "rpc_http_tls_cert")]
    pub rpc_http_tls_key: Option<PathBuf>,

    /// Serve metrics (OpenMetrics, for Prometheus), to all who can connect: ADDRESS:PORT, a PORT of 127.0.0.1, or the PATH of a socket [default: not served]
    #[arg(long, value_name = "WHERE")]
    pub metrics: Option<Address>,

    /// Show a web page to browsers of this host, read-only: ADDRESS:PORT, or a PORT of 127.0.0.1 [default: not shown]
    #[arg(long, value_name = "WHERE", value_parser = loopback)]
    pub web: Option<Address>,

    /// Directory of the controllers' sockets [default: aryk in $XDG_RUNTIME_DIR, or /run/aryk]
    #[arg(short = 'S', long = "vhost-dir", value_name = "DIR")]
    pub vhost_dir: Option<PathBuf>,

    /// The largest queue that a machine may have, in descriptors; QEMU's have 128 or 256 unless it is told otherwise, and at most 1024
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub queue_size_max: u16,

    /// Directory in which what is configured is kept, so that it is there again after a restart [default: it is not kept]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// Make at the start what a file of 'save_config' describes, SPDK's or ours; with --state-dir, at the first start only
    #[arg(
        short = 'c',
        long = "json",
        visible_alias = "config",
        value_name = "FILE",
        conflicts_with = "wait_for_rpc"
    )]
    pub config: Option<PathBuf>,

    /// Leave out what fails of that file, and say so in the log [default: the daemon ends]
    #[arg(long, requires = "config")]
    pub json_ignore_init_errors: bool,

    /// Open disks beneath this directory only; repeat it for more, or name a block device. Sockets and state stay where they are [default: anywhere]
    #[arg(long, value_name = "DIR")]
    pub allow_dir: Vec<PathBuf>,

    /// The most memory that one machine may have, as 16T: a front-end that announces more is refused
    #[arg(long, value_name = "SIZE", default_value = "16T", value_parser = size)]
    pub guest_memory_max: u64,

    /// The most memory of all machines that is mapped at a time, once for each of a machine's controllers [of 128T that a process can map]
    #[arg(long, value_name = "SIZE", default_value = "112T", value_parser = size)]
    pub guest_memory_total: u64,

    /// Run the daemon as a child, and start it again at once whenever it dies
    #[arg(long, requires = "state_dir")]
    pub supervise: bool,

    /// What a core does without work: poll, adaptive (sleep when there is none) or interrupt
    #[arg(long, value_name = "POLICY", default_value = "adaptive")]
    pub sleep_policy: SleepPolicy,

    /// The kernel interface: auto, io_uring, or epoll where io_uring is forbidden
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub io_engine: Engine,

    /// What the log tells: error, warning, notice, info or debug
    #[arg(short = 'L', long = "log", value_name = "LEVEL", default_value = "notice", value_parser = level)]
    pub log: PrintLevel,

    /// How the log is written: text, json (an object a line) or journal (priorities as journald reads them) [default: journal under systemd, else text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<Format>,

    /// Wait for the RPC framework_start_init before taking any other
    #[arg(long)]
    pub wait_for_rpc: bool,

    /// Print this as a man page, for who makes packages
    #[arg(long, hide = true, exclusive = true)]
    pub man_page: bool,
}

/// The arguments, as a man page of section 8.
///
/// # Errors
/// It cannot be written.
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
        _ => Err("error, warning, notice, info or debug".into()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    let units = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let unit = units.iter().find_map(|&(unit, bits)| Some((text.strip_suffix(unit)?, bits)));
    let (number, bits) = unit.unwrap_or((text, 0));
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << bits));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "a number of bytes, or with K, M, G or T, as 16T".into())
}

/// Nobody asks who looks at the page: it is for this host's users alone.
fn loopback(text: &str) -> Result<Address, String> {
    match text.parse() {
        Ok(Address::Tcp(address)) if address.ip().is_loopback() => Ok(Address::Tcp(address)),
        Ok(_) | Err(_) => Err("a port of this host, as 8080, 127.0.0.1:8080 or [::1]:8080".into()),
    }
}

/// SPDK takes HOST:PORT here too, and then everybody who reaches it may do everything.
fn socket_path(text: &str) -> Result<PathBuf, String> {
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    match text.rsplit_once(':') {
        Some((host, port)) if !host.contains('/') && is_port(port) => {
            Err("the path of a socket; RPC over TCP asks for a password: --rpc-http ADDRESS:PORT --rpc-http-auth FILE".into())
        }
        Some(_) | None => Ok(text.into()),
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        Ok(_) | Err(_) => Err("octal digits, as 660".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_page_speaks_of_each_option() {
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
