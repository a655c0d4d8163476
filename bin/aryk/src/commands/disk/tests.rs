//! Tests of the calls of `disk create`.

use super::*;
use crate::cli::{Cli, Command};
use clap::Parser;

fn call(line: &str) -> Result<(&'static str, Value), Error> {
    let cli = Cli::try_parse_from(line.split(' ')).unwrap();
    let Command::Disk(DiskCommand::Create(args)) = cli.command else { panic!("{line}") };
    create_call(&args)
}

#[test]
fn files() {
    let (method, params) = call("aryk disk create d --file /a/b.img --size 20G").unwrap();
    assert_eq!(method, "bdev_uring_create");
    assert_eq!(params, json!({"name": "d", "filename": "/a/b.img", "size": 20_u64 << 30}));
    let (_, params) =
        call("aryk disk create d --file b --readonly --enospc hold --block-size 4096 --uuid u").unwrap();
    assert!(params["filename"].as_str().unwrap().starts_with('/'));
    assert_eq!((&params["readonly"], &params["enospc"]), (&json!(true), &json!("hold")));
    assert_eq!((&params["block_size"], &params["uuid"]), (&json!(4096), &json!("u")));
}

#[test]
fn memory_and_null() {
    let (method, params) = call("aryk disk create d --memory --size 1M").unwrap();
    assert_eq!(method, "bdev_malloc_create");
    assert_eq!(params, json!({"name": "d", "block_size": 512, "num_blocks": 2048}));
    let (method, params) = call("aryk disk create d --null --size 1M --block-size 4096").unwrap();
    assert_eq!((method, &params["num_blocks"]), ("bdev_null_create", &json!(256)));
    assert!(call("aryk disk create d --null --size 1000").is_err());
    assert!(call("aryk disk create d --null --size 1M --block-size 0").is_err());
}

#[test]
fn an_overcommitted_file_system_gives_a_warning() {
    let mut fs = json!({"path": "/disks", "disks": 3, "promised": 60_u64 << 30, "allocated": 1_u64 << 30,
        "free": 9_u64 << 30, "missing": 50_u64 << 30});
    let text = missing_room(&fs);
    assert!(
        text.contains("3 disks in the file system at /disks are promised 60G and have 1G of that"),
        "{text}"
    );
    assert!(text.contains("9G is free, so 50G is missing"), "{text}");
    fs["disks"] = json!(1);
    assert!(
        missing_room(&fs).contains("1 disk in the file system at /disks is promised 60G and has"),
        "{fs}"
    );
}

#[test]
fn a_disk_whose_store_is_away_is_marked() {
    let mut disk =
        json!({"driver_specific": {"nvme": [{"trid": {"traddr": "0000:3d:00.0"}}]}, "stalled": false});
    assert_eq!(notes(&disk), "0000:3d:00.0");
    disk["stalled"] = json!(true);
    assert_eq!(notes(&disk), "0000:3d:00.0 (stalled: its requests wait)");
}
