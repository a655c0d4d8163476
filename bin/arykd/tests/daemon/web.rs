//! `--web`: the page, by hand and in a browser.

use crate::front_end::FrontEnd;
use crate::harness::Daemon;
use crate::metrics::{connect, free_port, get};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::Command;
use std::time::Duration;

/// A name that would be a script if it were taken for markup, and would end a string if it were put into one.
const HOSTILE: &str = "<img src=x onerror=\"document.title='owned'\">'\\</script>";

fn live(port: u16, query: &str) -> Value {
    let (head, body) = get(connect(port), &format!("/live.json?{query}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    serde_json::from_str(&body).unwrap()
}

fn daemon_with_disks(port: u16, count: usize) -> Daemon {
    let daemon = Daemon::start(&["--web", &port.to_string()]);
    for i in 0..count {
        let name = if i == 0 { HOSTILE.to_owned() } else { format!("disk-{i}") };
        let params = json!({"name": name, "block_size": 512, "num_blocks": 2048});
        daemon.call("bdev_malloc_create", params).unwrap();
    }
    daemon
}

#[test]
fn the_page_is_closed_to_others() {
    let port = free_port();
    let _daemon = daemon_with_disks(port, 1);
    for path in ["/", "/style.css", "/page.js", "/live.json", "/nothing"] {
        let (head, _) = get(connect(port), path);
        let head = head.to_ascii_lowercase();
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
        assert_eq!(head.starts_with("http/1.1 200"), path != "/nothing", "{head}");
    }
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: evil.example", "403"),
        ("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0", "405"),
        ("GET /live.json?x=1 HTTP/1.1\r\nHost: localhost", "400"),
    ] {
        let mut stream = connect(port);
        write!(stream, "{request}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
}

#[test]
fn disks_are_sorted_and_filtered_and_no_more_than_fit() {
    let port = free_port();
    let daemon = daemon_with_disks(port, 150);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "disk-7"})).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    live(port, "");
    std::thread::park_timeout(Duration::from_millis(1000));
    (0..50).for_each(|_| _ = guest.read(0, 4096).unwrap());
    let now = live(port, "sort=ops");
    assert_eq!((&now["all"], &now["matching"], &now["machines"]), (&json!(150), &json!(150), &json!(1)));
    assert_eq!((now["disks"].as_array().unwrap().len(), &now["disks"][0]["name"]), (100, &json!("disk-7")));
    let reads = now["disks"][0]["reads"].as_u64().unwrap();
    assert!((1..=50).contains(&reads) && now["total"]["reads"] == reads, "{reads}");
    assert_eq!(now["latencies"].as_array().unwrap().iter().filter_map(Value::as_u64).sum::<u64>(), 50);
    assert_eq!(live(port, "sort=name&filter=disk-14")["matching"], 11);
    assert_eq!(live(port, "filter=%3Cimg")["disks"][0]["name"], HOSTILE);
}

#[test]
fn a_thousand_clients() {
    let port = free_port();
    let daemon = daemon_with_disks(port, 100);
    let mut clients: Vec<_> = (0..1000).map(|_| connect(port)).collect();
    for _ in 0..2 {
        for client in &mut clients {
            write!(client, "GET /live.json HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        }
        for client in &mut clients {
            let mut first = [0; 12];
            client.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"HTTP/1.1 200");
            drain(client);
        }
    }
    let memory = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid())).unwrap();
    let pages: u64 = memory.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(pages * 4096 < 200 << 20, "{pages} pages");
    daemon.call("spdk_get_version", json!({})).unwrap();
}

/// What is left of an answer with a length.
fn drain(client: &mut impl Read) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
    let mut body = vec![0; length.parse().unwrap()];
    client.read_exact(&mut body).unwrap();
}

#[test]
fn in_a_browser() {
    let port = free_port();
    let daemon = daemon_with_disks(port, 3);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "disk-1"})).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    (0..50).for_each(|_| _ = guest.read(0, 4096).unwrap());
    daemon.call("bdev_qos_group_create", json!({"name": "<b>vm</b>"})).unwrap();
    let limit = json!({"name": "<b>vm</b>", "rw_ios_per_sec": 6000});
    daemon.call("bdev_qos_group_set_limit", limit).unwrap();
    daemon.call("bdev_qos_group_add_bdev", json!({"name": "<b>vm</b>", "bdev_name": "disk-1"})).unwrap();
    let page = format!("http://127.0.0.1:{port}/");
    let browser = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .args(["--virtual-time-budget=4000", "--timeout=60000", "--dump-dom", &page])
        .env("HOME", daemon.dir())
        .output();
    let output = match browser {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: no chromium here");
            return;
        }
        output => output.unwrap(),
    };
    let (dom, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(dom.contains("3 disks, 1 machine connected"), "{dom}\n{said}");
    assert!(dom.contains("<td title=\"Malloc disk: disk-1\">disk-1</td>"), "{dom}");
    assert!(dom.contains("&lt;img src=x onerror=") && !dom.contains("<img"), "{dom}");
    assert!(
        dom.contains("<td>&lt;b&gt;vm&lt;/b&gt;</td><td>1</td>") && dom.contains("<td>6000</td>"),
        "{dom}"
    );
    assert!(dom.contains("<title>Aryk</title>") && dom.contains("% busy"), "{dom}");
    let complaints: Vec<_> = said.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}
