//! `--web`: the page's replies, and the page in a browser.

use crate::browser::Browser;
use crate::front_end::FrontEnd;
use crate::harness::Daemon;
use crate::metrics::{connect, get};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A name that would be a script in markup, and that would end a string in a script.
const HOSTILE: &str = "<img src=x onerror=\"document.title='owned'\">'\\</script>";

/// The name of this host.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned()
}

fn live(port: u16, query: &str) -> Value {
    let (head, body) = get(connect(port), &format!("/live.json?{query}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    serde_json::from_str(&body).unwrap()
}

/// A daemon with its page and disks, and the port of its page.
fn daemon_with_disks(count: usize) -> (Daemon, u16) {
    let daemon = Daemon::start(&["--web", "0"]);
    for i in 0..count {
        let name = if i == 0 { HOSTILE.to_owned() } else { format!("disk-{i}") };
        let params = json!({"name": name, "block_size": 512, "num_blocks": 2048});
        daemon.call("bdev_malloc_create", params).unwrap();
    }
    let port = daemon.port();
    (daemon, port)
}

#[test]
fn the_page_is_served_to_this_host_only() {
    let (_daemon, port) = daemon_with_disks(1);
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
fn disks_are_sorted_filtered_and_limited() {
    let (daemon, port) = daemon_with_disks(150);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "disk-7"})).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    live(port, "");
    std::thread::park_timeout(Duration::from_millis(1000));
    (0..50).for_each(|_| _ = guest.read(0, 4096).unwrap());
    let now = live(port, "sort=ops");
    assert_eq!((&now["all"], &now["matching"], &now["vms"]), (&json!(150), &json!(150), &json!(1)));
    assert_eq!((now["disks"].as_array().unwrap().len(), &now["disks"][0]["name"]), (100, &json!("disk-7")));
    let reads = now["disks"][0]["reads"].as_u64().unwrap();
    assert!((1..=50).contains(&reads) && now["total"]["reads"] == reads, "{reads}");
    assert_eq!(now["latencies"].as_array().unwrap().iter().filter_map(Value::as_u64).sum::<u64>(), 50);
    assert_eq!(live(port, "sort=name&filter=disk-14")["matching"], 11);
    assert_eq!(live(port, "filter=%3Cimg")["disks"][0]["name"], HOSTILE);
}

#[test]
fn a_thousand_clients() {
    let (daemon, port) = daemon_with_disks(100);
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

/// Reads the rest of a reply with a length.
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
fn rates_do_not_start_from_an_old_snapshot() {
    let (daemon, port) = daemon_with_disks(2);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "disk-1"})).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    let all =
        |now: &Value| now["latencies"].as_array().unwrap().iter().filter_map(Value::as_u64).sum::<u64>();
    let first = live(port, "");
    assert_eq!((&first["seconds"], all(&first)), (&Value::Null, 0));
    (0..50).for_each(|_| _ = guest.read(0, 4096).unwrap());
    std::thread::park_timeout(Duration::from_secs(6));
    let later = live(port, "");
    assert_eq!((&later["seconds"], all(&later)), (&Value::Null, 0), "no client asked in between");
    (0..50).for_each(|_| _ = guest.read(0, 4096).unwrap());
    std::thread::park_timeout(Duration::from_secs(1));
    let next = live(port, "");
    assert_eq!(all(&next), 50);
    assert!((0.9..5.0).contains(&next["seconds"].as_f64().unwrap()), "{next}");
}

#[test]
fn details_of_one_disk() {
    let (daemon, port) = daemon_with_disks(2);
    let file = daemon.dir().join("d.img");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    daemon.call("bdev_uring_create", json!({"name": "f", "filename": file, "block_size": 512})).unwrap();
    daemon.call("bdev_set_qos_limit", json!({"name": "f", "rw_ios_per_sec": 6000})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "f"})).unwrap();
    let disk = &live(port, "disk=f")["disk"];
    assert_eq!((&disk["name"], &disk["file"]), (&json!("f"), &json!(file)));
    assert_eq!((&disk["bytes"], &disk["block_bytes"]), (&json!(1 << 20), &json!(512)));
    assert_eq!(disk["users"], json!([{"controller": "c", "kind": "blk", "connected": false}]));
    assert_eq!((&disk["limits"][0]["group"], &disk["limits"][0]["ops"]), (&Value::Null, &json!(6000)));
    assert_eq!(live(port, "disk=disk-1")["disk"]["file"], Value::Null);
    assert_eq!(disk["last_failure"], Value::Null);
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    std::fs::File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
    guest.read(4096, 4096).unwrap_err();
    std::thread::park_timeout(Duration::from_secs(1));
    let failed = &live(port, "disk=f")["disk"]["last_failure"];
    assert_eq!((&failed["op"], &failed["lba"], &failed["blocks"]), (&json!("read"), &json!(8), &json!(8)));
    assert!(failed["error"].as_str().unwrap().contains("os error") && failed["at_ms"].as_u64() > Some(0));
    for query in ["", "disk=nothing", "disk="] {
        assert_eq!(live(port, query)["disk"], Value::Null, "{query}");
    }
}

