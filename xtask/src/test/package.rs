//! The Debian package: built, installed on a copy of this machine that systemd boots, used, upgraded, removed and purged.
//!
//! The copy is an overlay in memory, in namespaces of its own: no change by the package or systemd reaches this machine.
//! The test needs root, and is skipped with a message without root or without a kernel feature.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aryk_guest_tests::process::wait_until;

use super::Tally;
use crate::{deb, workspace};

const BOOT: &str = include_str!("package/boot.sh");
const INSIDE: &str = include_str!("package/inside.sh");
const CLEAN: &str = r#"
mount -t cgroup2 cgroup2 "$0" && cd "$0"
for _ in 1 2 3 4 5; do
    find aryk-package-test -depth -type d -exec rmdir {} + 2>/dev/null && exit
    sleep 0.2
done
"#;
/// Timeout of the test, which takes ten seconds.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Upper bound of systemd's exposure score of the unit, in tenths of a point. It was 17 when this was written.
const EXPOSURE_MAX: u32 = 20;

pub(crate) fn run() -> Result<Tally> {
    let mut tally = Tally::default();
    let package = deb::build(&workspace::build_programs()?)?;
    tally.count("package: contents", contents(&package));
    tally.count("package: exposure of its unit", exposure(&package));
    tally.count("package: contrib/libvirt", schema());
    match lifetime(&package) {
        Ok(Some(why)) => {
            println!("package: installed, used, removed ... SKIPPED: {why}");
            tally.skipped += 1;
        }
        ended => tally.count("package: installed, used, removed", ended.map(drop)),
    }
    Ok(tally)
}

fn contents(package: &Path) -> Result<()> {
    let listing = deb::output(Command::new("dpkg-deb").arg("-c").arg(package))?;
    let unit = "/lib/systemd/system/arykd.service";
    for file in [
        "/usr/bin/arykd",
        "/usr/bin/aryk",
        unit,
        "/lib/systemd/system/aryk-nvme-bind@.service",
        "/man1/aryk.1.gz",
        "/man8/arykd.8.gz",
        "/drop-ins/cuse.conf",
        "/drop-ins/loopback.conf",
        "/drop-ins/mdns.conf",
        "/drop-ins/network.conf",
        "/drop-ins/nvme.conf",
        "/drop-ins/rdma.conf",
        "/drop-ins/wrapping-key.conf",
    ] {
        ensure!(listing.lines().any(|line| line.ends_with(file)), "{file} is not in the package:\n{listing}");
    }
    ensure!(listing.lines().all(|line| line.contains(" root/root ")), "not root's:\n{listing}");
    let control = deb::output(Command::new("dpkg-deb").arg("-f").arg(package).arg("Depends"))?;
    ensure!(control.contains("libc6"), "the package depends on {control}");
    let tree = tempfile::tempdir()?;
    deb::output(Command::new("dpkg-deb").arg("-x").arg(package).arg(tree.path()))?;
    let said = contact(package, tree.path())?;
    ensure!(!said.contains("localhost"), "the maintainer's address: {said}");
    pages(&tree.path().join("usr/share/doc/aryk"))?;
    size(package, tree.path())
}

/// The maintainer, and where users report bugs.
fn contact(package: &Path, tree: &Path) -> Result<String> {
    let mut said = deb::output(Command::new("dpkg-deb").arg("-f").arg(package).args(["Maintainer", "Bugs"]))?;
    let doc = tree.join("usr/share/doc/aryk");
    said += &deb::output(Command::new("zcat").arg(doc.join("changelog.gz")))?;
    said += &std::fs::read_to_string(doc.join("copyright"))?;
    ensure!(said.contains("/issues") && said.contains("urgency="), "where to report bugs: {said}");
    let libraries = std::fs::read_to_string(doc.join("libraries"))?;
    ensure!(libraries.contains("\ntokio v") && !libraries.contains("aryk"), "linked with {libraries}");
    Ok(said)
}

