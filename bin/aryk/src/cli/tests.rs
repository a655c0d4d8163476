//! Tests of valid and invalid command lines.

use super::*;
use clap::CommandFactory;
use clap::error::ErrorKind;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split(' '))
}

#[test]
fn the_arguments_are_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn rotations_of_keys_parse() {
    for line in ["aryk disk rekey vm1 k2 --bandwidth 200M --wait", "aryk disk rekey vm1 --stop --json"] {
        parse(line).unwrap();
    }
    for line in ["aryk disk rekey vm1", "aryk disk rekey vm1 k2 --stop"] {
        parse(line).unwrap_err();
    }
}

#[test]
fn a_disk_in_a_ceph_image_has_one_client() {
    for line in [
        "aryk disk create vm1 --rbd vms/vm1 --user vms --key ceph-vms --conf /etc/ceph/ceph.conf",
        "aryk disk create vm1 --rbd vms/vm1 --cluster ceph --create 20G",
        "aryk disk create vm1 --rbd vms/vm1 --cluster ceph --block-size 4096 --encrypt k",
    ] {
        parse(line).unwrap();
    }
    for line in [
        "aryk disk create vm1 --rbd vms/vm1 --cluster ceph --user vms",
        "aryk disk create vm1 --rbd vms/vm1 --cluster ceph --key k",
        "aryk disk create vm1 --file f --size 1G --cluster ceph",
        "aryk disk create vm1 --file f --size 1G --create 1G",
        "aryk disk create vm1 --file f --size 1G --conf c",
        "aryk disk create vm1 --memory --size 1G --user u",
        "aryk disk create vm1 --nvme 0000:3d:00.0 --key k",
        "aryk disk create vm1 --rbd vms/vm1 --dma pin",
    ] {
        parse(line).unwrap_err();
    }
}

