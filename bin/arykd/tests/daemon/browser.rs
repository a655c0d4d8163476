//! A browser without a screen, controlled by DevTools messages through two pipes.

use crate::harness::wait_for;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tempfile::TempDir;

const FLAGS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-pipe",
];
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page; it ends when dropped.
pub struct Browser {
    process: Child,
    to: File,
    from: Receiver<Value>,
    asked: u64,
    session: String,
    /// Events that it sent by itself.
    reported: Vec<Value>,
    _dir: TempDir,
}

impl Browser {
    /// Starts a browser; `None` if none is installed.
    pub fn start() -> Option<Self> {
        match Command::new("chromium").arg("--version").stdout(Stdio::null()).status() {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            found => assert!(found.unwrap().success()),
        }
        let dir = TempDir::new().unwrap();
        let pipe = |name: &str| {
            let path = dir.path().join(name);
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            path
        };
        let (to, from) = (pipe("to"), pipe("from"));
        let mut shell = Command::new("sh");
        // Chromium reads DevTools messages from descriptor 3 and writes them to 4.
        shell.args([
            "-c",
            r#"to=$1 from=$2; shift 2; exec chromium "$@" 3<"$to" 4>"$from" 2>/dev/null"#,
            "sh",
        ]);
        shell.args([&to, &from]).args(FLAGS).arg(user_data(dir.path())).arg("about:blank");
        let process = shell.env("HOME", dir.path()).spawn().unwrap();
        let to = OpenOptions::new().write(true).open(to).unwrap();
        let from = listen(File::open(from).unwrap());
        let mut browser =
            Self { process, to, from, asked: 0, session: String::new(), reported: Vec::new(), _dir: dir };
        let page = browser.ask("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": page["targetId"], "flatten": true});
        browser.session =
            browser.ask("Target.attachToTarget", attach)["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Sends a command. Returns the reply.
    pub fn ask(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let mut message = json!({"id": self.asked, "method": method, "params": params});
        let is_of_browser = method.starts_with("Target.") || method.starts_with("SystemInfo.");
        if !is_of_browser {
            message["sessionId"] = json!(self.session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut printed = self.from.recv_timeout(PATIENCE).expect("the browser answers");
            if printed["id"] == self.asked {
                assert!(printed.get("error").is_none(), "{method}: {printed}");
                return printed["result"].take();
            }
            self.reported.push(printed);
        }
    }

    /// Opens a page.
    pub fn open(&mut self, page: &str) {
        self.ask("Page.navigate", json!({"url": page}));
    }

    /// Sets the width of the window, and the colour scheme.
    pub fn set_appearance(&mut self, width: u32, scheme: &str) {
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.ask("Emulation.setDeviceMetricsOverride", size);
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.ask("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// The value of an expression in the page.
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut printed = self.ask("Runtime.evaluate", asked);
        assert!(printed.get("exceptionDetails").is_none(), "{expression}: {printed}");
        printed["result"]["value"].take()
    }

    /// The value of an expression that is a text.
    pub fn text(&mut self, expression: &str) -> String {
        self.eval(expression).as_str().unwrap_or_else(|| panic!("{expression} is no text")).to_owned()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub fn wait(&mut self, expression: &str) {
        wait_for(expression, || self.eval(expression) == true);
    }

    /// Processor time of its renderers.
    pub fn renderers_time(&mut self) -> Duration {
        let all = self.ask("SystemInfo.getProcessInfo", json!({}));
        let renderers = all["processInfo"].as_array().unwrap().iter().filter(|p| p["type"] == "renderer");
        let ticks: u64 = renderers.map(|p| ticks(p["id"].as_u64().unwrap())).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Errors and messages of the page's scripts.
    pub fn messages(&mut self) -> Vec<String> {
        self.eval("0");
        let is_message = |printed: &&Value| {
            let method = printed["method"].as_str().unwrap_or_default();
            ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"].contains(&method)
        };
        self.reported.iter().filter(is_message).map(Value::to_string).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The command also ends its child processes; the browser may have ended already.
        let _ = self.to.write_all(b"{\"id\": 0, \"method\": \"Browser.close\"}\0");
        for _ in 0..500 {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn user_data(dir: &Path) -> String {
    format!("--user-data-dir={}", dir.join("profile").display())
}

/// Its messages, each terminated by a zero.
fn listen(pipe: File) -> Receiver<Value> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for message in BufReader::new(pipe).split(0) {
            let Ok(Ok(message)) = message.map(|message| serde_json::from_slice(&message)) else { return };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Processor time of a process in ticks of 10 ms; 0 if the process has ended.
fn ticks(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields.get(11..13).map_or(0, |times| times.iter().filter_map(|time| time.parse::<u64>().ok()).sum())
}
