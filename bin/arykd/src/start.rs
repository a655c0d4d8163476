//! What is settled, and said, when the daemon starts.

use crate::cli::Cli;
use crate::log::{self, Format};
use anyhow::Context;
use aryk_dma::Limits;
use aryk_metrics::{Scrapes, Server as WatchServer, Web};
use aryk_reactor::{CoreSet, Engine, Handle, Options, Reactors, SleepPolicy};
use aryk_rpc::load::{File, LoadError, Loaded};
use aryk_rpc::restore::Restored;
use aryk_rpc::rights::Rules;
use aryk_rpc::server::{BindError, Server, Socket, SocketOptions};
use aryk_rpc::{Control, Methods};
use aryk_state::Store;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Each disk and each machine costs descriptors: as many as we may have.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// What front-ends can have us map: what was asked for, and three quarters of the mappings that the kernel lets us have.
pub fn limit_guest_memory(cli: &Cli) {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let allowed = allowed.and_then(|count| count.trim().parse::<u64>().ok());
    let mappings = allowed.map_or(Limits::DEFAULT.mappings, |count| count / 4 * 3);
    Limits { peer: cli.guest_memory_max, process: cli.guest_memory_total, mappings }.set();
}

/// Leaves the reactors' cores to them, where there are others: no call, however long, is in the way of I/O then.
pub fn leave_cores(reactors: &Reactors) {
    if let Err(error) = reactors.leave_cores() {
        tracing::warn!(%error, "cannot leave the reactors' cores to them");
    }
}

/// The RPC socket, with the rights that were asked for. Before the daemon gives up the right to make files where it is.
pub fn rpc_socket(cli: &Cli) -> Result<Socket, BindError> {
    let group = cli.rpc_socket_group;
    let ruled = (!cli.rpc_allow.is_empty() && group.is_none()).then_some(0o666);
    let options = SocketOptions { owner: None, group, mode: cli.rpc_socket_mode.or(ruled) };
    Socket::bind(&cli.rpc_socket, options)
}

/// Who serves it, by the rules that were asked for.
pub fn rpc_server(cli: &Cli, socket: Socket) -> Result<Server, BindError> {
    Ok(Server::new(socket)?.ruled_by(Rules::new(cli.rpc_allow.clone())))
}

/// Says what to do, if `error` came of a sandbox in which there is no TCP: the unit's.
pub fn explained(error: anyhow::Error) -> anyhow::Error {
    const NO_TCP: &str = "TCP is forbidden here, by RestrictAddressFamilies= of the service's unit. As root, to allow it for this host alone: \
        `install -D -m 644 -t /etc/systemd/system/arykd.service.d /usr/share/aryk/drop-ins/loopback.conf`, \
        then `systemctl daemon-reload` and `systemctl restart arykd`; network.conf beside it is for all networks";
    let is_forbidden = |error: &io::Error| error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error());
    match error.chain().any(|cause| cause.downcast_ref().is_some_and(is_forbidden)) {
        true => error.context(NO_TCP),
        false => error,
    }
}

/// The door for those who read metrics, if one is asked for.
pub async fn metrics(cli: &Cli) -> anyhow::Result<Option<WatchServer>> {
    const MODE: u32 = 0o660;
    let Some(address) = &cli.metrics else { return Ok(None) };
    let server = WatchServer::bind(address, MODE).await.context("cannot serve metrics").map_err(explained)?;
    if let Some(address) = server.address()
        && !address.ip().is_loopback()
    {
        tracing::warn!(%address, "metrics are served to everybody who can reach this address");
    }
    Ok(Some(server))
}

/// The door for browsers, if one is asked for.
pub async fn web(cli: &Cli) -> anyhow::Result<Option<WatchServer>> {
    let Some(address) = &cli.web else { return Ok(None) };
    Ok(Some(WatchServer::bind(address, 0).await.context("cannot show the web page").map_err(explained)?))
}

/// Serves those who watch, until `stop`. Needs a tokio `LocalSet`.
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

