//! 10,000 connections that do nothing, of hosts in a process of their own, cost little memory and processor time, and hold up no
//! other host.
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "loopback/raw.rs"]
#[expect(dead_code, reason = "other tests of the target use the rest")]
mod raw;
#[path = "loopback/target.rs"]
#[expect(dead_code, reason = "other tests of the target use the rest")]
mod target;

use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvmf::Limits;
use raw::{Raw, capsule_with, command};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use target::{BLOCK, Running, SUBSYSTEM, until};

/// Hosts, and I/O queues of each. With the admin queues, these are 10,000 connections.
const HOSTS: u8 = 80;
const QUEUES: u16 = 124;
const CONNECTIONS: u64 = HOSTS as u64 * (QUEUES as u64 + 1);
/// Entries of a queue, which is what Linux asks for.
const ENTRIES: u16 = 128;
/// The host that works.
const WORKER: u8 = 200;
/// How long the connections do nothing.
const IDLE: Duration = Duration::from_secs(10);
/// The address of the target, for the process of the hosts.
const TARGET: &str = "ARYK_CROWD_TARGET";

/// The process of the hosts; killed when dropped.
struct Hosts(Child);

impl Hosts {
    /// Starts the process, and waits until all are connected.
    fn start(target: SocketAddr) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "connections_that_do_nothing_cost_little", "--nocapture"]);
        command.env(TARGET, target.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut hosts = Self(command.spawn().unwrap());
        let lines = BufReader::new(hosts.0.stdout.as_mut().unwrap()).lines();
        let connected = lines.map_while(Result::ok).find_map(|line| line.parse::<u64>().ok());
        assert_eq!(connected, Some(CONNECTIONS));
        hosts
    }

    /// Has the hosts go.
    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connects all hosts, says how many connections there are, and keeps them until the input ends.
fn be_hosts(target: SocketAddr) {
    let mut all = Vec::new();
    for host in 1..=HOSTS {
        let (admin_queue, id) = Raw::admin_as(target, host);
        all.push(admin_queue);
        all.extend((1..=QUEUES).map(|qid| Raw::io_as(target, id, qid, ENTRIES, host)));
    }
    println!("\n{}", all.len());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// KiB of memory of this process that no file has.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let of = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    of.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Processor time of this process.
fn processor_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    // The second field, the name, may have spaces; user and system time are the 14th and 15th.
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let ticks: u64 =
        rest.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Writes and reads, and checks what is read. Returns how long the slowest request has taken.
#[expect(clippy::disallowed_methods, reason = "the test is about real time")]
fn work(queue: &mut Raw) -> Duration {
    let one = |round: u8| {
        let begun = Instant::now();
        queue.send(&capsule_with(command(1, io::WRITE, 0, 1, 0), &[round; BLOCK]));
        assert!(queue.completion().unwrap().status().is_success());
        let read = queue.run(command(2, io::READ, 0, 1, BLOCK as u32));
        assert!(read == (Code::SUCCESS, vec![round; BLOCK]));
        begun.elapsed()
    };
    (0..100).map(one).max().unwrap()
}

#[test]
fn connections_that_do_nothing_cost_little() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    if let Ok(target) = std::env::var(TARGET) {
        return be_hosts(target.parse().unwrap());
    }
    // The target has two of each.
    if maximum.is_some_and(|maximum| maximum < 2 * CONNECTIONS) {
        eprintln!("skipped: this process may not have {} descriptors", 2 * CONNECTIONS);
        return;
    }
    let target = Running::start();
    target.run(async |target| {
        // All come from one address, which may have a quarter, and so does the host that works.
        target.set_limits(Limits { connections: 5 * CONNECTIONS as u32, ..Limits::default() });
        target.allow_any_host(SUBSYSTEM, true).await.unwrap();
    });
    let (_admin_queue, id) = Raw::admin_as(target.address, WORKER);
    let mut worker = Raw::io_as(target.address, id, 1, ENTRIES, WORKER);
    work(&mut worker);
    let before = memory();
    let hosts = Hosts::start(target.address);
    assert_eq!(target.queues(), 1 + usize::from(HOSTS) * usize::from(QUEUES));
    let of_each = (memory() - before) * 1024 / CONNECTIONS;
    assert!(of_each < 32 << 10, "{of_each} bytes for each connection");

    let begun = processor_time();
    std::thread::park_timeout(IDLE);
    let used = processor_time() - begun;
    assert!(used < IDLE / 100, "{used:?} of {IDLE:?}");

    let slowest = work(&mut worker);
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    eprintln!("{of_each} bytes for each connection; {used:?} of {IDLE:?}; the slowest request: {slowest:?}");
    hosts.end();
    until(|| target.queues() == 1);
    work(&mut worker);
    target.stop();
}
