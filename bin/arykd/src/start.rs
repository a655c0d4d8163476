//! Steps of the daemon's start, and the summary that it prints.

use crate::cli::Cli;
use crate::log::{self, Format};
use crate::notify::Manager;
use anyhow::Context;
use aryk_dma::Limits;
use aryk_metrics::{Scrapes, Server as WatchServer, Web};
use aryk_reactor::{CoreSet, Engine, Handle, Options, Reactors, SleepPolicy};
use aryk_rpc::load::{File, LoadError, Loaded};
use aryk_rpc::restore::Restored;
use aryk_rpc::rights::Rules;
use aryk_rpc::server::{BindError, Server, Socket, SocketOptions};
use aryk_rpc::wrapping::{Source, Wrapping};
use aryk_rpc::{Control, Methods};
use aryk_state::Store;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};
use std::convert::Infallible;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Raises the limit of open files to its maximum: each disk and each VM needs descriptors.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Limits the guest memory that front-ends can make us map: to the given limits, and to three quarters of the mappings that the
/// kernel allows.
pub fn limit_guest_memory(cli: &Cli) {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let allowed = allowed.and_then(|count| count.trim().parse::<u64>().ok());
    let mappings = allowed.map_or(Limits::DEFAULT.mappings, |count| count / 4 * 3);
    Limits { peer: cli.guest_memory_max, process: cli.guest_memory_total, mappings }.set();
}

/// Keeps this thread off the reactors' cores if there are others, so that no RPC, however long, delays I/O.
pub fn leave_cores(reactors: &Reactors) {
    if let Err(error) = reactors.leave_cores() {
        tracing::warn!(%error, "cannot keep the control thread off the reactors' cores");
    }
}

/// Creates the RPC socket with the given permissions. Must run before the daemon gives up the right to create files there.
pub fn rpc_socket(cli: &Cli) -> Result<Socket, BindError> {
    let group = cli.rpc_socket_group;
    let ruled = (!cli.rpc_allow.is_empty() && group.is_none()).then_some(0o666);
    let options = SocketOptions { owner: None, group, mode: cli.rpc_socket_mode.or(ruled) };
    Socket::bind(&cli.rpc_socket, options)
}

/// The RPC server, with the given rules.
pub fn rpc_server(cli: &Cli, socket: Socket) -> Result<Server, BindError> {
    Ok(Server::new(socket)?.with_rules(Rules::new(cli.rpc_allow.clone())))
}

/// Adds a hint to `error` if a sandbox without TCP caused it: the sandbox of the systemd unit.
pub fn with_tcp_hint(error: anyhow::Error) -> anyhow::Error {
    const NO_TCP: &str = "TCP is forbidden here, by RestrictAddressFamilies= of the service's unit. As root, to allow it for this host alone: \
        `install -D -m 644 -t /etc/systemd/system/arykd.service.d /usr/share/aryk/drop-ins/loopback.conf`, \
        then `systemctl daemon-reload` and `systemctl restart arykd`; network.conf beside it is for all networks";
    let is_forbidden = |error: &io::Error| error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error());
    match error.chain().any(|cause| cause.downcast_ref().is_some_and(is_forbidden)) {
        true => error.context(NO_TCP),
        false => error,
    }
}

/// The HTTP server for metrics, if one is configured.
pub async fn metrics(cli: &Cli) -> anyhow::Result<Option<WatchServer>> {
    const MODE: u32 = 0o660;
    let Some(address) = &cli.metrics else { return Ok(None) };
    let server =
        WatchServer::bind(address, MODE).await.context("cannot serve metrics").map_err(with_tcp_hint)?;
    if let Some(address) = server.address()
        && !address.ip().is_loopback()
    {
        tracing::warn!(%address, "metrics are served to each client that can reach this address");
    }
    Ok(Some(server))
}

