//! The guest's image: Debian's cloud kernel as an ELF file, a small initrd, and a disk with larger tools.
//!
//! It is assembled once, without root, from Debian's packages and this host's programs, and kept under `target/guest`,
//! named after the kernel's version and a hash of the recipe. The image is independent of the disks under test.
//! A second image has a later kernel with iommufd, whose modules of VFIO are built from Debian's source package; a third has the
//! generic kernel, and the libraries of RDMA.
//! Assembling needs the network, a cached image does not.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};

use crate::cpio;
use crate::kernel::{self, iommufd};

/// The package whose dependency names the current kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// The same for the kernel with RDMA by software, which the cloud kernel lacks.
const RDMA_META_PACKAGE: &str = "linux-image-amd64";
/// The libraries of RDMA, which programs load at run time, and their drivers of devices.
const RDMA_PACKAGES: &[&str] =
    &["librdmacm1", "libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200"];
/// Modules that the initrd loads, in order; their dependencies are found automatically.
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "crc32c_intel", "ext4"];
/// Modules that a script loads with `load_modules`, with their dependencies.
const MODULES_OF_SCRIPTS: &[(&str, &[&str])] = &[
    ("vfio", &["vfio_iommu_type1", "vfio-pci"]),
    ("cuse", &["cuse"]),
    ("dm-crypt", &["dm-crypt", "ecb", "xts", "aes_generic"]),
    ("nvme-tcp", &["virtio_net", "nvme-tcp"]),
    ("nvmet-tcp", &["virtio_net", "nvmet-tcp"]),
    ("brd", &["brd"]),
    ("nvme-auth", &["hmac", "sha256_generic", "sha512_generic", "dh_generic"]),
];
/// The same, with the kernel that has RDMA.
const MODULES_OF_RDMA: &[(&str, &[&str])] = &[
    ("rdma", &["virtio_net", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "nvme-rdma", "nvme-tcp"]),
    ("nvmet-rdma", &["nvmet-rdma"]),
];
/// This host's programs that the guest has in addition to busybox, with the libraries that they load.
const TOOLS: &[&str] = &[
    "cryptsetup",
    "fio",
    "mkfs.ext4",
    "e2fsck",
    "blkdiscard",
    "nvme",
    "rdma",
    "setpriv",
    "sg_compare_and_write",
    "sg_get_lba_status",
    "sg_inq",
    "sg_luns",
    "sg_modes",
    "sg_opcodes",
    "sg_persist",
    "sg_raw",
    "sg_readcap",
    "sg_requests",
    "sg_reset",
    "sg_start",
    "sg_sync",
    "sg_turs",
    "sg_unmap",
    "sg_verify",
    "sg_vpd",
    "sg_write_same",
    "smartctl",
];
/// Incremented when the assembly changes and its inputs do not.
const RECIPE: u32 = 1;
const INIT: &str = include_str!("init.sh");
const HELPERS: &str = include_str!("helpers.sh");

/// The kernels that an image can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Debian's cloud kernel.
    Current,
    /// A later one, with iommufd and VFIO's character devices.
    Iommufd,
    /// Debian's generic kernel, with RDMA over any network device, and its libraries.
    Rdma,
}

impl Kernel {
    /// The name of the newest package.
    fn newest(self) -> Result<String> {
        let meta = match self {
            Self::Current => META_PACKAGE,
            Self::Iommufd => iommufd::META_PACKAGE,
            Self::Rdma => RDMA_META_PACKAGE,
        };
        let listing = output(Command::new("apt-cache").args(["depends", meta]))?;
        let depends = listing.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        depends.map(str::to_owned).with_context(|| {
            format!("apt does not know {meta}: is this Debian, and has `apt-get update` run?")
        })
    }
}

/// The paths of the three parts of an assembled image.
#[derive(Clone, Debug)]
pub struct Image {
    /// The uncompressed kernel.
    pub vmlinux: PathBuf,
    /// The initial file system; a second archive with the script follows it at boot.
    pub initrd: PathBuf,
    /// An ext4 image that the guest mounts read-only at `/usr`.
    pub tools: PathBuf,
    /// The kernel package, e.g. `linux-image-6.1.0-56-cloud-amd64`.
    pub kernel: String,
    /// Which kernel that is.
    pub kind: Kernel,
}

impl Image {
    /// Finds the image with Debian's current kernel under `cache`, or assembles it there.
    ///
    /// # Errors
    /// A required program is missing, or a package can be neither found nor fetched.
    pub fn prepare(cache: &Path) -> Result<Self> {
        Self::with_kernel(Kernel::Current, cache)
    }

