//! A network that can be cut: programs run in a network namespace, which a pair of virtual Ethernet devices connects with this
//! host. Test tool, the thread that creates it. Needs root.
//!
//! While the network is cut, both devices drop all packets, and report nothing: connections stay, and nobody learns of the cut.
//! The namespace and its devices end with the process that holds it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::{Process, Stdin, wait_until};

/// How long the kernel may take to create the namespace.
const PATIENCE: Duration = Duration::from_secs(5);
/// The hardware addresses of the host's device, and of that in the namespace. Each knows the other's, so that no request for an
/// address fails while the network is cut.
const HARDWARE: [&str; 2] = ["02:00:00:00:00:01", "02:00:00:00:00:02"];
/// The name of the device in the namespace.
const INNER: &str = "cut0";

/// The network; it ends when this is dropped.
#[derive(Debug)]
pub struct Network {
    holder: Process,
    /// The host's device.
    device: String,
    /// The first three numbers of both addresses.
    prefix: String,
}

/// The network is cut until this is dropped.
#[derive(Debug)]
pub struct Cut<'a>(&'a Network);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        // A test fails when its requests do not go on afterwards.
        let _ = self.0.outer("tc", &["qdisc", "del", "dev", &self.0.device, "root"]);
        let _ = self.0.inner("tc", &["qdisc", "del", "dev", INNER, "root"]);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("running {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}

impl Network {
    /// Creates the network; `log` has the messages of its process.
    ///
    /// # Errors
    /// The caller is not root, or a program of iproute2 or util-linux is missing.
    pub fn new(log: &Path) -> Result<Self> {
        let arguments = ["-n", "sleep", "infinity"].map(str::to_owned);
        let holder = Process::spawn(Path::new("unshare"), &arguments, Stdin::Null, log)?;
        let pid = holder.pid();
        // Networks of several processes have different names and addresses.
        let own = std::process::id();
        let (device, prefix) = (format!("cut{own}"), format!("10.213.{}", own % 256));
        let network = Self { holder, device, prefix };
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net"));
        wait_until("a network namespace", PATIENCE, || {
            Ok((namespace(&pid.to_string()).ok() != namespace("self").ok()).then_some(()))
        })?;
        network.connect()?;
        Ok(network)
    }

    fn connect(&self) -> Result<()> {
        let (device, pid) = (&*self.device, self.holder.pid().to_string());
        let pair = ["type", "veth", "peer", "name", INNER, "address", HARDWARE[1], "netns", &pid];
        self.outer("ip", &[&["link", "add", device, "address", HARDWARE[0]][..], &pair].concat())?;
        let [outer, inner] = [self.address(), format!("{}.2", self.prefix)];
        self.outer("ip", &["address", "add", &format!("{outer}/30"), "dev", device])?;
        self.outer("ip", &["link", "set", device, "up"])?;
        let neighbour = ["dev", device, "nud", "permanent"];
        self.outer(
            "ip",
            &[&["neighbour", "replace", &inner, "lladdr", HARDWARE[1]][..], &neighbour].concat(),
        )?;
        self.inner("ip", &["link", "set", "lo", "up"])?;
        self.inner("ip", &["address", "add", &format!("{inner}/30"), "dev", INNER])?;
        self.inner("ip", &["link", "set", INNER, "up"])?;
        let neighbour = ["dev", INNER, "nud", "permanent"];
        self.inner("ip", &[&["neighbour", "replace", &outer, "lladdr", HARDWARE[0]][..], &neighbour].concat())
    }

    fn outer(&self, program: &str, arguments: &[&str]) -> Result<()> {
        run(program, arguments)
    }

    fn inner(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let pid = self.holder.pid().to_string();
        run("nsenter", &[&["-t", &pid, "-n", program][..], arguments].concat())
    }

    /// The address of this host in the network.
    #[must_use]
    pub fn address(&self) -> String {
        format!("{}.1", self.prefix)
    }

    /// Makes a directory beneath `place` with the programs of `bin` whose `arykd` runs in the namespace.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn programs(&self, bin: &Path, place: &Path) -> Result<PathBuf> {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let programs = place.join("programs");
        std::fs::create_dir(&programs)?;
        symlink(bin.join("aryk"), programs.join("aryk"))?;
        let (script, pid) = (programs.join("arykd"), self.holder.pid());
        let real = bin.join("arykd");
        std::fs::write(
            &script,
            format!("#!/bin/sh\nexec nsenter -t {pid} -n '{}' \"$@\"\n", real.display()),
        )?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        Ok(programs)
    }

    /// Cuts the network: all packets are lost.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn cut(&self) -> Result<Cut<'_>> {
        let cut = Cut(self);
        // A filter that lets packets of up to ten bytes pass, of which there are none.
        let drop_all = ["root", "tbf", "rate", "8bit", "burst", "10", "limit", "10"];
        self.outer("tc", &[&["qdisc", "replace", "dev", &self.device][..], &drop_all].concat())?;
        self.inner("tc", &[&["qdisc", "replace", "dev", INNER][..], &drop_all].concat())?;
        Ok(cut)
    }
}
