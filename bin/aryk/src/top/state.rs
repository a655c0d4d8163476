//! The state of the screen, and the handling of keys. Uses no terminal.

use super::Sort;
use super::reading::{DriveRate, HostRate, PoolRate, Rate, Rates, Volume};
use crate::commands::stat::latency;
use crate::output::{Column, Output};
use crate::size::Size;
use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

/// A list of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum View {
    Disks,
    Groups,
    Controllers,
    Reactors,
    Tasks,
    Drives,
    Pools,
    Hosts,
    Volumes,
}

impl View {
    pub const ALL: [Self; 9] = [
        Self::Disks,
        Self::Groups,
        Self::Controllers,
        Self::Reactors,
        Self::Tasks,
        Self::Drives,
        Self::Pools,
        Self::Hosts,
        Self::Volumes,
    ];

    pub const fn title(self) -> &'static str {
        match self {
            Self::Disks => "disks",
            Self::Groups => "groups",
            Self::Controllers => "controllers",
            Self::Reactors => "reactors",
            Self::Tasks => "tasks",
            Self::Drives => "drives",
            Self::Pools => "pools",
            Self::Hosts => "hosts",
            Self::Volumes => "volumes",
        }
    }
}

/// The state of the connection to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Up,
    /// The daemon does not reply; each update tries again.
    Lost,
    /// The daemon replies again; shown for this many more updates.
    Back(u8),
}

impl Link {
    /// The number of updates that show it.
    const SHOWN_UPDATES: u8 = 5;

    /// The state after a reply.
    pub const fn answered(self) -> Self {
        match self {
            Self::Lost => Self::Back(Self::SHOWN_UPDATES),
            Self::Back(left @ 2..) => Self::Back(left - 1),
            Self::Up | Self::Back(_) => Self::Up,
        }
    }

    pub const fn text(self) -> &'static str {
        match self {
            Self::Up => "",
            Self::Lost => "no daemon answers: retrying",
            Self::Back(_) => "the daemon answers again; counts start from there",
        }
    }
}

/// The state of the screen.
#[derive(Debug)]
pub struct State {
    pub view: View,
    pub sort: Sort,
    pub reversed: bool,
    pub filter: String,
    /// The user is typing the filter.
    pub typing: bool,
    /// The chosen row, and the first visible row.
    pub chosen: usize,
    pub top: usize,
    /// Rows that fit on the screen, as of the last draw.
    pub page: usize,
    /// The group, controller or drive whose disks are shown, and the view that it is in.
    pub within: Option<(View, String)>,
    detail: Option<String>,
    paused: bool,
    pub help: bool,
    pub link: Link,
}

/// Column headings, and whether the columns have numbers.
pub const DISKS: [Column; 9] = [
    ("DISK", false),
    ("READ/s", true),
    ("WRITE/s", true),
    ("RD B/s", true),
    ("WR B/s", true),
    ("MEAN", true),
    ("WAIT", true),
    ("DEPTH", true),
    ("FAILED", true),
];
pub const GROUPS: [Column; 8] = [
    ("GROUP", false),
    ("DISKS", true),
    ("OPS/s", true),
    ("MOST", true),
    ("B/s", true),
    ("MOST B", true),
    ("MEAN", true),
    ("WAIT", true),
];
pub const CONTROLLERS: [Column; 7] = [
    ("CONTROLLER", false),
    ("KIND", false),
    ("VM", false),
    ("DISKS", true),
    ("OPS/s", true),
    ("B/s", true),
    ("MEAN", true),
];
pub const REACTORS: [Column; 7] = [
    ("CORE", true),
    ("BUSY", true),
    ("IDLE", true),
    ("ASLEEP", true),
    ("TURNS/s", true),
    ("LONGEST", true),
    ("SERVES", true),
];
pub const TASKS: [Column; 6] =
    [("TASK", false), ("CORE", true), ("BUSY", true), ("GRANTS/s", true), ("BUDGET", true), ("USED", true)];

pub const DRIVES: [Column; 10] = [
    ("DRIVE", false),
    ("STATE", false),
    ("TEMP", true),
    ("CMD/s", true),
    ("BELL/s", true),
    ("DEPTH", true),
    ("RETRY", true),
    ("ABORT", true),
    ("RESET", true),
    ("ERROR", true),
];