    /// Finds or assembles the image with another kernel beside this one.
    ///
    /// # Errors
    /// As [`Image::prepare`].
    pub fn beside(&self, kind: Kernel) -> Result<Self> {
        let cache = self.vmlinux.ancestors().nth(2).context("an image in no cache")?;
        Self::with_kernel(kind, cache)
    }

    fn with_kernel(kind: Kernel, cache: &Path) -> Result<Self> {
        // The cases of one process do not assemble it twice.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let recipe = recipe_hash(kind)?;
        let kernel = match kind.newest() {
            Ok(kernel) => kernel,
            Err(error) => return cached(kind, cache, recipe).ok_or(error),
        };
        let home = cache.join(format!("{kernel}-{recipe:016x}"));
        if !home.exists() {
            std::fs::create_dir_all(cache)?;
            let work = tempfile::tempdir_in(cache)?;
            assemble(kind, &kernel, work.path())
                .with_context(|| format!("assembling the guest's image from {kernel}"))?;
            // Another process may have been faster; its image is equivalent.
            if let Err(error) = std::fs::rename(work.path(), &home) {
                ensure!(home.exists(), "keeping the guest's image: {error}");
            }
        }
        Ok(Self::at(&home, kind, kernel))
    }

    fn at(home: &Path, kind: Kernel, kernel: String) -> Self {
        let part = |name| home.join(name);
        Self { vmlinux: part("vmlinux"), initrd: part("initrd.cpio"), tools: part("tools.img"), kernel, kind }
    }
}