/// The HTTP server for the web page, if one is configured.
pub async fn web(cli: &Cli) -> anyhow::Result<Option<WatchServer>> {
    let Some(address) = &cli.web else { return Ok(None) };
    Ok(Some(WatchServer::bind(address, 0).await.context("cannot serve the web page").map_err(with_tcp_hint)?))
}

/// Serves metrics and the web page until `stop`. Needs a tokio `LocalSet`.
pub fn serve_watchers(
    metrics: Option<WatchServer>,
    web: Option<WatchServer>,
    control: &Rc<Control>,
    stop: &watch::Receiver<bool>,
) -> JoinSet<()> {
    let mut serving = JoinSet::new();
    if let Some(metrics) = metrics {
        let scrapes = Scrapes::new(Rc::<Control>::clone(control));
        serving.spawn_local(metrics.serve(async move |r| scrapes.answer(r).await, stop.clone()));
    }
    if let Some(web) = web {
        let page = Web::new(Rc::<Control>::clone(control));
        serving.spawn_local(web.serve(async move |r| page.answer(r).await, stop.clone()));
    }
    serving
}

/// The directory of the controllers' sockets. Creates it if it does not exist.
pub fn vhost_dir(asked: Option<&Path>) -> anyhow::Result<PathBuf> {
    let dir = match (asked, std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => std::path::absolute(dir)?,
        (None, _) if getuid().is_root() => PathBuf::from("/run/aryk"),
        (None, Some(runtime)) if !runtime.is_empty() => PathBuf::from(runtime).join("aryk"),
        (None, _) => std::env::temp_dir().join(format!("aryk-{}", getuid().as_raw())),
    };
    // Others may search the directory: each socket's own permissions keep them out.
    match DirBuilder::new().mode(0o755).create(&dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {
            // In a directory that all users may write to, another user may have created it first.
            let is_ours = asked.is_some() || dir.metadata()?.uid() == getuid().as_raw();
            anyhow::ensure!(
                is_ours,
                "{} belongs to another user; give another directory with -S",
                dir.display()
            );
            Ok(dir)
        }
        made => made.map(|()| dir.clone()).with_context(|| format!("cannot create {}", dir.display())),
    }
}

/// Reads the key that wraps other keys. A key that cannot be used is reported, and the daemon starts: disks that need none are
/// served. Must run before the daemon gives up the right to read the file.
pub fn wrapping(cli: &Cli) -> Wrapping {
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from);
    let wrapping = Wrapping::read(wrapping_source(cli, credentials.as_deref()));
    if let Some(why) = wrapping.why_not() {
        tracing::error!(
            "{why}: keys of encrypted disks can neither be read from the state directory nor created"
        );
    }
    wrapping
}

fn wrapping_source(cli: &Cli, credentials: Option<&Path>) -> Source {
    const CREDENTIAL: &str = "aryk-wrapping-key";
    let credential = credentials.map(|dir| dir.join(CREDENTIAL)).filter(|path| path.exists());
    match (&cli.wrapping_key, credential, &cli.state_dir) {
        (Some(key), ..) => match key.to_str().and_then(|key| key.strip_prefix("keyring:")) {
            Some(name) => Source::Keyring(name.to_owned()),
            None if credentials.is_some_and(|dir| key.starts_with(dir)) => Source::Credential(key.clone()),
            None => Source::File(key.clone()),
        },
        (None, Some(credential), _) => Source::Credential(credential),
        (None, None, Some(dir)) => Source::Own(dir.join("wrapping.key")),
        (None, None, None) => Source::Process,
    }
}

/// The file that records that the daemon of a state directory has loaded its configuration file.
fn loaded_marker(cli: &Cli) -> Option<PathBuf> {
    cli.state_dir.as_ref().map(|dir| dir.join("loaded"))
}

/// Whether a daemon with this state directory has loaded its configuration file, and the store exists.
fn has_loaded(cli: &Cli) -> bool {
    cli.state_dir.as_deref().is_some_and(Store::exists)
        && loaded_marker(cli).is_some_and(|marker| marker.exists())
}