pub const POOLS: [Column; 10] = [
    ("POOL", false),
    ("STATE", false),
    ("FREE", true),
    ("WR B/s", true),
    ("AMPL", true),
    ("RD B/s", true),
    ("CACHE", true),
    ("BACKLOG", true),
    ("DEBT", true),
    ("WAIT", true),
];

pub const HOSTS: [Column; 10] = [
    ("HOST", false),
    ("SHARE", false),
    ("QUEUES", true),
    ("READ/s", true),
    ("WRITE/s", true),
    ("RD B/s", true),
    ("WR B/s", true),
    ("MEAN", true),
    ("P99", true),
    ("FAILED", true),
];

pub const VOLUMES: [Column; 6] =
    [("VOLUME", false), ("KIND", false), ("SIZE", true), ("OWN", true), ("SHARED", true), ("COUNTED", true)];

/// The part of an NQN in which those of a site differ.
fn short(nqn: &str) -> String {
    nqn.rsplit(':').next().unwrap_or(nqn).to_owned()
}

fn of_host(HostRate { host, rate, p99_ns, .. }: &HostRate) -> Vec<String> {
    vec![
        short(&host.name),
        short(&host.subsystem),
        host.queues.to_string(),
        rate.reads.to_string(),
        rate.writes.to_string(),
        Size(rate.read_bytes).to_string(),
        Size(rate.write_bytes).to_string(),
        mean(rate),
        p99_ns.map_or_else(|| "-".into(), |ns| latency(ns.into())),
        rate.failed.to_string(),
    ]
}

fn mean(rate: &Rate) -> String {
    rate.mean_ns().map_or_else(|| "-".into(), |ns| latency(ns.into()))
}

impl DriveRate {
    fn cells(&self) -> Vec<String> {
        let Self { commands, doorbells, drive } = self;
        vec![
            drive.name.clone(),
            if drive.ready { "ready" } else { "waits" }.into(),
            drive.temperature_celsius.map_or_else(|| "-".into(), |celsius| format!("{celsius} °C")),
            commands.to_string(),
            doorbells.to_string(),
            drive.in_flight.to_string(),
            drive.retries.to_string(),
            drive.aborts.to_string(),
            drive.resets.to_string(),
            drive.errors.values().sum::<u64>().to_string(),
        ]
    }
}

impl PoolRate {
    fn cells(&self) -> Vec<String> {
        let Self { user_writes, user_reads, cached, pool, .. } = self;
        let amplification = self.write_amplification();
        let state = match (pool.writable, pool.damaged_blocks) {
            (false, _) => "read-only",
            (true, 0) => "ready",
            (true, _) => "damaged",
        };
        vec![
            pool.name.clone(),
            state.into(),
            (pool.free_bytes * 100)
                .checked_div(pool.total_bytes)
                .map_or_else(|| "-".into(), |free| format!("{free}%")),
            Size(*user_writes).to_string(),
            amplification.map_or_else(
                || "-".into(),
                |hundredths| format!("{}.{}", hundredths / 100, hundredths / 10 % 10),
            ),
            Size(*user_reads).to_string(),
            cached.map_or_else(|| "-".into(), |percent| format!("{percent}%")),
            Size(pool.backlog_bytes).to_string(),
            Size(pool.debt_bytes).to_string(),
            pool.waiting_requests.to_string(),
        ]
    }
}

impl Volume {
    fn cells(&self) -> Vec<String> {
        let size = |bytes: u64| Size(bytes).to_string();
        vec![
            self.name.clone(),
            self.kind.clone(),
            size(self.size),
            size(self.own_bytes),
            size(self.shared_bytes),
            format!("{}s ago", self.counted_seconds_ago),
        ]
    }
}

impl State {
    pub const fn new(view: View, sort: Sort, filter: String) -> Self {
        Self {
            view,
            sort,
            reversed: false,
            filter,
            typing: false,
            chosen: 0,
            top: 0,
            page: 10,
            within: None,
            detail: None,
            paused: false,
            help: false,
            link: Link::Up,
        }
    }

    /// The disk whose details are shown.
    pub fn detail(&self) -> Option<&str> {
        self.detail.as_deref()
    }

    pub const fn is_paused(&self) -> bool {
        self.paused
    }

    fn key(&self, rate: &Rate) -> u64 {
        match self.sort {
            Sort::Name => 0,
            Sort::Ops => rate.ops(),
            Sort::Bytes => rate.bytes(),
            Sort::Latency => rate.mean_ns().unwrap_or_default(),
            Sort::Waiting => rate.wait_percent(),
            Sort::Depth => rate.in_flight,
        }
    }