/// A daemon with activity for the page: a hundred disks, one of them in a group with a limit and with a guest that reads, and one
/// whose next reads fail.
fn busy_daemon() -> (Daemon, u16) {
    let (daemon, port) = daemon_with_disks(100);
    daemon.call("bdev_error_create", json!({"base_name": "disk-2"})).unwrap();
    let failure = json!({"name": "EE_disk-2", "io_type": "read", "error_type": "failure", "num": 3});
    daemon.call("bdev_error_inject_error", failure).unwrap();
    for (controller, disk) in [("c", "disk-1"), ("e", "EE_disk-2")] {
        daemon.call("vhost_create_blk_controller", json!({"ctrlr": controller, "dev_name": disk})).unwrap();
    }
    daemon.call("bdev_qos_group_create", json!({"name": "<b>vm</b>"})).unwrap();
    let limit = json!({"name": "<b>vm</b>", "rw_ios_per_sec": 6000});
    daemon.call("bdev_qos_group_set_limit", limit).unwrap();
    daemon.call("bdev_qos_group_add_bdev", json!({"name": "<b>vm</b>", "bdev_name": "disk-1"})).unwrap();
    (daemon, port)
}

#[test]
fn in_a_browser() {
    let Some(mut browser) = Browser::start() else { return eprintln!("skipped: no chromium here") };
    let (mut daemon, port) = busy_daemon();
    let mut failing = FrontEnd::connect(&daemon.dir().join("vhost/e"));
    (0..3).for_each(|_| _ = failing.read(0, 4096).unwrap_err());
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let load = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            guest.read(0, 4096).unwrap();
            std::thread::park_timeout(Duration::from_millis(1));
        }
    });
    browser.set_appearance(1280, "light");
    browser.open(&format!("http://127.0.0.1:{port}/"));
    browser.wait("document.querySelectorAll('#disks tbody tr').length === 25 && heat.columns.length > 1");
    it_shows_all_data(&mut browser);
    it_fits(&mut browser);
    it_shows_details_of_a_disk(&mut browser);
    it_costs_little(&mut browser);
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();
    it_outlives_the_daemon(&mut browser, &mut daemon, port);
    // The browser's own messages about an unreachable daemon are not errors of the page.
    let messages = browser.messages();
    assert!(messages.iter().all(|printed| printed.contains("ERR_CONNECTION_REFUSED")), "{messages:?}");
}

/// Names are shown as text; the page shows the host's name and the meaning of colours.
fn it_shows_all_data(browser: &mut Browser) {
    let host = host();
    assert_eq!(browser.text("document.title"), format!("{host} – Aryk"));
    let page = browser.text("document.body.innerText");
    for words in ["101 disks, 2 VMs connected", "<b>vm</b>", "6000", "% busy", "polling without work"] {
        assert!(page.contains(words), "{words}: {page}");
    }
    for words in
        ["delayed by limits", "waiting in the block layer", "in the store", "on the way to the guest"]
    {
        assert!(browser.text("document.getElementById('layers').innerText").contains(words), "{words}");
    }
    browser.eval("get('filter').value = '<img'; get('filter').dispatchEvent(new Event('input'))");
    browser.wait("get('disks').tBodies[0].rows.length === 1");
    assert!(browser.text("get('disks').innerText").contains(HOSTILE));
    assert_eq!(browser.eval("document.images.length"), 0);
    browser.eval("get('filter').value = ''; get('filter').dispatchEvent(new Event('input'))");
    browser.wait("get('disks').tBodies[0].rows.length === 25");
    // The first column covers one second, like all others; higher counts are darker in the light scheme, and brighter in the dark
    // one.
    assert_eq!(browser.eval("heat.columns.every(({from, to}) => to - from < 6)"), true);
    let brightness = "ramp().map((c) => c.match(/\\d+/g).reduce((sum, n) => sum + Number(n), 0))";
    assert_eq!(browser.eval(&format!("{brightness}.every((n, i, all) => i === 0 || n < all[i - 1])")), true);
    browser.set_appearance(1280, "dark");
    assert_eq!(browser.eval(&format!("{brightness}.every((n, i, all) => i === 0 || n > all[i - 1])")), true);
}