/// Checks that each page's links lead to existing files.
fn pages(doc: &Path) -> Result<()> {
    let mut dead = Vec::new();
    for page in
        ["README.md", "docs/operating.md", "docs/observing.md", "docs/security.md", "docs/rpc/README.md"]
    {
        ensure!(doc.join(page).is_file(), "{page} is not in the package");
    }
    for directory in ["", "docs", "docs/examples", "docs/rpc"] {
        let directory = doc.join(directory);
        let entries = std::fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        for entry in entries {
            let page = entry?.path();
            if page.extension().is_none_or(|end| end != "md") {
                continue;
            }
            for link in deb::pages::links(&std::fs::read_to_string(&page)?) {
                let path = deb::pages::resolve(&page, link.split('#').next().unwrap_or(link));
                if !path.is_file() {
                    dead.push(format!("{}: {link}", page.display()));
                }
            }
        }
    }
    ensure!(dead.is_empty(), "links that lead nowhere: {dead:?}");
    Ok(())
}

/// Checks the declared size against the real one, except for the size of directories.
fn size(package: &Path, tree: &Path) -> Result<()> {
    let said: u64 =
        deb::output(Command::new("dpkg-deb").arg("-f").arg(package).arg("Installed-Size"))?.trim().parse()?;
    let found = deb::output(Command::new("du").args(["--apparent-size", "--summarize", "-k"]).arg(tree))?;
    let found: u64 = found.split_whitespace().next().context("du prints nothing")?.parse()?;
    ensure!(said.abs_diff(found) < found / 20 + 400, "the package declares {said} KiB, and installs {found}");
    Ok(())
}

fn exposure(package: &Path) -> Result<()> {
    let tree = tempfile::tempdir()?;
    deb::output(Command::new("dpkg-deb").arg("-x").arg(package).arg(tree.path()))?;
    let unit = tree.path().join("lib/systemd/system/arykd.service");
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--offline=true", "--no-pager"]).arg(format!("--threshold={EXPOSURE_MAX}"));
    deb::output(analyze.arg(unit)).map(drop)
}

/// Checks the example against libvirt's own schema, from a package that is unpacked and not installed.
fn schema() -> Result<()> {
    let tree = tempfile::tempdir()?;
    deb::output(Command::new("apt-get").args(["-qq", "download", "libvirt0"]).current_dir(tree.path()))
        .context("fetching libvirt's schema (stale lists? `apt-get update` as root)")?;
    let entry = std::fs::read_dir(tree.path())?.next().context("apt-get fetched nothing")??;
    deb::output(Command::new("dpkg-deb").arg("-x").arg(entry.path()).arg(tree.path()))?;
    let schema = tree.path().join("usr/share/libvirt/schemas/domain.rng");
    let mut lint = Command::new("xmllint");
    lint.args(["--noout", "--relaxng"]).arg(schema).arg(workspace::root().join("contrib/libvirt/vm1.xml"));
    deb::output(&mut lint).map(drop)
}

/// Installs and uses the package; returns the reason if it cannot.
fn lifetime(package: &Path) -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("the test needs root".to_owned()));
    }
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir(path("scratch"))?;
    std::fs::create_dir(path("result"))?;
    std::fs::write(path("boot"), BOOT)?;
    std::fs::write(path("script"), INSIDE)?;
    let mut machine = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare"])
        .args(["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--net", "bash"])
        .args([path("boot"), path("scratch"), package.to_owned(), path("script"), path("result")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("running unshare")?;
    let read = |name: &str| std::fs::read_to_string(path("result").join(name)).unwrap_or_default();
    let ended = wait_until("the package's test", TIMEOUT, || {
        let status = read("status").trim().to_owned();
        Ok((!status.is_empty() || machine.try_wait()?.is_some()).then_some(status))
    });
    // Killing `unshare` kills its child, and with it all processes of the namespace.
    machine.kill()?;
    machine.wait()?;
    // A control group can be removed only after its last process has ended.
    let _ = Command::new("unshare").args(["--mount", "sh", "-c", CLEAN]).arg(path("scratch")).status();
    let skipped = read("skipped");
    if !skipped.is_empty() {
        return Ok(Some(skipped.trim().to_owned()));
    }
    if ended.as_ref().is_ok_and(|status| status == "0") {
        return Ok(None);
    }
    bail!("{ended:?}\n{}", read("log"))
}
