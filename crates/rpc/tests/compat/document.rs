//! Parses `docs/rpc-compat.md`: rows `| method | yes or no | note |`.
//!
//! A note may state the following, which is checked: "Not taken: `a`, `b`." for parameters, "Not taken values: `"x"`." for
//! values, and "Not given: `c`." for members of the result.

use std::collections::{BTreeMap, BTreeSet};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rpc-compat.md");

pub struct Document {
    text: String,
    pub rows: BTreeMap<String, Row>,
    /// Methods that SPDK does not have.
    pub ours: BTreeSet<String>,
}

pub struct Row {
    pub is_answered: bool,
    pub note: String,
    pub not_taken: BTreeSet<String>,
    /// As JSON.
    pub not_taken_values: BTreeSet<String>,
    pub not_given: BTreeSet<String>,
}

impl Row {
    /// The result has no members: "Always empty".
    pub fn is_empty(&self) -> bool {
        self.note.starts_with("Always empty")
    }

    /// The method is answered for compatibility, without any effect or contents.
    fn is_idle(&self) -> bool {
        let is_said = |start: &&str| self.note.starts_with(*start);
        self.is_answered && ["Always", "All counts are 0", "Without effect"].iter().any(is_said)
    }
}

impl Document {
    pub fn read() -> Self {
        let text = std::fs::read_to_string(PATH).unwrap();
        let (mut rows, mut ours) = (BTreeMap::new(), BTreeSet::new());
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let method = cells[0].trim_matches('`').to_owned();
            match *cells.as_slice() {
                [_, answered @ ("yes" | "no"), note] => {
                    let row = Row {
                        is_answered: answered == "yes",
                        note: note.to_owned(),
                        not_taken: names_after("Not taken: ", note),
                        not_taken_values: names_after("Not taken values: ", note),
                        not_given: names_after("Not given: ", note),
                    };
                    assert!(rows.insert(method, row).is_none(), "twice: {line}");
                }
                [_, "ours", _] => assert!(ours.insert(method), "twice: {line}"),
                _ => panic!("not a row: {line}"),
            }
        }
        Self { text, rows, ours }
    }

    pub fn row(&self, method: &str) -> &Row {
        self.rows.get(method).unwrap_or_else(|| panic!("the document does not speak of {method}"))
    }

    /// Checks the counts in the document, of all methods and of each section.
    pub fn check_counts(&self, answered: usize, all: usize) {
        let expected = format!("**{answered} of {all}**");
        assert!(self.text.contains(&expected), "the document should say {expected}");
        let idle = self.rows.values().filter(|row| row.is_idle()).count();
        let expected = format!("**{idle} of these**");
        assert!(self.text.contains(&expected), "the document should say {expected}");
        for section in self.text.split("\n## ").skip(1) {
            let title = section.lines().next().unwrap_or_default();
            let count = |cell: &str| section.lines().filter(|line| line.contains(cell)).count();
            let (yes, no) = (count("` | yes |"), count("` | no |"));
            let expected = format!(": {yes} of {}", yes + no);
            assert!(yes + no == 0 || title.ends_with(&expected), "'{title}' should end with '{expected}'");
        }
    }
}

/// The names in backquotes after `label`, up to the next full stop.
fn names_after(label: &str, note: &str) -> BTreeSet<String> {
    let Some((_, list)) = note.split_once(label) else { return BTreeSet::new() };
    // Names may contain full stops, which no space follows.
    let list = list.split(". ").next().unwrap_or_default();
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}