/// No text is cut off, and no sideways scrolling is needed, in a narrow window.
fn it_fits(browser: &mut Browser) {
    for width in [400, 1280] {
        browser.set_appearance(width, "light");
        let wide =
            "Math.max(...[...document.querySelectorAll('*')].map((e) => e.getBoundingClientRect().right))";
        browser.wait(&format!("{wide} <= {width} && document.documentElement.scrollWidth <= {width}"));
        let cut = "[...document.querySelectorAll('#disks td:not(:first-child)')].filter((e) => e.scrollWidth > e.clientWidth + 1)";
        assert_eq!(browser.eval(&format!("{cut}.map((e) => e.innerText).join()")), "", "at {width}");
    }
}

fn it_shows_details_of_a_disk(browser: &mut Browser) {
    assert_eq!(browser.eval("get('closer').hidden"), true);
    browser
        .eval("[...get('disks').tBodies[0].rows].find((r) => r.cells[0].textContent === 'disk-1').click()");
    browser.wait("!get('closer').hidden && get('facts').innerText !== '' && closerHeat.columns.length > 0");
    let closer = browser.text("get('closer').innerText");
    for words in [
        "disk-1",
        "1 MiB: 2048 blocks of 512 B",
        "c (blk, a VM is connected)",
        "Group <b>vm</b>",
        "6000 requests per second",
    ] {
        assert!(closer.contains(words), "{words}: {closer}");
    }
    browser.set_appearance(400, "dark");
    browser.wait("get('closer').getBoundingClientRect().width === 400 && get('closer').scrollWidth <= 400");
    browser.set_appearance(1280, "light");
    browser.eval("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))");
    assert_eq!(browser.eval("get('closer').hidden"), true);
    // Errors stay visible, in the list and in the details.
    browser.eval("get('filter').value = 'EE_'; get('filter').dispatchEvent(new Event('input'))");
    browser.wait("get('disks').tBodies[0].rows[0].lastChild.innerText === '3'");
    browser.eval("get('disks').tBodies[0].rows[0].cells[0].firstChild.click()");
    browser.wait(
        "get('operations').innerText.includes('Failed') && get('facts').innerText.includes('Errors\\n3')",
    );
    browser.eval(
        "get('close').click(); get('filter').value = ''; get('filter').dispatchEvent(new Event('input'))",
    );
    browser.wait("get('closer').hidden && get('disks').tBodies[0].rows.length === 25");
}

/// Unchanged elements are not updated, so the browser has little work.
fn it_costs_little(browser: &mut Browser) {
    const LOOKS: u32 = 5;
    let watch = "window.changes = 0; window.watcher = new MutationObserver((all) => { \
                 for (const {type, addedNodes} of all) changes += type === 'childList' ? addedNodes.length : 1; }); \
                 watcher.observe(document, {subtree: true, childList: true, characterData: true, attributes: true})";
    browser.eval(watch);
    let (before, columns) = (browser.renderers_time(), browser.eval("heat.columns.length").as_u64().unwrap());
    browser.wait(&format!(
        "heat.columns.length >= {columns} + {LOOKS} && Boolean(watcher.disconnect() ?? true)"
    ));
    let took = browser.renderers_time() - before;
    // One disk of a hundred is active: its numbers, the sums, a group and the reactors' bars change.
    let changes = browser.eval("changes").as_u64().unwrap();
    assert!(changes < 80 * u64::from(LOOKS), "{changes} changes in {LOOKS} looks");
    eprintln!("{changes} changes and {took:?} of a renderer in {LOOKS} looks");
    assert!(took < Duration::from_millis(200) * LOOKS, "{took:?} in {LOOKS} looks");
}

/// Old data is marked with its age; the page recovers by itself.
fn it_outlives_the_daemon(browser: &mut Browser, daemon: &mut Daemon, port: u16) {
    assert_eq!(browser.eval("get('stale').hidden"), true);
    daemon.kill();
    browser.wait("!get('stale').hidden && document.body.classList.contains('stale')");
    assert_eq!(browser.text("document.title"), format!("No answer – {} – Aryk", host()));
    browser.wait("/^[3-9] seconds$/.test(get('age').innerText)");
    assert_eq!(browser.eval("Number(getComputedStyle(document.querySelector('main')).opacity) < 0.6"), true);
    daemon.restart_with(&["--web", &port.to_string()]);
    browser.wait("get('stale').hidden && !document.body.classList.contains('stale')");
    browser.wait("get('state').innerText.startsWith('0 disks')");
}
