//! VFIO's modules of a Debian kernel, built again with what Debian leaves out: iommufd, and VFIO's character devices.
//!
//! The kernel itself needs no change: iommufd is a module, and what it calls is exported. Only the part of the kernel's interval
//! trees that iommufd alone needs becomes part of the module.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The source package of the kernel of [`META_PACKAGE`].
const SOURCE: &str = "linux-source-6.12";
/// The package whose dependency names a kernel with the functions that iommufd calls.
pub(crate) const META_PACKAGE: &str = "linux-image-6.12-cloud-amd64";
/// The parts of the sources that are built.
const PARTS: [&str; 3] = ["drivers/iommu", "drivers/vfio", "lib/interval_tree.c"];
/// What builds them.
pub(crate) const MAKEFILE: &str = "\
obj-m := iommu/iommufd/ vfio/
subdir-ccflags-y := -DCONFIG_IOMMUFD_MODULE -DCONFIG_VFIO_DEVICE_CDEV -DCONFIG_INTERVAL_TREE_SPAN_ITER
";
const SETTINGS: [&str; 4] =
    ["CONFIG_IOMMUFD=m", "CONFIG_VFIO_DEVICE_CDEV=y", "CONFIG_DEBUG_INFO=", "CONFIG_DEBUG_INFO_BTF_MODULES="];
/// Where the rest of the interval trees begins.
const SPANS: &str = "#ifdef CONFIG_INTERVAL_TREE_SPAN_ITER";

/// The packages that a build for the kernel with this version needs.
pub(crate) fn packages(version: &str) -> Result<[String; 4]> {
    let release = release(version)?;
    let [headers, common] =
        [version, &format!("{release}-common")].map(|part| format!("linux-headers-{part}"));
    Ok([SOURCE.to_owned(), headers, common, format!("linux-kbuild-{release}")])
}

/// A version without the kind of its kernel.
fn release(version: &str) -> Result<&str> {
    version.strip_suffix("-cloud-amd64").with_context(|| format!("{version} is no cloud kernel"))
}

/// Builds the modules from the packages below `root`, and puts them into the place of Debian's below `modules`.
pub(crate) fn build(
    version: &str,
    root: &Path,
    modules: &Path,
    run: fn(&mut Command) -> Result<()>,
) -> Result<()> {
    let packed = root.join(format!("usr/src/{SOURCE}.tar.xz"));
    let parts = PARTS.map(|part| format!("{SOURCE}/{part}"));
    run(Command::new("tar").arg("-xJf").arg(packed).arg("-C").arg(root).args(parts))?;
    let source = root.join(SOURCE);
    let drivers = source.join("drivers");
    std::fs::write(drivers.join("Makefile"), MAKEFILE)?;
    let trees = std::fs::read_to_string(source.join("lib/interval_tree.c"))?;
    let spans = trees.find(SPANS).context("the kernel's interval trees are different")?;
    let spans = format!("#include <linux/interval_tree.h>\n{}", &trees[spans..]);
    let iommufd = drivers.join("iommu/iommufd");
    std::fs::write(iommufd.join("spans.c"), spans)?;
    let makefile = std::fs::read_to_string(iommufd.join("Makefile"))?;
    std::fs::write(iommufd.join("Makefile"), format!("{makefile}\niommufd-y += spans.o\n"))?;

    // The packages expect to be installed.
    let headers = root.join(format!("usr/src/linux-headers-{version}"));
    let common = root.join(format!("usr/src/linux-headers-{}-common/Makefile", release(version)?));
    std::fs::write(headers.join("Makefile"), format!("include {}\n", common.display()))?;
    let place = format!("M={}", drivers.display());
    run(Command::new("make").arg("-sC").arg(headers).args(["-j2", &place]).args(SETTINGS).arg("modules"))?;

    let theirs = modules.join("kernel/drivers/vfio");
    std::fs::remove_dir_all(&theirs)?;
    std::fs::create_dir(&theirs)?;
    let built = [
        "iommu/iommufd/iommufd",
        "vfio/vfio",
        "vfio/vfio_iommu_type1",
        "vfio/pci/vfio-pci-core",
        "vfio/pci/vfio-pci",
    ];
    for module in built.map(|name| drivers.join(format!("{name}.ko"))) {
        move_into(&theirs, &module)?;
    }
    Ok(())
}

fn move_into(directory: &Path, file: &PathBuf) -> Result<()> {
    ensure!(file.exists(), "{} was not built", file.display());
    std::fs::rename(file, directory.join(file.file_name().context("a module without a name")?))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::packages;

    #[test]
    fn packages_are_of_the_kernel() {
        let names = packages("6.12.117+deb12-cloud-amd64").unwrap();
        assert_eq!(names[1], "linux-headers-6.12.117+deb12-cloud-amd64");
        assert_eq!(names[2], "linux-headers-6.12.117+deb12-common");
        assert_eq!(names[3], "linux-kbuild-6.12.117+deb12");
        assert!(packages("6.12.117+deb12-amd64").is_err());
    }
}