/// A hash of everything but the kernel that determines the image's content.
fn recipe_hash(kind: Kernel) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    if kind == Kernel::Iommufd {
        iommufd::MAKEFILE.hash(&mut hasher);
    }
    if kind == Kernel::Rdma {
        (RDMA_PACKAGES, MODULES_OF_RDMA).hash(&mut hasher);
    }
    (RECIPE, INIT, HELPERS, MODULES, MODULES_OF_SCRIPTS, TOOLS).hash(&mut hasher);
    for tool in TOOLS {
        let metadata = std::fs::metadata(program(tool)?)?;
        (metadata.len(), metadata.modified()?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// A cached image of this recipe with any kernel, for when apt cannot name the current one.
fn cached(kind: Kernel, cache: &Path, recipe: u64) -> Option<Image> {
    let suffix = format!("-{recipe:016x}");
    std::fs::read_dir(cache).ok()?.filter_map(Result::ok).find_map(|entry| {
        let kernel = entry.file_name().to_str()?.strip_suffix(&suffix)?.to_owned();
        Some(Image::at(&entry.path(), kind, kernel))
    })
}

fn assemble(kind: Kernel, kernel: &str, home: &Path) -> Result<()> {
    let packages = home.join("packages");
    let root = home.join("root");
    let version = kernel.trim_start_matches("linux-image-");
    let mut names = vec![kernel.to_owned(), "busybox-static".to_owned()];
    if kind == Kernel::Iommufd {
        names.extend(iommufd::packages(version)?);
    }
    if kind == Kernel::Rdma {
        names.extend(RDMA_PACKAGES.iter().map(|&name| name.to_owned()));
    }
    fetch(&names, &packages, &root)?;
    let image = Image::at(home, kind, kernel.to_owned());
    kernel::extract(&root.join(format!("boot/vmlinuz-{version}")), &image.vmlinux)?;
    let modules = root.join("lib/modules").join(version);
    if kind == Kernel::Iommufd {
        run(Command::new("find").arg(&modules).args(["-name", "*.ko.xz", "-exec", "xz", "-d", "{}", "+"]))?;
        iommufd::build(version, &root, &modules, run).context("building VFIO with iommufd")?;
    }
    let of_scripts = if kind == Kernel::Rdma { MODULES_OF_RDMA } else { MODULES_OF_SCRIPTS };
    std::fs::write(&image.initrd, initrd(&root, &modules, of_scripts)?)?;
    let mut files = tools()?;
    if kind == Kernel::Rdma {
        add_libraries(&root, &mut files)?;
    }
    tools_disk(&files, &home.join("tools"), &image.tools)?;
    for scratch in [packages, root, home.join("tools")] {
        std::fs::remove_dir_all(scratch)?;
    }
    Ok(())
}

/// Downloads Debian packages and unpacks them side by side.
fn fetch(names: &[String], packages: &Path, root: &Path) -> Result<()> {
    std::fs::create_dir_all(packages)?;
    run(Command::new("apt-get").args(["-qq", "download"]).args(names).current_dir(packages))
        .context("fetching packages (stale lists? `apt-get update` as root)")?;
    for package in std::fs::read_dir(packages)? {
        run(Command::new("dpkg-deb").arg("-x").arg(package?.path()).arg(root))?;
    }
    Ok(())
}

fn initrd(root: &Path, modules: &Path, of_scripts: &[(&str, &[&str])]) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    archive.directory("bin");
    archive.file("bin/busybox", 0o755, &std::fs::read(root.join("bin/busybox"))?);
    archive.directory("modules");
    let at_boot = ("order", MODULES);
    let mut added = BTreeSet::new();
    for (list, wanted) in std::iter::once(&at_boot).chain(of_scripts) {
        let mut order = String::new();
        for module in kernel::modules(modules, wanted)? {
            let name =
                module.file_stem().and_then(|stem| stem.to_str()).context("a module without a name")?;
            order.push_str(name);
            order.push('\n');
            if added.insert(name.to_owned()) {
                archive.file(&format!("modules/{name}.ko"), 0o644, &std::fs::read(&module)?);
            }
        }
        archive.file(&format!("modules/{list}"), 0o644, order.as_bytes());
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("helpers", 0o644, HELPERS.as_bytes());
    Ok(archive.finish())
}

/// The archive that carries `script` and programs of this host with their libraries into the guest, to be appended to the initrd.
pub(crate) fn script_archive(script: &str, programs: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = cpio::Archive::default();
    archive.file("script", 0o644, script.as_bytes());
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str().map(str::to_owned));
    archive.directory("programs");
    archive.directory("programs/lib");
    let mut needed = BTreeSet::new();
    for program in programs {
        needed.extend(libraries(program).with_context(|| format!("is {} built?", program.display()))?);
        let file = format!("programs/{}", name(program).context("a program without a name")?);
        archive.file(&file, 0o755, &without_debug_info(program)?);
    }
    for library in needed {
        let file = format!("programs/lib/{}", name(&library).context("a library without a name")?);
        archive.file(&file, 0o755, &std::fs::read(&library)?);
    }
    Ok(archive.finish())
}

/// A program as it is delivered: its lines and types, four fifths of its size, would occupy the guest's memory.
fn without_debug_info(program: &Path) -> Result<Vec<u8>> {
    let stripped = tempfile::NamedTempFile::new()?;
    output(Command::new("strip").arg("--strip-debug").arg("-o").arg(stripped.path()).arg(program))?;
    Ok(std::fs::read(stripped.path())?)
}

/// The files of a guest, by their paths in it.
type Files = BTreeMap<PathBuf, PathBuf>;

/// The tools and their libraries.
fn tools() -> Result<Files> {
    let mut files = Files::new();
    for tool in TOOLS {
        let path = program(tool)?;
        files.extend(libraries(&path)?.into_iter().map(|library| (library.clone(), library)));
        files.insert(path.clone(), path);
    }
    Ok(files)
}

/// Adds the libraries of the packages that are unpacked at `root`.
fn add_libraries(root: &Path, files: &mut Files) -> Result<()> {
    for directory in
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/libibverbs"]
    {
        for file in std::fs::read_dir(root.join(directory)).with_context(|| format!("no {directory}"))? {
            let path = file?.path();
            let is_library = path.is_file() && path.to_string_lossy().contains(".so");
            if is_library {
                files.insert(Path::new("/").join(path.strip_prefix(root)?), path);
            }
        }
    }
    Ok(())
}

/// Copies files into `tree` (which becomes the guest's /usr), and makes a disk of it.
fn tools_disk(files: &Files, tree: &Path, disk: &Path) -> Result<()> {
    let mut bytes = 0;
    for (name, file) in files {
        // Debian's /bin and /lib are links into /usr: one tree serves both names.
        let inside = name.strip_prefix("/usr").or_else(|_| name.strip_prefix("/"))?;
        let target = tree.join(inside);
        std::fs::create_dir_all(target.parent().context("a file at the root")?)?;
        bytes += std::fs::copy(file, target)?;
    }
    let megabytes = bytes / (1 << 20) * 5 / 4 + 16;
    run(Command::new(program("mkfs.ext4")?)
        .args(["-q", "-F", "-O", "^has_journal", "-m", "0", "-d"])
        .args([tree, disk])
        .arg(format!("{megabytes}M")))
}

fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listing = output(Command::new("ldd").arg(program))?;
    Ok(listing.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// Finds a program in root's PATH, without being root.
fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
        .with_context(|| format!("{name} is not installed"))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}