/// The directory of the controllers' sockets, which is made if it is not there.
pub fn vhost_dir(asked: Option<&Path>) -> anyhow::Result<PathBuf> {
    let dir = match (asked, std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => std::path::absolute(dir)?,
        (None, _) if getuid().is_root() => PathBuf::from("/run/aryk"),
        (None, Some(runtime)) if !runtime.is_empty() => PathBuf::from(runtime).join("aryk"),
        (None, _) => std::env::temp_dir().join(format!("aryk-{}", getuid().as_raw())),
    };
    // Others may pass: it is each socket's own rights that keep them out.
    match DirBuilder::new().mode(0o755).create(&dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {
            // In a directory that all may write to, another may have been faster.
            let is_ours = asked.is_some() || dir.metadata()?.uid() == getuid().as_raw();
            anyhow::ensure!(is_ours, "{} belongs to somebody else; -S names another", dir.display());
            Ok(dir)
        }
        made => made.map(|()| dir.clone()).with_context(|| format!("cannot make {}", dir.display())),
    }
}

/// Where it is noted that the daemon of a state directory has loaded a file.
fn note_of_loading(cli: &Cli) -> Option<PathBuf> {
    cli.state_dir.as_ref().map(|dir| dir.join("loaded"))
}

/// Whether a daemon of the state directory has loaded a file, and its store is there.
fn has_loaded(cli: &Cli) -> bool {
    cli.state_dir.as_deref().is_some_and(Store::exists)
        && note_of_loading(cli).is_some_and(|note| note.exists())
}

/// The file that the daemon is to load at its start. None if its state directory has all of that from an earlier start: what was changed since is newer,
/// and a daemon that comes back after a crash must not depend on the file. Before it gives up the right to read it.
///
/// # Errors
/// It cannot be read, or understood.
pub fn config(cli: &Cli) -> Result<Option<File>, LoadError> {
    cli.config.as_deref().filter(|_| !has_loaded(cli)).map(File::read).transpose()
}

/// Makes the calls of that file; if one fails that is not to be left out, the daemon ends in order. Needs a tokio `LocalSet`.
///
/// # Errors
/// Which call failed, and why; or the state directory cannot be written to.
pub async fn load(
    cli: &Cli,
    file: Option<File>,
    control: &Control,
    methods: &Methods<Control>,
) -> anyhow::Result<Option<Loaded>> {
    let Some(file) = file else { return Ok(None) };
    let loaded = match file.load(control, methods, cli.json_ignore_init_errors).await {
        Ok(loaded) => loaded,
        Err(error) => {
            control.close().await;
            anyhow::bail!(
                "{error}; mend it and start again. What the state directory has by now is there without -c, to be removed or changed. --json-ignore-init-errors leaves out what fails, and later starts with the same --state-dir do not try it again: `aryk apply` does"
            );
        }
    };
    if let Some(note) = note_of_loading(cli)
        && let Err(error) = std::fs::write(&note, "")
    {
        control.close().await;
        return Err(error).with_context(|| format!("cannot write {}", note.display()));
    }
    Ok(Some(loaded))
}

/// Says, in a few lines, what it runs on.
pub async fn tell(
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
        false => format!(" of {} asked for: the others are not ours to use", options.cores),
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
        let (rpc, machines) = (cli.rpc_socket.display(), vhost_dir.display());
        let state = state(cli, restored);
        let file = cli.config.as_ref().map(|file| format!("{}, {}", file.display(), calls(loaded)));
        tracing::info!(version, cores, idle, kernel, %rpc, %machines, state, file, "ready");
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
        lines.push(format!("  machines  {}/", vhost_dir.display()));
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

/// What became of a file's calls.
fn calls(loaded: Option<Loaded>) -> String {
    let Some(Loaded { made, there, failed }) = loaded else {
        return "not read: its state directory has loaded a file before; `aryk apply` makes what this one has".into();
    };
    let there = if there == 0 { String::new() } else { format!(", {there} without anything to do") };
    let failed = if failed == 0 { String::new() } else { format!(", {failed} FAILED: see the log") };
    let calls = if made == 1 { "call" } else { "calls" };
    format!("{made} {calls} made{there}{failed}")
}

/// Where what is configured is kept, and what of it is there.
fn state(cli: &Cli, Restored { made, absent }: Restored) -> String {
    match &cli.state_dir {
        None => "not kept: a restart forgets all disks; --state-dir keeps them".into(),
        Some(dir) => {
            let missing = match absent {
                0 => String::new(),
                absent => format!(", {absent} not (yet) there: see the log"),
            };
            format!("{}/, {made} restored{missing}", dir.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_directory_is_made_once() {
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
