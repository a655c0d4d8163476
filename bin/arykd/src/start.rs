//! What is settled, and said, when the daemon starts.

use crate::cli::Cli;
use crate::log::Format;
use anyhow::Context;
use aryk_reactor::{CoreSet, Engine, Options, SleepPolicy};
use aryk_rpc::Control;
use aryk_rpc::restore::Restored;
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Each disk and each machine costs descriptors: as many as we may have.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
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

/// Says, in a few lines, what it runs on.
pub async fn tell(cli: &Cli, options: &Options, vhost_dir: &Path, control: &Control, restored: Restored) {
    let used: CoreSet = control.reactors.handles().iter().map(aryk_reactor::Handle::core).collect();
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
        tracing::info!(version, cores, idle, kernel, %rpc, %machines, state, "ready");
    } else {
        println!("Aryk {version} is ready.");
        println!("  cores     {cores}{asked}");
        println!("  idle      {idle}");
        println!("  kernel    {kernel}");
        println!("  RPC       {}", cli.rpc_socket.display());
        if let Some(address) = cli.rpc_http {
            println!("  RPC       http://{address}/, with a password");
        }
        println!("  machines  {}/", vhost_dir.display());
        println!("  state     {}", state(cli, restored));
        for dir in &cli.allow_dir {
            println!("  disks     {} only", dir.display());
        }
        if cli.wait_for_rpc {
            println!("  waits for the RPC framework_start_init");
        }
    }
    if engine == Engine::Epoll && cli.io_engine != Engine::Epoll {
        tracing::warn!(
            "THE KERNEL FORBIDS io_uring: files are served by a pool of threads, several times slower. See sysctl kernel.io_uring_disabled, or the container's seccomp profile"
        );
    }
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
