//! Output: JSON, or tables and lines of at most 80 columns.

use crate::cli::Cli;
use crate::error::Error;
use crate::watch;
use clap::CommandFactory;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table, presets};
use serde_json::Value;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

const WIDTH: u16 = 80;

/// Spaces before and after each cell.
const PADDING: (u16, u16) = (0, 2);

/// Destination and style of the output.
pub struct Output {
    pub json: bool,
    is_styled: bool,
    repeats: Repetition,
}

/// How a repeated output is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Repetition {
    /// The output is printed once.
    No,
    /// Below the previous one.
    Below,
    /// Over the previous one.
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

/// A column's heading, and whether the column has numbers.
pub type Column = (&'static str, bool);

impl Output {
    /// The standard output, printed once or repeatedly; colours only on a terminal.
    pub fn new(json: bool, repeats: bool) -> Self {
        let is_terminal = io::stdout().is_terminal();
        let is_styled = is_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let repeats = match (repeats, is_terminal && !json) {
            (false, _) => Repetition::No,
            (true, false) => Repetition::Below,
            (true, true) => Repetition::InPlace,
        };
        Self { json, is_styled, repeats }
    }

    /// Output for people, once, without colours: for text within another output.
    pub const fn unstyled() -> Self {
        Self { json: false, is_styled: false, repeats: Repetition::No }
    }

    /// Output for people, without colours.
    #[cfg(test)]
    pub const fn plain() -> Self {
        Self { json: false, is_styled: false, repeats: Repetition::No }
    }

    /// Prints `value` for JSON output, otherwise the text of `human`. Repeated JSON output has one line per value; repeated
    /// tables end with an empty line.
    pub fn print(&self, value: &Value, human: impl FnOnce() -> String) -> Result<(), Error> {
        let mut stdout = io::stdout().lock();
        match (self.json, self.repeats) {
            (true, Repetition::No) => writeln!(stdout, "{value:#}")?,
            (true, _) => writeln!(stdout, "{value}")?,
            (false, Repetition::No) => writeln!(stdout, "{}", human().trim_end())?,
            (false, Repetition::Below) => writeln!(stdout, "{}\n", human().trim_end())?,
            (false, Repetition::InPlace) => {
                let rows = rustix::termios::tcgetwinsize(&stdout).map_or(24, |size| size.ws_row.max(4));
                write!(stdout, "{}", watch::frame(human().trim_end(), rows.into()))?;
            }
        }
        stdout.flush()?;
        Ok(())
    }

    /// Prints lines.
    #[expect(clippy::unused_self, reason = "all output goes through this type")]
    pub fn print_line(&self, text: &str) -> Result<(), Error> {
        writeln!(io::stdout().lock(), "{text}")?;
        Ok(())
    }

    /// A table of rows under headings.
    pub fn table(&self, columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
        self.toned_table(columns, rows.into_iter().map(|row| (Tone::Plain, row)))
    }

    /// A table whose rows have a colour for their first cell.
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

    /// A list of names and values, one pair per line.
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
    #[expect(clippy::unused_self, reason = "all output goes through this type")]
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

/// The table's lines without trailing spaces.
fn trimmed(table: &Table) -> String {
    let lines = table.lines().map(|line| line.trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

/// Escapes control characters: names are untrusted, and a terminal would obey them.
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
