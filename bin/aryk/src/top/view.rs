//! Draws the screen: designed for at least 80 columns by 24 lines; smaller sizes work.

use super::reading::{Rate, Rates};
use super::state::{Link, State, View};
use crate::bars::bar;
use crate::commands::stat::latency;
use crate::latency::Latencies;
use crate::output::{Column, Output, printable};
use crate::size::Size;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Table, Wrap};

const HELP: &str = "\
  Tab, 1 to 9  disks, groups, controllers, reactors, tasks, drives, pools, hosts,
               volumes
  up, down     choose a row (also j, k, PgUp, PgDn, Home, End)
  Enter        a disk's latency by layer; the disks of a group, controller or drive
  Esc          back
  /            show only objects with this text in their names
  s, r         sort by the next column; reverse the order
  p            pause, continue
  q            quit

  MEAN is the mean latency of a request, P99 what 99 of 100 do not exceed, WAIT
  the part of MEAN spent waiting for limits or in the block layer's queue, DEPTH
  the number of requests in flight, MOST the limit. LONGEST is a reactor's
  longest turn, lately: no other work runs on its core during a turn. A turn
  grants a background task its BUDGET of processor time; USED is the part of the
  granted time that the task used.
  Drives are the NVMe drives that the daemon drives itself: commands and
  writes to doorbell registers a second, and all retries, aborts, resets and
  commands that ended with an error; with --json, errors by status code type.
  Pools: AMPL is what a pool writes for each byte of its users, CACHE the share
  of index pages in memory, BACKLOG the log that is not in the index yet, DEBT
  the index to be merged, WAIT the requests that wait for space or for these.
  Volumes: OWN is the data that a deletion frees, SHARED what others have, too.";

/// Columns from which on the names of all views, the order and a filter fit on one line.
const TABS_WIDTH: u16 = 120;

const QUIET: Style = Style::new().fg(Color::DarkGray);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

pub fn draw(frame: &mut Frame<'_>, state: &mut State, rates: &Rates, latencies: Option<&Latencies>) {
    let tabs_height = if frame.area().width < TABS_WIDTH { 2 } else { 1 };
    let areas = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(tabs_height),
        Constraint::Min(1),
        Constraint::Length(1),
    ]);
    let [head, tabs, body, foot] = areas.areas(frame.area());
    frame.render_widget(Paragraph::new(summary(state.link, rates)), head);
    frame.render_widget(Paragraph::new(views(state)).wrap(Wrap { trim: true }), tabs);
    if state.help {
        frame.render_widget(Paragraph::new(HELP), body);
    } else if let Some(name) = state.detail() {
        frame.render_widget(Paragraph::new(detail(name, rates, latencies)), body);
    } else {
        list(frame, body, state, rates);
    }
    frame.render_widget(Paragraph::new(keys(state)), foot);
}

fn summary(link: Link, rates: &Rates) -> Vec<Line<'static>> {
    let total = &rates.total;
    let mean = total.mean_ns().map_or_else(|| "-".into(), |ns| latency(ns.into()));
    let first = vec![
        Span::styled("aryk top", BOLD),
        Span::raw(format!(
            "  {} disks  {} ops/s  {}/s  mean {mean}  {} in flight",
            rates.disks.len(),
            total.ops(),
            Size(total.bytes()),
            total.in_flight
        )),
    ];
    if link != Link::Up {
        return vec![Line::from(first), Line::styled(link.text(), BOLD)];
    }
    let mut second = vec![Span::styled("busy    ", QUIET)];
    for share in rates.reactors.iter().take(6) {
        let busy = bar(share.busy as f64 / 100.0, 5);
        second.push(Span::raw(format!("  {}:{busy:<5}{:>3}%", share.core, share.busy)));
    }
    vec![Line::from(first), Line::from(second)]
}