#[test]
fn a_disk_of_another_host_has_an_address_and_a_subsystem() {
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    for rest in [
        "",
        " --ns 2",
        " --host-nqn nqn.2016-06.io.spdk:host1",
        " --key k --controller-key c",
        " --tls-key t",
    ] {
        let line = format!("aryk disk create far --nvme-tcp [::1]:4420 --subsystem {nqn}{rest}");
        parse(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    parse("aryk disk create far --nvme-rdma 10.0.0.1:4420 --nvme-rdma [::1]:4420 --subsystem n --key k")
        .unwrap();
    parse("aryk disk create far --nvme-rdma 10.0.0.1:4420 --subsystem n --dma pin").unwrap();
    for line in [
        "aryk disk create far --nvme-rdma 10.0.0.1:4420",
        "aryk disk create far --nvme-rdma 10.0.0.1:4420 --nvme-tcp 10.0.0.1:4420 --subsystem n",
        "aryk disk create far --nvme-rdma 10.0.0.1:4420 --subsystem n --tls-key t",
        "aryk disk create far --nvme-tcp 10.0.0.1:4420",
        "aryk disk create far --nvme-tcp 10.0.0.1 --subsystem n",
        "aryk disk create far --nvme-tcp 10.0.0.1:4420 --subsystem n --dma pin",
        "aryk disk create far --nvme-tcp 10.0.0.1:4420 --subsystem n --size 1G",
        "aryk disk create far --memory --size 1G --subsystem n",
        "aryk disk create far --nvme 0000:3d:00.0 --ns 2",
        "aryk disk create far --nvme-tcp 10.0.0.1:4420 --subsystem n --controller-key c",
        "aryk disk create far --rbd pool/image --key k --controller-key c",
        "aryk disk create far --rbd pool/image --tls-key t",
        "aryk share data --tls-key t",
    ] {
        parse(line).unwrap_err();
    }
}

#[test]
fn commands_of_the_guide_parse() {
    for line in [
        "aryk disk create vm1 --file vm1.img --size 20G",
        "aryk disk create m --memory --size 1G --block-size 4096",
        "aryk disk create n --null --size 1G",
        "aryk disk create f --file /dev/sdb --readonly --enospc hold",
        "aryk disk list --json",
        "aryk --json disk show vm1",
        "aryk disk remove vm1",
        "aryk disk resize vm1 40G",
        "aryk disk stat",
        "aryk disk stat vm1",
        "aryk attach vm1",
        "aryk attach vm1 --queues 4 --cpumask [0,2-3] --readonly --controller c --socket-mode 660 --socket-group kvm",
        "aryk detach vm1",
        "aryk detach vm1 vm2 --force",
        "aryk disk remove vm1 vm2 --force",
        "aryk attach vm1 --controller c2 --shared",
        "aryk disk create vm1 --file x --size 1.5GiB",
        "aryk logs --follow -n 100",
        "aryk stop --force",
        "aryk rpc bdev_null_create --help",
        "aryk rpc -h",
        "aryk apply all.toml --prune --force",
        "aryk controller list",
        "aryk reactor list",
        "aryk reactor add 3",
        "aryk reactor remove 0",
        "aryk status -s /tmp/x.sock --timeout 5",
        "aryk rpc spdk_get_version",
        "aryk rpc bdev_get_bdevs {}",
        "aryk completions bash",
        "aryk doctor --json",
        "aryk doctor nvme --json",
        "aryk nvme list --watch",
        "aryk nvme bind 0000:3d:00.0 3e:00.1 --owner aryk",
        "aryk nvme unbind 0000:3d:00.0 --json",
        "aryk disk create vm1 --file vm1.img --from a.qcow2 --from-format qcow2 --size 20G",
        "aryk disk stat --watch vm1",
        "aryk disk list --watch=0.5 --json",
        "aryk status --watch",
        "aryk man /tmp",
        "aryk apply all.toml --plan",
        "aryk apply - --prune --replace",
        "aryk export --json",
        "aryk qos set vm1 --iops 3k --bandwidth 125M --burst 2s --combined",
        "aryk qos set vm1 --read-iops 0 --write-bandwidth 0 --combined=false",
        "aryk qos list --watch",
        "aryk qos group create vm1 --iops 6000",
        "aryk qos group create rack --parent all",
        "aryk qos group set vm1 --write-iops 100",
        "aryk qos group add vm1 root data",
        "aryk qos group remove vm1 data",
        "aryk qos group delete vm1",
        "aryk qos group list --json",
        "aryk scheduler show --watch",
        "aryk scheduler set static",
        "aryk scheduler set dynamic --period 100ms --load-limit 10 --core-limit 70 --core-busy 90",
        "aryk memory",
        "aryk memory --watch --json",
        "aryk trace",
        "aryk trace vm1 --count 10 --watch",
        "aryk bench vm1.sock",
        "aryk bench vm1.sock --rw read --bs 128k --qd 8",
        "aryk bench vm1.sock --rate 10k --time 1m --queues 4 --cpu 1",
        "aryk bench vm1.sock --rw mix:70 --destroy --ring packed --ceiling",
        "aryk bench vm1.sock --rw write --area 256M --requests 64k --verify --destroy",
        "aryk bench --ceiling --qd 128 --json",
    ] {
        parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
}

#[test]
fn shares_and_limits_of_hosts_parse() {
    for line in [
        "aryk share vm1 --cpumask 0x3",
        "aryk qos host data --iops 5k",
        "aryk qos host data --host nqn.2014-08.org.nvmexpress:uuid:1 --bandwidth 20M",
    ] {
        parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    parse("aryk qos host --iops 5k").unwrap_err();
}

#[test]
fn commands_for_volumes_parse() {
    for line in [
        "aryk pool create p1 --disk store --cache 128M --overwrite",
        "aryk pool list --watch",
        "aryk pool show p1",
        "aryk pool grow p1",
        "aryk pool check p1 --quick --repair",
        "aryk pool scrub p1 --wait",
        "aryk pool scrub p1 --stop",
        "aryk pool scrub p1 --days 7 --rate 16M",
        "aryk pool move p1 --core 3",
        "aryk pool move p1 --shard 2 --core 3",
        "aryk pool rename p1 p2",
        "aryk pool delete p1 --force",
        "aryk volume create p1/vm1 --size 20G --block-size 4096 --when-full fail",
        "aryk volume list --watch",
        "aryk volume resize p1/vm1 30G --shrink",
        "aryk volume rename p1/vm1 vm2",
        "aryk volume clone p1/vm1@a vm2",
        "aryk volume set p1/vm1 --when-full wait",
        "aryk volume inflate p1/vm2",
        "aryk volume changed p1/vm1 --since p1/vm1@a",
        "aryk volume delete p1/vm1 p1/vm2 --force",
        "aryk snapshot create p1/vm1@a p1/vm2@a",
        "aryk snapshot list --json",
        "aryk snapshot delete p1/vm1@a",
        "aryk snapshot revert p1/vm1 p1/vm1@a --discard-changes",
    ] {
        parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
}

#[test]
fn commands_for_keys_parse() {
    for line in [
        "aryk key create k",
        "aryk key create k --bits 128 --tweak-mode incr-512-full-lba",
        "aryk key create k --from-file -",
        "aryk key list --json",
        "aryk key delete a b",
        "aryk disk create d --memory --size 1M --encrypt k",
    ] {
        parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
}

#[test]
fn wrong_command_lines() {
    let wrong = [
        ("aryk disk create vm1", ErrorKind::MissingRequiredArgument),
        ("aryk disk create vm1 --memory", ErrorKind::MissingRequiredArgument),
        ("aryk disk create vm1 --null", ErrorKind::MissingRequiredArgument),
        ("aryk disk create vm1 --memory --null --size 1G", ErrorKind::ArgumentConflict),
        ("aryk disk create vm1 --memory --size 1G --readonly", ErrorKind::ArgumentConflict),
        ("aryk disk create vm1 --file x --size 1.3G", ErrorKind::ValueValidation),
        ("aryk disk remove", ErrorKind::MissingRequiredArgument),
        ("aryk key create", ErrorKind::MissingRequiredArgument),
        ("aryk key delete", ErrorKind::MissingRequiredArgument),
        ("aryk key create k --bits 192", ErrorKind::InvalidValue),
        ("aryk key create k --bits 128 --from-file f", ErrorKind::ArgumentConflict),
        ("aryk key create k --tweak-mode lba", ErrorKind::InvalidValue),
        ("aryk disk create d --file f --from i --encrypt k", ErrorKind::ArgumentConflict),
        ("aryk detach --force", ErrorKind::MissingRequiredArgument),
        ("aryk rpc", ErrorKind::MissingRequiredArgument),
        ("aryk logs -n many", ErrorKind::ValueValidation),
        ("aryk attach vm1 --queues 0", ErrorKind::ValueValidation),
        ("aryk attach vm1 --socket-mode 999", ErrorKind::ValueValidation),
        ("aryk status --timeout 0", ErrorKind::ValueValidation),
        ("aryk disk create vm1 --memory --size 1G --from x", ErrorKind::ArgumentConflict),
        ("aryk disk stat --watch=0", ErrorKind::ValueValidation),
        ("aryk disk stat --watch=fast", ErrorKind::ValueValidation),
        ("aryk bench", ErrorKind::MissingRequiredArgument),
        ("aryk bench s --rw wipe", ErrorKind::ValueValidation),
        ("aryk bench s --qd 0", ErrorKind::ValueValidation),
        ("aryk bench s --qd 1025", ErrorKind::ValueValidation),
        ("aryk bench s --time 1s --requests 1", ErrorKind::ArgumentConflict),
        ("aryk bench s --rate 1k --ceiling", ErrorKind::ArgumentConflict),
        ("aryk qos set vm1 --iops -1", ErrorKind::UnknownArgument),
        ("aryk qos set vm1 --bandwidth 100K", ErrorKind::ValueValidation),
        ("aryk qos set vm1 --burst soon", ErrorKind::ValueValidation),
        ("aryk qos group add vm1", ErrorKind::MissingRequiredArgument),
        ("aryk scheduler set", ErrorKind::MissingRequiredArgument),
        ("aryk scheduler set dynamic --core-busy 101", ErrorKind::ValueValidation),
        ("aryk frobnicate", ErrorKind::InvalidSubcommand),
        ("aryk doctor scsi", ErrorKind::InvalidSubcommand),
        ("aryk nvme bind", ErrorKind::MissingRequiredArgument),
        ("aryk nvme bind nvme0", ErrorKind::ValueValidation),
        ("aryk nvme unbind 0000:00:00.9", ErrorKind::ValueValidation),
    ];
    for (line, kind) in wrong {
        assert_eq!(parse(line).expect_err(line).kind(), kind, "{line}");
    }
}

#[test]
fn values_parse() {
    let cli = parse("aryk -s /s attach d --socket-mode 0660 --queues 2 --timeout 7").unwrap();
    assert_eq!((cli.socket, cli.timeout), (PathBuf::from("/s"), Duration::from_secs(7)));
    let Command::Attach(args) = cli.command else { panic!() };
    assert_eq!((args.socket_mode, args.queues), (Some(0o660), Some(2)));
}

#[test]
fn help_fits_80_columns() {
    let mut command = Cli::command();
    command.build();
    let mut all = vec![command];
    while let Some(mut command) = all.pop() {
        let help = command.render_long_help().to_string();
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
        all.extend(command.get_subcommands().cloned());
    }
}