    /// The view's rows in order, as indexes into the list of `rates`.
    pub fn rows(&self, rates: &Rates) -> Vec<usize> {
        let rate = |i: usize| match self.view {
            View::Disks => rates.disks.get(i),
            View::Groups => rates.groups.get(i).map(|(_, rate)| rate),
            View::Controllers => rates.controllers.get(i).map(|(_, rate)| rate),
            View::Hosts => rates.hosts.get(i).map(|of| &of.rate),
            View::Reactors | View::Tasks | View::Drives | View::Pools | View::Volumes => None,
        };
        let count = match self.view {
            View::Disks => rates.disks.len(),
            View::Groups => rates.groups.len(),
            View::Controllers => rates.controllers.len(),
            View::Hosts => rates.hosts.len(),
            View::Reactors => return (0..rates.reactors.len()).collect(),
            View::Tasks => {
                let fits = |&i: &usize| rates.tasks[i].name.contains(&self.filter);
                return (0..rates.tasks.len()).filter(fits).collect();
            }
            View::Drives => {
                let fits = |&i: &usize| rates.drives[i].drive.name.contains(&self.filter);
                return (0..rates.drives.len()).filter(fits).collect();
            }
            View::Pools => {
                let fits = |&i: &usize| rates.pools[i].pool.name.contains(&self.filter);
                return (0..rates.pools.len()).filter(fits).collect();
            }
            View::Volumes => return self.volumes(&rates.volumes),
        };
        let within = self.within.as_ref().filter(|_| self.view == View::Disks);
        let within = within.map(|(view, name)| rates.disks_of(*view, name));
        let fits = |&i: &usize| {
            let name = rate(i).map_or("", |rate| &rate.name);
            name.contains(&self.filter) && within.as_ref().is_none_or(|disks| disks.contains(name))
        };
        let mut rows: Vec<_> = (0..count).filter(fits).collect();
        let order = |a: &usize, b: &usize| {
            let (Some(a), Some(b)) = (rate(*a), rate(*b)) else { return std::cmp::Ordering::Equal };
            self.key(b).cmp(&self.key(a)).then_with(|| a.name.cmp(&b.name))
        };
        rows.sort_by(order);
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Volumes in order: by name, or those first that have most data.
    fn volumes(&self, volumes: &[Volume]) -> Vec<usize> {
        let fits = |&i: &usize| volumes[i].name.contains(&self.filter);
        let mut rows: Vec<_> = (0..volumes.len()).filter(fits).collect();
        let data = |i: &usize| (volumes[*i].own_bytes, volumes[*i].shared_bytes);
        rows.sort_by(|a, b| {
            let by_data =
                if self.sort == Sort::Name { std::cmp::Ordering::Equal } else { data(b).cmp(&data(a)) };
            by_data.then_with(|| volumes[*a].name.cmp(&volumes[*b].name))
        });
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// The view's headings.
    pub const fn columns(&self) -> &'static [Column] {
        match self.view {
            View::Disks => &DISKS,
            View::Groups => &GROUPS,
            View::Controllers => &CONTROLLERS,
            View::Reactors => &REACTORS,
            View::Tasks => &TASKS,
            View::Drives => &DRIVES,
            View::Pools => &POOLS,
            View::Hosts => &HOSTS,
            View::Volumes => &VOLUMES,
        }
    }

    /// The cells of a row.
    pub fn cells(&self, rates: &Rates, row: usize) -> Vec<String> {
        match self.view {
            View::Disks => {
                let rate = &rates.disks[row];
                vec![
                    rate.name.clone(),
                    rate.reads.to_string(),
                    rate.writes.to_string(),
                    Size(rate.read_bytes).to_string(),
                    Size(rate.write_bytes).to_string(),
                    mean(rate),
                    format!("{}%", rate.wait_percent()),
                    rate.in_flight.to_string(),
                    rate.failed.to_string(),
                ]
            }
            View::Groups => {
                let (group, rate) = &rates.groups[row];
                let most = |limit: u64, text: String| if limit == 0 { "-".into() } else { text };
                let (ios, bytes) = (group.limits.rw_ios_per_sec, group.limits.rw_mbytes_per_sec << 20);
                vec![
                    group.name.clone(),
                    group.disks.to_string(),
                    rate.ops().to_string(),
                    most(ios, ios.to_string()),
                    Size(rate.bytes()).to_string(),
                    most(bytes, Size(bytes).to_string()),
                    mean(rate),
                    format!("{}%", rate.wait_percent()),
                ]
            }
            View::Controllers => {
                let (controller, rate) = &rates.controllers[row];
                vec![
                    controller.name.clone(),
                    controller.kind.clone(),
                    if controller.connected { "connected" } else { "-" }.into(),
                    controller.disks.len().to_string(),
                    rate.ops().to_string(),
                    Size(rate.bytes()).to_string(),
                    mean(rate),
                ]
            }
            View::Reactors => {
                let share = &rates.reactors[row];
                vec![
                    share.core.to_string(),
                    format!("{}%", share.busy),
                    format!("{}%", share.idle),
                    format!("{}%", share.asleep),
                    share.turns.to_string(),
                    latency(share.longest_turn_ns.into()),
                    share.members.to_string(),
                ]
            }
            View::Tasks => {
                let task = &rates.tasks[row];
                vec![
                    task.name.clone(),
                    task.core.map_or_else(|| "-".into(), |core| core.to_string()),
                    format!("{:.1}%", task.busy),
                    task.granted.to_string(),
                    latency(task.budget_ns.into()),
                    task.used.map_or_else(|| "-".into(), |used| format!("{used}%")),
                ]
            }
            View::Drives => rates.drives[row].cells(),
            View::Pools => rates.pools[row].cells(),
            View::Hosts => of_host(&rates.hosts[row]),
            View::Volumes => rates.volumes[row].cells(),
        }
    }

    /// The view as a table.
    pub fn table(&self, rates: &Rates, rows: &[usize], out: &Output) -> String {
        out.table(self.columns(), rows.iter().map(|&row| self.cells(rates, row)))
    }

    /// The view as JSON.
    pub fn json(&self, rates: &Rates, rows: &[usize]) -> Value {
        let of_rate = |rate: &Rate| {
            json!({
                "name": rate.name, "reads": rate.reads, "bytes_read": rate.read_bytes, "writes": rate.writes,
                "bytes_written": rate.write_bytes, "others": rate.others, "errors": rate.errors, "failed": rate.failed,
                "mean_ns": rate.mean_ns(), "wait_percent": rate.wait_percent(), "in_flight": rate.in_flight,
                "waiting": rate.waiting,
            })
        };
        let row = |&row: &usize| match self.view {
            View::Disks => of_rate(&rates.disks[row]),
            View::Groups => of_rate(&rates.groups[row].1),
            View::Controllers => of_rate(&rates.controllers[row].1),
            View::Reactors => {
                let share = &rates.reactors[row];
                json!({
                    "core": share.core, "busy_percent": share.busy, "idle_percent": share.idle,
                    "asleep_percent": share.asleep, "turns": share.turns,
                    "longest_turn_ns": share.longest_turn_ns, "members": share.members,
                })
            }
            View::Tasks => {
                let task = &rates.tasks[row];
                json!({
                    "name": task.name, "core": task.core, "busy_percent": task.busy, "granted": task.granted,
                    "budget_ns": task.budget_ns, "used_percent": task.used,
                })
            }
            View::Drives => {
                let DriveRate { commands, doorbells, drive } = &rates.drives[row];
                json!({
                    "name": drive.name, "ready": drive.ready, "disks": drive.disks,
                    "temperature_celsius": drive.temperature_celsius, "commands": commands, "doorbells": doorbells,
                    "in_flight": drive.in_flight, "retries": drive.retries, "aborts": drive.aborts, "resets": drive.resets,
                    "errors": drive.errors,
                })
            }
            View::Pools => {
                let rate = &rates.pools[row];
                let pool = &rate.pool;
                json!({
                    "name": pool.name, "writable": pool.writable, "total_bytes": pool.total_bytes,
                    "free_bytes": pool.free_bytes, "user_write_bytes": rate.user_writes, "user_read_bytes": rate.user_reads,
                    "written_bytes": rate.written, "read_bytes": rate.read, "cached_percent": rate.cached,
                    "backlog_bytes": pool.backlog_bytes, "debt_bytes": pool.debt_bytes,
                    "waiting_requests": pool.waiting_requests, "damaged_blocks": pool.damaged_blocks,
                })
            }
            View::Hosts => {
                let HostRate { host, rate, p50_ns, p99_ns, p999_ns } = &rates.hosts[row];
                json!({
                    "name": host.name, "subsystem": host.subsystem, "controller": host.controller, "queues": host.queues,
                    "reads": rate.reads, "bytes_read": rate.read_bytes, "writes": rate.writes,
                    "bytes_written": rate.write_bytes, "others": rate.others, "errors": rate.errors, "failed": rate.failed,
                    "mean_ns": rate.mean_ns(), "p50_ns": p50_ns, "p99_ns": p99_ns, "p999_ns": p999_ns,
                })
            }
            View::Volumes => {
                let volume = &rates.volumes[row];
                json!({
                    "name": volume.name, "kind": volume.kind, "size": volume.size, "own_bytes": volume.own_bytes,
                    "shared_bytes": volume.shared_bytes, "counted_seconds_ago": volume.counted_seconds_ago,
                })
            }
        };
        rows.iter().map(row).collect()
    }

    /// Handles a key. Returns whether the program is to end.
    pub fn press(&mut self, key: KeyEvent, rates: &Rates) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return true;
        }
        if self.typing {
            self.type_filter(key.code);
            return false;
        }
        let last = self.rows(rates).len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Esc => self.back(),
            KeyCode::Enter => self.drill_down(rates),
            KeyCode::Tab => self.show(View::ALL[(self.view as usize + 1) % View::ALL.len()]),
            KeyCode::Char(c @ '1'..='9') => self.show(View::ALL[c as usize - '1' as usize]),
            KeyCode::Char('s') => self.sort = Sort::ALL[(self.sort as usize + 1) % Sort::ALL.len()],
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Down | KeyCode::Char('j') => self.chosen = (self.chosen + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.chosen = self.chosen.saturating_sub(1),
            KeyCode::PageDown => self.chosen = (self.chosen + self.page).min(last),
            KeyCode::PageUp => self.chosen = self.chosen.saturating_sub(self.page),
            KeyCode::Home => self.chosen = 0,
            KeyCode::End => self.chosen = last,
            _ => {}
        }
        false
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
        self.chosen = 0;
    }

    fn show(&mut self, view: View) {
        (self.view, self.chosen, self.top) = (view, 0, 0);
        (self.within, self.detail) = (None, None);
    }

    /// Goes one step back: closes what was opened last.
    fn back(&mut self) {
        if self.help {
            self.help = false;
        } else if self.detail.take().is_some() {
        } else if let Some((view, _)) = self.within {
            self.show(view);
        } else {
            self.filter.clear();
        }
    }

    fn drill_down(&mut self, rates: &Rates) {
        let Some(&row) = self.rows(rates).get(self.chosen) else { return };
        match self.view {
            View::Disks => self.detail = Some(rates.disks[row].name.clone()),
            View::Groups => self.show_within(rates.groups[row].0.name.clone()),
            View::Controllers => self.show_within(rates.controllers[row].0.name.clone()),
            View::Drives => self.show_within(rates.drives[row].drive.name.clone()),
            View::Reactors | View::Tasks | View::Pools | View::Hosts | View::Volumes => {}
        }
    }

    /// Shows the disks of this view's row `name`.
    fn show_within(&mut self, name: String) {
        let view = self.view;
        self.show(View::Disks);
        self.within = Some((view, name));
    }

    /// Scrolls so that the chosen row of `count` is visible.
    pub fn scroll(&mut self, count: usize, page: usize) {
        self.page = page.max(1);
        self.chosen = self.chosen.min(count.saturating_sub(1));
        self.top = self.top.clamp((self.chosen + 1).saturating_sub(self.page), self.chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::super::reading::tests::reading;
    use super::*;

    fn press(state: &mut State, rates: &Rates, keys: &str) {
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\t' => KeyCode::Tab,
                '\u{1b}' => KeyCode::Esc,
                'v' => KeyCode::Down,
                c => KeyCode::Char(c),
            };
            assert!(!state.press(KeyEvent::from(code), rates));
        }
    }

    fn shown(state: &State, rates: &Rates) -> Vec<String> {
        state.rows(rates).iter().map(|&row| state.cells(rates, row)[0].clone()).collect()
    }

    #[test]
    fn keys_sort_filter_and_drill_down() {
        let disks = [("vm1", 300), ("vm2", 900), ("db", 600)];
        let zero = disks.map(|(name, _)| (name, 0));
        let rates = Rates::between(&reading(0, &zero), &reading(1, &disks));
        let mut state = State::new(View::Disks, Sort::Ops, String::new());
        assert_eq!(shown(&state, &rates), ["vm2", "db", "vm1"]);
        press(&mut state, &rates, "r");
        assert_eq!(shown(&state, &rates), ["vm1", "db", "vm2"]);
        press(&mut state, &rates, "r/m\n");
        assert_eq!(shown(&state, &rates), ["vm2", "vm1"]);
        press(&mut state, &rates, "v\n");
        assert_eq!(state.detail(), Some("vm1"));
        press(&mut state, &rates, "\u{1b}\u{1b}");
        assert_eq!((state.detail(), shown(&state, &rates).len()), (None, 3));
        press(&mut state, &rates, "sssss");
        assert_eq!((state.sort, shown(&state, &rates)[0].as_str()), (Sort::Name, "db"));
        press(&mut state, &rates, "3\n");
        assert_eq!((state.view, shown(&state, &rates).len()), (View::Disks, 3));
        assert_eq!(state.within, Some((View::Controllers, "host".into())));
        press(&mut state, &rates, "2");
        assert_eq!(shown(&state, &rates), ["inner", "outer"]);
        assert_eq!(state.cells(&rates, 0)[1..4], ["2", "50", "6000"]);
        // The disks of a subgroup belong to the group.
        press(&mut state, &rates, "v\n");
        assert_eq!(shown(&state, &rates), ["vm1", "vm2"]);
        press(&mut state, &rates, "\u{1b}");
        assert_eq!(state.view, View::Groups);
        press(&mut state, &rates, "\t");
        press(&mut state, &rates, "\t");
        assert_eq!((state.view, shown(&state, &rates)), (View::Reactors, vec!["1".to_owned()]));
        press(&mut state, &rates, "5");
        assert_eq!(state.cells(&rates, 0), ["patrol db", "1", "2.0%", "500", "50us", "80%"]);
        press(&mut state, &rates, "6");
        assert_eq!(
            state.cells(&rates, 0),
            ["nvme0", "ready", "41 °C", "320", "10", "32", "0", "1", "0", "3"]
        );
        press(&mut state, &rates, "\n");
        assert_eq!((state.view, shown(&state, &rates)), (View::Disks, vec!["vm1".to_owned()]));
        press(&mut state, &rates, "\u{1b}");
        assert_eq!(state.view, View::Drives);
        press(&mut state, &rates, "7");
        assert_eq!(state.cells(&rates, 0), ["p1", "ready", "25%", "1M", "1.5", "2M", "90%", "4M", "8M", "0"]);
        press(&mut state, &rates, "s8");
        assert_eq!(
            state.cells(&rates, 1),
            ["913fc008", "data", "4", "0", "200", "0B", "800K", "5ns", "5ns", "1"]
        );
        assert_eq!(state.rows(&rates), [1, 0], "by operations");
        press(&mut state, &rates, "9");
        assert_eq!(shown(&state, &rates), ["p1/vm1", "p1/vm1@old"], "by their own data");
        assert_eq!(state.cells(&rates, 0), ["p1/vm1@old", "snapshot", "8M", "1M", "2M", "7s ago"]);
        assert_eq!(state.json(&rates, &[0])[0]["shared_bytes"], 2 << 20);
        press(&mut state, &rates, "r");
        assert_eq!(state.rows(&rates), [0, 1]);
        press(&mut state, &rates, "r8/uuid\n");
        assert_eq!(shown(&state, &rates).len(), 2);
        let all = state.json(&rates, &[0]);
        assert_eq!((&all[0]["controller"], &all[0]["writes"]), (&json!(1), &json!(100)));
        assert_eq!((&all[0]["p99_ns"], &all[0]["p999_ns"]), (&json!(5), &json!(1000)));
        assert!(state.press(KeyEvent::from(KeyCode::Char('q')), &rates));
    }

    #[test]
    fn the_chosen_row_is_visible() {
        let mut state = State::new(View::Disks, Sort::Ops, String::new());
        state.chosen = 50;
        state.scroll(100, 10);
        assert_eq!((state.top, state.chosen), (41, 50));
        state.chosen = 3;
        state.scroll(100, 10);
        assert_eq!(state.top, 3);
        state.scroll(2, 10);
        assert_eq!((state.top, state.chosen), (1, 1));
    }
}