/// Reads the configuration file that the daemon is to load at its start. Returns `None` if the state directory has its content
/// from an earlier start: later changes are newer, and a daemon that restarts after a crash must not depend on the file. Must run
/// before the daemon gives up the right to read the file.
///
/// # Errors
/// The file cannot be read or parsed.
pub fn config(cli: &Cli) -> Result<Option<File>, LoadError> {
    cli.config.as_deref().filter(|_| !has_loaded(cli)).map(File::read).transpose()
}

/// Makes the calls of that file. If a call fails and failures are not to be skipped, the caller ends the daemon in order. Needs
/// a tokio `LocalSet`.
///
/// # Errors
/// The call that failed, with the reason; or the state directory cannot be written.
pub async fn load(
    cli: &Cli,
    file: Option<File>,
    control: &Rc<Control>,
    methods: &Rc<Methods<Control>>,
) -> anyhow::Result<Option<Loaded>> {
    let Some(file) = file else { return Ok(None) };
    let loaded = match file.load(control, methods, cli.json_ignore_init_errors).await {
        Ok(loaded) => loaded,
        Err(error) => {
            anyhow::bail!(
                "{error}; correct the file and start again. Objects that the state directory has by now are restored without -c, and can be removed or changed then. --json-ignore-init-errors skips the calls that fail; later starts with the same --state-dir do not retry them, `aryk apply` does"
            );
        }
    };
    if let Some(marker) = loaded_marker(cli) {
        std::fs::write(&marker, "").with_context(|| format!("cannot write {}", marker.display()))?;
    }
    Ok(Some(loaded))
}

/// Reports periodically how much of the configuration is restored. Never returns.
pub async fn report_progress(control: &Control, manager: &Manager) -> Infallible {
    const PERIOD: Duration = Duration::from_secs(1);
    /// Periods between two lines of the log.
    const LOGGED: u32 = 10;
    let all = control.config.absent_count();
    for period in 1.. {
        tokio::time::sleep(PERIOD).await;
        let absent = control.config.absent_count();
        manager.restoring(absent, all);
        if period % LOGGED == 0 {
            tracing::info!(all, absent, "restoring the configuration");
        }
    }
    unreachable!("the loop never ends")
}

/// Prints a summary: cores, kernel interface, addresses, state.
pub async fn print_summary(
    cli: &Cli,
    options: &Options,
    vhost_dir: &Path,
    control: &Control,
    (restored, loaded): (Restored, Option<Loaded>),
) {
    let used: CoreSet = control.reactors.handles().iter().map(Handle::core).collect();
    let cores = used.iter().map(|core| core.to_string()).collect::<Vec<_>>().join(" ");
    let asked = match used == options.cores {
        true => String::new(),
        false => format!(" of {} requested: this process may not use the others", options.cores),
    };
    let idle = match cli.sleep_policy {
        SleepPolicy::Poll => "polls all the time",
        SleepPolicy::Adaptive => "polls while there is work, sleeps when there is none",
        SleepPolicy::Interrupt => "sleeps whenever it can",
    };
    let first = &control.reactors.handles()[0];
    let engine = first.call(|cx| cx.engine()).await.unwrap_or_default();
    let kernel = if engine == Engine::Epoll { "epoll" } else { "io_uring" };
    let version = env!("CARGO_PKG_VERSION");
    if cli.log_format == Some(Format::Json) {
        let (rpc, sockets) = (cli.rpc_socket.display(), vhost_dir.display());
        let state = state(cli, restored);
        let file = cli.config.as_ref().map(|file| format!("{}, {}", file.display(), calls(loaded)));
        tracing::info!(version, cores, idle, kernel, %rpc, %sockets, state, file, "ready");
    } else {
        let mut lines = vec![
            format!("Aryk {version} is ready."),
            format!("  cores     {cores}{asked}"),
            format!("  idle      {idle}"),
            format!("  kernel    {kernel}"),
            format!("  RPC       {}", cli.rpc_socket.display()),
        ];
        if let Some(address) = cli.rpc_http {
            let scheme = if cli.rpc_http_tls_cert.is_some() { "https" } else { "http" };
            lines.push(format!("  RPC       {scheme}://{address}/, with a password"));
        }
        lines.extend(cli.metrics.as_ref().map(|address| format!("  metrics   {address}")));
        lines.extend(cli.web.as_ref().map(|address| format!("  web page  {address}")));
        lines.push(format!("  sockets   {}/", vhost_dir.display()));
        lines.push(format!("  state     {}", state(cli, restored)));
        lines.extend(
            cli.config.as_ref().map(|file| format!("  file      {}, {}", file.display(), calls(loaded))),
        );
        lines.extend(cli.allow_dir.iter().map(|dir| format!("  disks     {} only", dir.display())));
        lines.extend(cli.wait_for_rpc.then(|| "  waits for the RPC framework_start_init".to_owned()));
        lines.push(String::new());
        log::print(&lines.join("\n"));
    }
    if engine == Engine::Epoll && cli.io_engine != Engine::Epoll {
        tracing::warn!(
            "THE KERNEL FORBIDS io_uring: files are served by a pool of threads, several times slower. See sysctl kernel.io_uring_disabled, or the container's seccomp profile"
        );
    }
}

