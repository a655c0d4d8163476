//! Texts below the options in the help: exit codes and examples.

pub const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the daemon refused, a command failed, doctor found a necessary thing
     missing, or bench --verify found wrong data
  2  invalid command line; of 'apply --plan': there are steps to do
  3  no daemon, or for bench no back-end, listens on the socket

Sizes: 20G and 20GiB are 20 x 1024^3 bytes, 20GB is 20 x 1000^3 bytes; so are
K, M, T and P. Fractions such as 1.5G work too; 4096 means bytes.

Manual pages: aryk(1), aryk-disk(1) and so on, arykd(8); 'aryk man DIR' writes
aryk's. Programs use --json, also for errors, or JSON-RPC: 'aryk rpc'.";

pub const CREATE: &str = "\
Examples:
  aryk disk create vm1 --file /srv/disks/vm1.img --size 20G
  aryk disk create vm2 --file vm2.img --from debian.qcow2 --size 40G
  aryk disk create data --file /dev/vg0/data
  aryk disk create scratch --memory --size 1.5G
  aryk disk create fast --nvme 0000:3d:00.0
  aryk disk create far --nvme-tcp 10.0.0.1:4420 --subsystem nqn.2016-06.io.aryk:data
  aryk disk create secret --file secret.img --size 20G --encrypt k1";

pub const KEY: &str = "\
The daemon keeps keys in its state directory, encrypted by its wrapping key. A
copy of a random key is nowhere else: for a copy, create the key in a file.

Examples:
  aryk key create k1
  (umask 077; head -c 64 /dev/urandom > k2.key); aryk key create k2 --from-file k2.key";

pub const REKEY: &str = "\
The daemon does the work: it continues when this command ends, and after a
restart. The daemon needs a state directory, where a journal makes it safe.

Examples:
  aryk key create k2
  aryk disk rekey vm1 k2 --wait
  aryk disk rekey vm1 k2 --bandwidth 200M
  aryk disk rekey vm1 --stop";

pub const LUKS: &str = "\
A disk that holds data is refused. Blocks that were never written read as random
data. Without a key file of the header, the data is lost.

Examples:
  (umask 077; head -c 32 /dev/urandom > /etc/aryk/vm1.key)
  aryk disk create vm1-base --file /srv/disks/vm1.img --size 20G
  aryk luks format vm1-base --key-file /etc/aryk/vm1.key
  aryk luks open vm1-base vm1 --key-file /etc/aryk/vm1.key";

pub const POOL: &str = "\
A disk that holds data is refused. A pool is found again on its disk after a
restart, also by another daemon.

Examples:
  aryk disk create store --file /srv/store.img --size 100G
  aryk pool create p1 --disk store
  aryk volume create p1/vm1 --size 20G
  aryk volume create p1/vm3 --image debian.raw --size 20G
  aryk volume create p1/vm4 --from debian.qcow2 --size 20G
  aryk attach p1/vm1";

pub const VOLUME: &str = "\
A volume takes space when it is written.

Examples:
  aryk volume create p1/vm1 --size 20G
  aryk volume create p1/vm3 --image debian.raw --size 20G
  aryk volume create p1/vm4 --from debian.qcow2 --size 20G
  aryk volume create p1/vm2 --size 1T --block-size 4096 --when-full fail";

pub const SNAPSHOT: &str = "\
Examples:
  aryk snapshot create p1/vm1@monday
  aryk snapshot create p1/root@monday p1/data@monday
  aryk volume clone p1/vm1@monday vm2
  aryk snapshot revert p1/vm1 p1/vm1@monday --discard-changes";

pub const ATTACH: &str = "\
Examples:
  aryk attach vm1
  aryk attach vm1 --queues 4 --socket-group kvm --socket-mode 660
  aryk attach data --scsi --controller vm1 --target 3
  aryk attach golden --readonly --controller vm7";

pub const SHARE: &str = "\
Examples:
  aryk share data
  aryk share data --listen 10.0.0.1:4420 --host nqn.2014-08.org.nvmexpress:uuid:...
  aryk share data --listen 10.0.0.1:4420 --host nqn.2014-08.org.nvmexpress:uuid:... --key host1

A Linux host has its NQN in /etc/nvme/hostnqn.";

pub const APPLY: &str = "\
Examples:
  aryk export > disks.toml
  aryk apply disks.toml --plan
  aryk apply disks.toml --prune";

pub const QOS: &str = "\
Examples:
  aryk qos set vm1 --iops 3k --bandwidth 125M --burst 2s
  aryk qos set vm1 --iops 0";

pub const QOS_HOST: &str = "\
Examples:
  aryk qos host data --iops 5k
  aryk qos host data --host nqn.2014-08.org.nvmexpress:uuid:... --iops 1k --bandwidth 20M

'aryk hosts' shows the limits of hosts that are connected.";

pub const MEMORY: &str = "\
A device registers each region of a VM's memory, then reads and writes it
directly. Requests in a region that is not registered are copied through bounce
buffers, which is slower: BOUNCED counts their pieces. LATE counts how often a
VM's new memory was served before its registration ended: arykd
--memory-patience.";

pub const BIND: &str = "\
A drive that is mounted, or in use in another way, is refused. A binding lasts
until the host's next boot; the unit aryk-nvme-bind@ADDRESS repeats it.

Examples:
  sudo aryk nvme bind 0000:3d:00.0
  sudo aryk nvme bind 3d:00.0 3e:00.0 --owner aryk
  sudo systemctl enable --now aryk-nvme-bind@0000:3d:00.0";

pub const UNBIND: &str = "\
Examples:
  sudo aryk nvme unbind 0000:3d:00.0
  sudo systemctl disable --now aryk-nvme-bind@0000:3d:00.0";

pub const FORMAT: &str = "\
A namespace whose disk is in use is refused.

Examples:
  aryk nvme format vm1 --block-size 4096 --force
  aryk nvme format 0000:3d:00.0 --erase key --force";

pub const RPC: &str = "\
Examples:
  aryk rpc bdev_get_bdevs
  aryk rpc bdev_null_create --help
  aryk rpc bdev_get_bdevs '{\"name\": \"vm1\"}'";

pub const COMPLETION: &str = "\
Examples:
  source <(aryk completions bash)                  in ~/.bashrc
  source <(aryk completions zsh)                   in ~/.zshrc
  aryk completions fish | source                   in config.fish";