fn views(state: &State) -> Line<'static> {
    let mut spans = Vec::new();
    for (i, view) in View::ALL.into_iter().enumerate() {
        let style = if view == state.view { BOLD.add_modifier(Modifier::REVERSED) } else { QUIET };
        spans.push(Span::styled(format!("{} {}", i + 1, view.title()), style));
        spans.push(Span::raw(" "));
    }
    if let Some((_, within)) = &state.within {
        spans.push(Span::raw(format!("  of {}", printable(within))));
    }
    let order = if state.reversed { ", reversed" } else { "" };
    spans.push(Span::styled(format!("  by {}{order}", state.sort.name()), QUIET));
    if state.typing || !state.filter.is_empty() {
        let cursor = if state.typing { "_" } else { "" };
        spans.push(Span::raw(format!("  /{}{cursor}", printable(&state.filter))));
    }
    if state.is_paused() {
        spans.push(Span::styled("  paused", BOLD));
    }
    Line::from(spans)
}

fn keys(state: &State) -> Line<'static> {
    let text = match (state.typing, state.help || state.detail().is_some()) {
        (true, _) => "Enter: apply   Esc: clear",
        (_, true) => "Esc: back   q: quit",
        _ => "?: help   Tab: view   Enter: more   /: filter   s: sort   p: pause   q: quit",
    };
    Line::styled(text, QUIET)
}

/// The width of a column. The first column takes the remaining width.
fn width(column: usize, view: View) -> Constraint {
    match (view, column) {
        (View::Reactors, 0) => Constraint::Length(5),
        (_, 0) => Constraint::Min(12),
        (View::Disks, 6..=8) | (View::Groups, 1 | 7) => Constraint::Length(6),
        (View::Disks | View::Groups, _) => Constraint::Length(8),
        (View::Controllers, 1 | 3) => Constraint::Length(5),
        (View::Hosts, 1) => Constraint::Length(10),
        (View::Hosts, 4) => Constraint::Length(7),
        (View::Hosts, _) => Constraint::Length(6),
        (View::Volumes, 1 | 5) => Constraint::Length(10),
        (View::Volumes, _) => Constraint::Length(8),
        (View::Drives | View::Pools, 2..=9) => Constraint::Length(7),
        (View::Drives | View::Pools | View::Controllers | View::Reactors | View::Tasks, _) => {
            Constraint::Length(9)
        }
    }
}

fn list(frame: &mut Frame<'_>, area: Rect, state: &mut State, rates: &Rates) {
    let rows = state.rows(rates);
    state.scroll(rows.len(), usize::from(area.height).saturating_sub(1));
    let columns = state.columns();
    let widths: Vec<_> = (0..columns.len()).map(|i| width(i, state.view)).collect();
    let shown = rows.iter().enumerate().skip(state.top).take(state.page);
    let shown = shown.map(|(at, &row)| {
        let style =
            if at == state.chosen { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        aligned(columns, state.cells(rates, row)).style(style)
    });
    let shown: Vec<_> = shown.collect();
    if shown.is_empty() {
        frame.render_widget(Paragraph::new(Line::styled("The list is empty.", QUIET)), area);
        return;
    }
    let heading = aligned(columns, columns.iter().map(|(name, _)| (*name).to_owned()).collect());
    frame.render_widget(Table::new(shown, widths).header(heading.style(BOLD)), area);
}

fn aligned(columns: &[Column], cells: Vec<String>) -> Row<'static> {
    let cells = columns.iter().zip(cells).map(|((_, is_number), cell)| {
        let line = Line::raw(printable(&cell));
        if *is_number { line.right_aligned() } else { line }
    });
    Row::new(cells)
}