/// The summary of a configuration file's calls.
fn calls(loaded: Option<Loaded>) -> String {
    let Some(Loaded { made, there, failed }) = loaded else {
        return "not read: a file was loaded into this state directory before; `aryk apply` applies this one"
            .into();
    };
    let there = if there == 0 { String::new() } else { format!(", {there} unchanged") };
    let failed = if failed == 0 { String::new() } else { format!(", {failed} FAILED: see the log") };
    let calls = if made == 1 { "call" } else { "calls" };
    format!("{made} {calls} made{there}{failed}")
}

/// The summary of the stored configuration.
fn state(cli: &Cli, Restored { made, absent }: Restored) -> String {
    match &cli.state_dir {
        None => "not kept: a restart forgets all disks; --state-dir keeps them".into(),
        Some(dir) => {
            let missing = match absent {
                0 => String::new(),
                absent => format!(", {absent} not restored (yet): see the log"),
            };
            format!("{}/, {made} restored{missing}", dir.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_wrapping_key_is_found() {
        let temp = tempfile::TempDir::new().unwrap();
        let source = |line: &str, credentials: Option<&Path>| {
            let words = ["arykd"].into_iter().chain(line.split_whitespace());
            wrapping_source(&Cli::try_parse_from(words).unwrap(), credentials)
        };
        let (state, dir) = ("--state-dir /s", Some(temp.path()));
        assert_eq!(source("", None), Source::Process);
        assert_eq!(source(state, dir), Source::Own("/s/wrapping.key".into()));
        let credential = temp.path().join("aryk-wrapping-key");
        std::fs::write(&credential, "").unwrap();
        assert_eq!(source(state, dir), Source::Credential(credential));
        assert_eq!(source("--wrapping-key keyring:a:b", dir), Source::Keyring("a:b".into()));
        assert_eq!(source("--wrapping-key /f", dir), Source::File("/f".into()));
        let other = temp.path().join("other");
        let line = format!("--wrapping-key {}", other.display());
        assert_eq!(source(&line, dir), Source::Credential(other));
    }

    #[test]
    fn the_directory_is_created_once() {
        let temp = tempfile::TempDir::new().unwrap();
        let dir = temp.path().join("v");
        assert_eq!(vhost_dir(Some(&dir)).unwrap(), dir);
        assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o700, 0o700);
        assert_eq!(vhost_dir(Some(&dir)).unwrap(), dir);
        std::fs::write(temp.path().join("f"), "").unwrap();
        assert!(vhost_dir(Some(&temp.path().join("f"))).is_err());
        assert!(vhost_dir(Some(&temp.path().join("no/v"))).is_err());
    }
}
