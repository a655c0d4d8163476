//! `cargo xtask deb`: builds the Debian package `aryk` from the list for cargo-deb in `bin/arykd/Cargo.toml`.
//!
//! Uses dpkg's own tools: installing cargo-deb would take longer than all other steps. A tool on an ordinary thread.

pub(crate) mod pages;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{install, workspace};

/// The extent of the build.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only create the listed files that the repository does not contain, for cargo-deb
    #[arg(long)]
    stage_only: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let bin = workspace::build_programs()?;
    if args.stage_only {
        return stage(&bin);
    }
    println!("{}", build(&bin)?.display());
    Ok(())
}

/// Builds the package of the programs in `bin`, and returns its path.
pub(crate) fn build(bin: &Path) -> Result<PathBuf> {
    install::ensure(install::DEB)?;
    stage(bin)?;
    let recipe = Recipe::read(bin)?;
    let tree = tempfile::tempdir()?;
    let root = tree.path().join("aryk");
    for asset in &recipe.assets {
        asset.put(&root)?;
    }
    let changelog = fs::read_to_string(recipe.scripts.join("changelog"))?;
    ensure!(
        changelog.starts_with(&format!("aryk ({}) ", recipe.version))
            && changelog.contains(&recipe.maintainer()?),
        "contrib/debian/changelog does not begin with version {} by {}",
        recipe.version,
        recipe.maintainer()?
    );
    let control = root.join("DEBIAN");
    fs::create_dir_all(&control)?;
    for script in ["postinst", "prerm", "postrm"] {
        copy(&recipe.scripts.join(script), &control.join(script), 0o755)?;
    }
    fs::write(control.join("conffiles"), recipe.list("conf-files")?.join("\n") + "\n")?;
    let size = installed_size(&root)?;
    fs::write(control.join("control"), recipe.control(size, &root, tree.path())?)?;
    let package = bin.join("package").join(format!("aryk_{}_{}.deb", recipe.version, recipe.architecture));
    let mut pack = Command::new("dpkg-deb");
    pack.args(["--build", "--root-owner-group", "-Zxz"]).arg(&root).arg(&package);
    output(&mut pack)?;
    Ok(package)
}

/// Creates the pages, the completions and the list of libraries, beside the programs.
fn stage(bin: &Path) -> Result<()> {
    let package = bin.join("package");
    let metadata = workspace::metadata("bin/arykd/Cargo.toml", &["--no-deps"])?;
    pages::write(&package.join("pages"), &text(&metadata["packages"][0]["repository"])?)?;
    fs::create_dir_all(&package)?;
    fs::write(package.join("libraries"), linked_with()?)?;
    fs::create_dir_all(package.join("man"))?;
    let aryk = || Command::new(bin.join("aryk"));
    output(aryk().arg("man").arg(package.join("man")))?;
    let page = output(Command::new(bin.join("arykd")).arg("--man-page"))?;
    fs::write(package.join("arykd.8"), page)?;
    for shell in ["bash", "zsh", "fish"] {
        let script = output(aryk().args(["completions", shell]))?;
        fs::write(package.join(format!("aryk.{shell}")), script)?;
    }
    Ok(())
}

/// The third-party libraries that the programs are linked with: name, version, licence and source, one per line.
fn linked_with() -> Result<String> {
    let mut tree = workspace::cargo();
    tree.args(["tree", "--locked", "--package", "arykd", "--package", "aryk", "--edges", "normal"]);
    tree.args(["--prefix", "none", "--format", "{p}: {l}: {r}"]);
    let said = output(&mut tree)?;
    let is_foreign = |line: &&str| !line.is_empty() && !line.contains("(/") && !line.contains("(proc-macro)");
    let lines: BTreeSet<_> =
        said.lines().map(|line| line.trim_end_matches(" (*)")).filter(is_foreign).collect();
    Ok(lines.into_iter().map(|line| format!("{line}\n")).collect())
}

/// The installed size in KiB, as dpkg counts it: each file by itself, and one for each directory.
fn installed_size(directory: &Path) -> Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name() == "DEBIAN" {
            continue;
        }
        size += match entry.metadata()? {
            kind if kind.is_dir() => 1 + installed_size(&entry.path())?,
            file => file.len().div_ceil(1024),
        };
    }
    Ok(size)
}

/// The package's metadata, from the manifest.
struct Recipe {
    deb: Value,
    version: String,
    description: String,
    /// The repository's URL.
    repository: String,
    architecture: String,
    scripts: PathBuf,
    assets: Vec<Asset>,
}