fn detail(name: &str, rates: &Rates, latencies: Option<&Latencies>) -> String {
    let nothing = Rate::default();
    let rate = rates.disks.iter().find(|rate| rate.name == name).unwrap_or(&nothing);
    let head = format!(
        "{}\n\nreads   {:>8}/s  {:>8}/s\nwrites  {:>8}/s  {:>8}/s\nin flight {}, {} of them waiting; {} errors/s",
        printable(name),
        rate.reads,
        Size(rate.read_bytes).to_string(),
        rate.writes,
        Size(rate.write_bytes).to_string(),
        rate.in_flight,
        rate.waiting,
        rate.errors,
    );
    let out = Output::unstyled();
    match latencies {
        Some(latencies) => format!("{head}\n\n{}\n\n{}", latencies.layers(&out), latencies.spread(&out)),
        None => format!("{head}\n\nThe disk does not exist any more."),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sort;
    use super::super::reading::tests::reading;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    fn screen(state: &mut State, rates: &Rates, (columns, lines): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        terminal.draw(|frame| draw(frame, state, rates, None)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(columns.into());
        let line = |cells: &[ratatui::buffer::Cell]| {
            cells.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
        };
        lines.map(line).collect::<Vec<_>>().join("\n")
    }

    fn rates() -> Rates {
        let disks = [("vm1", 300), ("a\u{1b}[31mb", 12_345_678)];
        Rates::between(&reading(0, &disks.map(|(name, _)| (name, 0))), &reading(1, &disks))
    }

    #[test]
    fn all_columns_fit_80() {
        let mut state = State::new(View::Disks, Sort::Ops, String::new());
        let text = screen(&mut state, &rates(), (80, 24));
        assert!(text.contains("2 disks  12345978 ops/s"), "{text}");
        assert!(text.contains("1:█▎    25%"), "{text}");
        let lines: Vec<_> = text.lines().collect();
        let heading: Vec<_> = lines[4].split_whitespace().collect();
        assert_eq!(
            heading,
            ["DISK", "READ/s", "WRITE/s", "RD", "B/s", "WR", "B/s", "MEAN", "WAIT", "DEPTH", "FAILED"]
        );
        assert!(lines[5].starts_with("a\\u{1b}[31mb") && lines[5].contains("12345678"), "{text}");
        assert!(text.contains("volumes") && text.contains("by ops"), "{text}");
        assert!(
            lines[6].starts_with("vm1") && lines[6].contains("10us") && lines[6].contains("25%"),
            "{text}"
        );
        for view in [
            View::Groups,
            View::Controllers,
            View::Reactors,
            View::Tasks,
            View::Drives,
            View::Pools,
            View::Hosts,
            View::Volumes,
        ] {
            state.view = view;
            let text = screen(&mut state, &rates(), (80, 24));
            let all = state.columns().iter().all(|(name, _)| text.contains(name));
            assert!(all, "{text}");
        }
    }

    #[test]
    fn a_lost_connection_and_its_return_are_shown() {
        let mut state = State::new(View::Disks, Sort::Ops, String::new());
        state.link = Link::Lost;
        assert!(screen(&mut state, &rates(), (80, 24)).contains("no daemon answers: retrying"));
        state.link = state.link.answered();
        assert!(screen(&mut state, &rates(), (80, 24)).contains("the daemon answers again"));
        let rounds = std::iter::successors(Some(state.link), |link| Some(link.answered()));
        assert_eq!(rounds.take_while(|link| *link != Link::Up).count(), 5);
    }

    #[test]
    fn details_help_and_small_terminals() {
        let mut state = State::new(View::Disks, Sort::Name, String::new());
        let rates = rates();
        state.press(KeyEvent::from(KeyCode::Char('?')), &rates);
        assert!(screen(&mut state, &rates, (80, 24)).contains("a disk's latency by layer"));
        state.press(KeyEvent::from(KeyCode::Esc), &rates);
        state.press(KeyEvent::from(KeyCode::End), &rates);
        state.press(KeyEvent::from(KeyCode::Enter), &rates);
        assert!(screen(&mut state, &rates, (80, 24)).contains("300/s"));
        for size in [(1, 1), (20, 4), (300, 100)] {
            screen(&mut state, &rates, size);
            state.press(KeyEvent::from(KeyCode::Tab), &rates);
        }
    }
}
