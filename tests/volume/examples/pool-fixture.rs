//! Makes an image of a pool of today's format, for `tests/volume/fixtures`: see `aryk_volume_simulation::fixture`.
#![forbid(unsafe_code)]

use anyhow::{Context, Error, Result};
use aryk_volume_simulation::fixture;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).context("usage: pool-fixture FILE")?;
    let image = fixture::make().map_err(Error::msg)?;
    fixture::check(&image).map_err(Error::msg)?;
    std::fs::write(&path, image).with_context(|| format!("writing {}", path.display()))
}