impl Recipe {
    fn read(bin: &Path) -> Result<Self> {
        let metadata = workspace::metadata("bin/arykd/Cargo.toml", &["--no-deps"])?;
        let packages = metadata["packages"].as_array().context("no packages")?;
        let arykd = packages.iter().find(|package| package["name"] == "arykd").context("no arykd")?;
        let deb = arykd["metadata"]["deb"].clone();
        let home = workspace::root().join("bin/arykd");
        let architecture = output(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned();
        let mut recipe = Self {
            version: text(&arykd["version"])?,
            description: "disks of virtual machines, over vhost-user".to_owned(),
            repository: text(&arykd["repository"])?,
            architecture,
            scripts: home.join(text(&deb["maintainer-scripts"])?),
            assets: Vec::new(),
            deb,
        };
        for asset in recipe.deb["assets"].as_array().context("no assets")? {
            let source = text(&asset[0])?;
            let source = match source.strip_prefix("target/release/") {
                Some(built) => bin.join(built),
                None => home.join(source),
            };
            let mode = u32::from_str_radix(&text(&asset[2])?, 8)?;
            recipe.assets.extend(Asset::find(&source, &text(&asset[1])?, mode)?);
        }
        Ok(recipe)
    }

    fn list(&self, key: &str) -> Result<Vec<String>> {
        self.deb[key].as_array().with_context(|| format!("no {key}"))?.iter().map(text).collect()
    }

    fn maintainer(&self) -> Result<String> {
        text(&self.deb["maintainer"])
    }

    /// The package's control file, for dpkg. `size` is in KiB; `scratch` is an empty directory except for `root`.
    fn control(&self, size: u64, root: &Path, scratch: &Path) -> Result<String> {
        let field = |key: &str| text(&self.deb[key]);
        let depends = field("depends")?.replace("$auto", &libraries(root, scratch)?);
        let long: String = field("extended-description")?.lines().map(|line| format!(" {line}\n")).collect();
        let home = &self.repository;
        Ok(format!(
            "Package: {}\nVersion: {}\nArchitecture: {}\nMaintainer: {}\nInstalled-Size: {size}\nDepends: {depends}\nRecommends: {}\nSection: {}\nPriority: {}\nHomepage: {home}\nBugs: {home}/issues\nDescription: {}\n{long}",
            field("name")?,
            self.version,
            self.architecture,
            self.maintainer()?,
            field("recommends")?,
            field("section")?,
            field("priority")?,
            self.description,
        ))
    }
}

/// A file of the package.
struct Asset {
    source: PathBuf,
    /// Path below the root directory.
    target: PathBuf,
    mode: u32,
}

impl Asset {
    /// The file at `source`; or, if its name begins with `*`, all files in its directory with the suffix after the `*`.
    fn find(source: &Path, target: &str, mode: u32) -> Result<Vec<Self>> {
        let name = source.file_name().and_then(|name| name.to_str()).context("an asset without a name")?;
        let mut sources = Vec::new();
        if let Some(end) = name.strip_prefix('*') {
            for entry in fs::read_dir(source.parent().context("an asset without a directory")?)? {
                let path = entry?.path();
                if path.is_file() && path.to_string_lossy().ends_with(end) {
                    sources.push(path);
                }
            }
        } else {
            sources.push(source.to_owned());
        }
        ensure!(!sources.is_empty(), "no file matches {}", source.display());
        let asset = |source: PathBuf| {
            let name = source.file_name().context("a file without a name")?;
            let target = if target.ends_with('/') { Path::new(target).join(name) } else { target.into() };
            Ok(Self { source, target, mode })
        };
        sources.into_iter().map(asset).collect()
    }

    fn put(&self, root: &Path) -> Result<()> {
        let target = root.join(&self.target);
        let mut directory = root.to_owned();
        fs::create_dir_all(target.parent().context("a file at the root")?)?;
        for part in self.target.parent().context("a file at the root")? {
            directory.push(part);
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
        }
        copy(&self.source, &target, self.mode)?;
        // As cargo-deb compresses them.
        if self.target.starts_with("usr/share/man") || self.target.ends_with("changelog") {
            return compress(&target);
        }
        let is_program = self.target.starts_with("usr/bin");
        if is_program {
            output(Command::new("strip").args(["--strip-debug"]).arg(&target))?;
        }
        Ok(())
    }
}

/// Replaces a file by a compressed one as Debian requires: at the best compression, and reproducible.
fn compress(path: &Path) -> Result<()> {
    output(Command::new("gzip").args(["-9", "--no-name"]).arg(path)).map(drop)
}

fn copy(source: &Path, target: &Path, mode: u32) -> Result<()> {
    fs::copy(source, target).with_context(|| source.display().to_string())?;
    Ok(fs::set_permissions(target, fs::Permissions::from_mode(mode))?)
}

/// The Debian packages of the libraries that the programs are linked with.
fn libraries(root: &Path, scratch: &Path) -> Result<String> {
    // dpkg-shlibdeps expects a source package's directory.
    fs::create_dir_all(scratch.join("debian"))?;
    fs::write(scratch.join("debian/control"), "Source: aryk\n\nPackage: aryk\nArchitecture: any\n")?;
    let mut command = Command::new("dpkg-shlibdeps");
    command
        .current_dir(scratch)
        .arg("-O")
        .args(["arykd", "aryk"].map(|name| root.join("usr/bin").join(name)));
    let said = output(&mut command)?;
    let depends = said.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    Ok(depends.with_context(|| format!("dpkg-shlibdeps printed {said:?}"))?.to_owned())
}

fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} is no string"))?.to_owned())
}

/// Runs a command to its end and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
