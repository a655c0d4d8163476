//! The budgets of the test stages, in processor seconds: `docs/gate.md` lists them, `cargo xtask test` records the time
//! of each stage, and `cargo xtask check` compares both.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::workspace;

/// Processor seconds per stage.
type Seconds = BTreeMap<String, u64>;

/// Records the times of some stages, and keeps those of the others.
pub(crate) fn keep(costs: impl IntoIterator<Item = (String, u64)>) -> Result<()> {
    let mut known = last_run().unwrap_or_default();
    known.extend(costs);
    let file = file()?;
    std::fs::write(&file, serde_json::to_string_pretty(&known)?)
        .with_context(|| format!("writing {}", file.display()))
}

/// A finding for each stage whose last run exceeded its budget, and for each stage without a budget.
pub(crate) fn warnings() -> Result<Vec<String>> {
    let page = workspace::root().join("docs/gate.md");
    let text = std::fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
    Ok(compare(&budgets(&text), &last_run().unwrap_or_default()))
}

fn compare(budgets: &Seconds, took: &Seconds) -> Vec<String> {
    let line = |(stage, &seconds): (&String, &u64)| match budgets.get(stage) {
        Some(&budget) if seconds <= budget => None,
        Some(budget) => Some(format!(
            "stage {stage} took {seconds} processor seconds; its budget in docs/gate.md is {budget}"
        )),
        None => Some(format!("stage {stage} has no budget in docs/gate.md")),
    };
    took.iter().filter_map(line).collect()
}

/// The rows of the page's table of stages: the first and the last column.
fn budgets(page: &str) -> Seconds {
    let row = |line: &str| {
        let cells: Vec<_> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
        let [stage, _, _, _, budget] = cells[..] else { return None };
        Some((stage.to_owned(), budget.parse().ok()?))
    };
    page.lines().filter_map(row).collect()
}

/// The recorded times of the last runs. An error if there are none.
fn last_run() -> Result<Seconds> {
    Ok(serde_json::from_str(&std::fs::read_to_string(file()?)?)?)
}

fn file() -> Result<PathBuf> {
    Ok(workspace::target()?.join("gate.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_over_their_budget_are_named() {
        let page = "| stage | what it is | seconds | processor seconds | budget |\n| --- | --- | --- | --- | --- |\n\
                    | Unit | units | 1 | 2 | 10 |\n| Loom | models | 1 | 2 | 20 |\n| a | b |\n";
        let budgets = budgets(page);
        assert_eq!(budgets, Seconds::from([("Unit".to_owned(), 10), ("Loom".to_owned(), 20)]));
        let took = |seconds| Seconds::from([("Unit".to_owned(), seconds), ("Loom".to_owned(), 20)]);
        assert!(compare(&budgets, &took(10)).is_empty());
        assert!(compare(&budgets, &took(11))[0].contains("Unit took 11 processor seconds"));
        assert!(compare(&budgets, &Seconds::from([("New".to_owned(), 1)]))[0].contains("no budget"));
    }

    #[test]
    fn each_stage_has_a_budget() {
        let text = std::fs::read_to_string(workspace::root().join("docs/gate.md")).expect("the page exists");
        let budgets = budgets(&text);
        for stage in crate::test::stage_names() {
            assert!(budgets.contains_key(&stage), "{stage}");
        }
    }
}
