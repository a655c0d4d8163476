//! An image on a Ceph cluster as the disk: `arykd` serves it, and `rbd` gives access to its content before and after. Test tool,
//! the front-end's thread.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The pool of the images.
pub const POOL: &str = "rbd";

/// An image in [`POOL`].
#[derive(Clone, Debug)]
pub struct Image {
    conf: PathBuf,
    name: String,
    features: Option<String>,
}

impl Image {
    /// The image `name` of the cluster with the configuration file `conf`. It will have the cluster's default features, or these.
    #[must_use]
    pub fn new(conf: &Path, name: &str, features: Option<&str>) -> Self {
        Self { conf: conf.to_owned(), name: name.to_owned(), features: features.map(str::to_owned) }
    }

    /// The cluster's configuration file.
    #[must_use]
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// The image's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creates the image with this content.
    ///
    /// # Errors
    /// It exists, or the cluster refuses.
    pub fn fill(&self, bytes: &[u8]) -> Result<()> {
        let spec = self.spec();
        let mut arguments = vec!["import", "--no-progress", "-", &spec];
        if let Some(features) = &self.features {
            arguments.extend(["--image-feature", features]);
        }
        self.rbd(&arguments, bytes).map(drop)
    }

    /// Reads the image's content.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn content(&self) -> Result<Vec<u8>> {
        self.rbd(&["export", "--no-progress", &self.spec(), "-"], &[])
    }

    fn spec(&self) -> String {
        format!("{POOL}/{}", self.name)
    }

    /// Runs `rbd` with an input; returns its output.
    fn rbd(&self, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let mut rbd = Command::new("rbd");
        rbd.arg("--conf").arg(&self.conf).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = rbd.spawn().context("running rbd")?;
        child.stdin.take().context("stdin is a pipe")?.write_all(input)?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "rbd {}: {}", arguments.join(" "), output.status);
        Ok(output.stdout)
    }
}
