//! Writes the repository's pages into the package: with the same layout, and with links to files outside the package
//! replaced by links to the repository on the web. A tool on an ordinary thread.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::workspace;

/// Directories whose pages are shipped, relative to the root; of the root itself, the pages of the second list.
const DIRECTORIES: [&str; 3] = ["docs", "docs/examples", "docs/rpc"];
const AT_THE_ROOT: [&str; 2] = ["README.md", "CHANGELOG.md"];

/// Writes the pages below `directory`. `repository` is the repository's URL.
pub(super) fn write(directory: &Path, repository: &str) -> Result<()> {
    let root = workspace::root();
    let mut pages: BTreeSet<PathBuf> = AT_THE_ROOT.into_iter().map(PathBuf::from).collect();
    for below in DIRECTORIES {
        for entry in fs::read_dir(root.join(below))? {
            let name = entry?.file_name();
            if Path::new(&name).extension().is_some_and(|end| end == "md") {
                pages.insert(Path::new(below).join(name));
            }
        }
    }
    let _ = fs::remove_dir_all(directory);
    for page in &pages {
        let text = fs::read_to_string(root.join(page)).with_context(|| page.display().to_string())?;
        let target = directory.join(page);
        fs::create_dir_all(target.parent().context("a page at the root")?)?;
        fs::write(target, relink(page, &text, &pages, repository))?;
    }
    Ok(())
}

/// Returns `text` with its links to files that are not among `pages` replaced by links to the repository.
fn relink(page: &Path, text: &str, pages: &BTreeSet<PathBuf>, repository: &str) -> String {
    let mut relinked = String::new();
    let mut rest = text;
    for link in links(text) {
        let start = link.as_ptr().addr() - rest.as_ptr().addr();
        relinked += &rest[..start];
        rest = &rest[start + link.len()..];
        let (path, fragment) = link.find('#').map_or((link, ""), |at| link.split_at(at));
        let path = resolve(page, path);
        if pages.contains(&path) {
            relinked += link;
        } else {
            let kind = if workspace::root().join(&path).is_dir() { "tree" } else { "blob" };
            relinked += &format!("{repository}/{kind}/main/{}{fragment}", path.display());
        }
    }
    relinked + rest
}

/// The targets of a page's links to other files, in order.
pub(crate) fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    targets.filter(|to| !to.starts_with('#') && !to.contains("://") && !to.contains(char::is_whitespace))
}

/// The path that the link `to` of `page` leads to, relative to the same directory as `page`.
pub(crate) fn resolve(page: &Path, to: &str) -> PathBuf {
    let mut path = page.parent().map(Path::to_owned).unwrap_or_default();
    for part in Path::new(to).components() {
        match part {
            Component::ParentDir => _ = path.pop(),
            Component::CurDir => (),
            part => path.push(part),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_what_is_shipped_or_to_the_web() {
        let pages = BTreeSet::from(["README.md", "docs/a.md", "docs/b.md"].map(PathBuf::from));
        let text = "[b](b.md#x) [r](../README.md) [c](../crates) [d](bench/d.md#y) [w](https://w) [h](#h)";
        let relinked = relink(Path::new("docs/a.md"), text, &pages, "https://r");
        assert_eq!(
            relinked,
            "[b](b.md#x) [r](../README.md) [c](https://r/tree/main/crates) \
             [d](https://r/blob/main/docs/bench/d.md#y) [w](https://w) [h](#h)"
        );
    }
}
