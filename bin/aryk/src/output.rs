//! What is printed: JSON, or tables and lines of at most 80 columns.

use crate::cli::Cli;
use crate::error::Error;
use crate::watch;
use clap::CommandFactory;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table, presets};
use serde_json::Value;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

const WIDTH: u16 = 80;

/// Blanks before and after each cell.
const PADDING: (u16, u16) = (0, 2);

/// Where and how to print.
pub struct Output {
    pub json: bool,
    is_styled: bool,
    repeats: Repeats,
}

/// What becomes of what was printed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Repeats {
    /// There is nothing.
    No,
    /// It stays.
    Below,
    /// It is drawn over.
    InPlace,
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
    /// The standard output, once or again and again; colours only on a terminal.
    pub fn new(json: bool, repeats: bool) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let is_styled = is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let repeats = match (repeats, is_terminal && !json) {
            (false, _) => Repeats::No,
            (true, false) => Repeats::Below,
            (true, true) => Repeats::InPlace,
        };
        Self { json, is_styled, repeats }
    }

    /// For people, once, without colours: what is shown within something else.
    pub const fn unstyled() -> Self {
        Self { json: false, is_styled: false, repeats: Repeats::No }
    }

    /// For people, without colours.
    #[cfg(test)]
    pub const fn plain() -> Self {
        Self { json: false, is_styled: false, repeats: Repeats::No }
    }

    /// Prints `value` if JSON is wanted, or else what `human` makes. What repeats has a line for each JSON, and
    /// an empty line after each table.
    pub fn print(&self, value: &Value, human: impl FnOnce() -> String) -> Result<(), Error> {
        let mut stdout = io::stdout().lock();
        match (self.json, self.repeats) {
            (true, Repeats::No) => writeln!(stdout, "{value:#}")?,
            (true, _) => writeln!(stdout, "{value}")?,
            (false, Repeats::No) => writeln!(stdout, "{}", human().trim_end())?,
            (false, Repeats::Below) => writeln!(stdout, "{}\n", human().trim_end())?,
            (false, Repeats::InPlace) => {
                let rows = rustix::termios::tcgetwinsize(&stdout).map_or(24, |size| size.ws_row.max(4));
                write!(stdout, "{}", watch::frame(human().trim_end(), rows.into()))?;
            }
        }
        stdout.flush()?;
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
            column.set_padding(PADDING);
        }
        trimmed(&table)
    }

    /// Names and values, one pair a line.
    pub fn list(&self, pairs: impl IntoIterator<Item = (&'static str, String)>) -> String {
        let mut table = self.bare_table();
        for (name, value) in pairs {
            table.add_row([self.heading(name), Cell::new(printable(&value))]);
        }
        table.column_iter_mut().for_each(|column| _ = column.set_padding(PADDING));
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

    /// Writes a man page for each command.
    #[expect(clippy::unused_self, reason = "what is written is written here")]
    pub fn man_pages(&self, dir: &Path) -> Result<(), Error> {
        std::fs::create_dir_all(dir)?;
        clap_mangen::generate_to(Cli::command(), dir)?;
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

/// Lines without the blanks that a table has at its right edge.
fn trimmed(table: &Table) -> String {
    let lines = table.lines().map(|line| line.trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

/// Names may hold anything; a terminal must not obey them.
pub fn printable(text: &str) -> String {
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
        let styled = Output { is_styled: true, ..Output::plain() };
        assert!(styled.table(&[("NAME", false)], [vec!["a".into()]]).contains('\u{1b}'));
    }
}
