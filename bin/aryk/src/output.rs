//! What is printed: JSON, or tables and lines of at most 80 columns.

use crate::cli::Cli;
use crate::error::Error;
use clap::CommandFactory;
use clap_complete::Shell;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table, presets};
use serde_json::Value;
use std::io::{self, IsTerminal, Write};

const WIDTH: u16 = 80;

/// Where and how to print.
pub struct Output {
    pub json: bool,
    is_styled: bool,
}

/// The colour of a row's first cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Good,
    Warning,
    Bad,
}

/// A column's heading, and whether it holds numbers.
pub type Column = (&'static str, bool);

impl Output {
    /// The standard output; colours only on a terminal.
    pub fn new(json: bool) -> Self {
        let is_styled = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { json, is_styled }
    }

    /// For people, without colours.
    #[cfg(test)]
    pub const fn plain() -> Self {
        Self { json: false, is_styled: false }
    }

    /// Prints `value` if JSON is wanted, or else what `human` makes.
    pub fn print(&self, value: &Value, human: impl FnOnce() -> String) -> Result<(), Error> {
        let text = if self.json { format!("{value:#}") } else { human() };
        writeln!(io::stdout().lock(), "{}", text.trim_end())?;
        Ok(())
    }

    /// Prints lines.
    #[expect(clippy::unused_self, reason = "what is printed is printed here")]
    pub fn say(&self, text: &str) -> Result<(), Error> {
        writeln!(io::stdout().lock(), "{text}")?;
        Ok(())
    }

    /// Rows under headings.
    pub fn table(&self, columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
        self.toned_table(columns, rows.into_iter().map(|row| (Tone::Plain, row)))
    }

    /// Rows under headings, each with a colour for its first cell.
    pub fn toned_table(
        &self,
        columns: &[Column],
        rows: impl IntoIterator<Item = (Tone, Vec<String>)>,
    ) -> String {
        let mut table = self.bare_table();
        table.set_header(columns.iter().map(|(heading, _)| self.heading(heading)));
        for (tone, row) in rows {
            let mut cells: Vec<_> = row.iter().map(|cell| Cell::new(printable(cell))).collect();
            if let Some(color) = tone.color() {
                cells = cells
                    .into_iter()
                    .enumerate()
                    .map(|(i, c)| if i == 0 { c.fg(color) } else { c })
                    .collect();
            }
            table.add_row(cells);
        }
        for (column, (_, is_number)) in table.column_iter_mut().zip(columns) {
            let alignment = if *is_number { CellAlignment::Right } else { CellAlignment::Left };
            column.set_cell_alignment(alignment);
        }
        trimmed(&table)
    }

    /// Names and values, one pair a line.
    pub fn list(&self, pairs: impl IntoIterator<Item = (&'static str, String)>) -> String {
        let mut table = self.bare_table();
        for (name, value) in pairs {
            table.add_row([self.heading(name), Cell::new(printable(&value))]);
        }
        trimmed(&table)
    }

    fn bare_table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(WIDTH);
        if self.is_styled {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table
    }

    fn heading(&self, text: &str) -> Cell {
        Cell::new(text).add_attribute(Attribute::Bold)
    }

    /// Prints a shell's completion script.
    pub fn completions(&self, shell: Shell) -> Result<(), Error> {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "aryk", &mut script);
        io::stdout().lock().write_all(&script)?;
        Ok(())
    }
}

impl Tone {
    const fn color(self) -> Option<Color> {
        match self {
            Self::Plain => None,
            Self::Good => Some(Color::Green),
            Self::Warning => Some(Color::Yellow),
            Self::Bad => Some(Color::Red),
        }
    }
}

/// Lines without the blanks that a table has at its edges.
fn trimmed(table: &Table) -> String {
    let lines = table.lines().map(|line| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

/// Names may hold anything; a terminal must not obey them.
fn printable(text: &str) -> String {
    let escape = |c: char| match c {
        c if c.is_control() => c.escape_unicode().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_80_columns() {
        let long = "x".repeat(200);
        let rows = [
            vec!["a".into(), "1".into()],
            vec![long, "1000".into()],
            vec!["磁盘\u{1b}[31m".into(), "2".into()],
        ];
        let text = Output::plain().table(&[("NAME", false), ("SIZE", true)], rows);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.starts_with("NAME"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn styles_are_for_terminals() {
        let styled = Output { json: false, is_styled: true };
        assert!(styled.table(&[("NAME", false)], [vec!["a".into()]]).contains('\u{1b}'));
    }
}
