//! What an operator does about a failure of Ceph, as the end of an error's text. Pure; any context.

use rustix::io::Errno;

/// After a client could not connect.
pub(crate) fn of_connect(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => {
            "; is there a configuration file (/etc/ceph/ceph.conf) with `mon_host`, and a key file of the user?"
        }
        Errno::ACCESS | Errno::PERM => "; `ceph auth get client.USER` shows the user's key and rights",
        Errno::TIMEDOUT => {
            "; no monitor answers: check `mon_host` and the network, and `ceph status` on another host"
        }
        Errno::INVAL => "; is the user's key valid, and is `mon_host` set?",
        _ => "",
    }
}

/// After a pool could not be opened.
pub(crate) fn of_pool(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => "; `ceph osd pool ls` lists the pools",
        Errno::ACCESS | Errno::PERM => RIGHTS,
        _ => "",
    }
}

/// After an image could not be created, opened or resized.
pub(crate) fn of_image(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => "; `rbd ls POOL` lists the images; if a size is given, a missing image is created",
        Errno::ACCESS | Errno::PERM => RIGHTS,
        Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV => {
            "; `rbd info IMAGE` shows its features: disable those that this host's librbd does not have, or install a newer librbd"
        }
        Errno::ROFS => "; is the image the secondary of a mirror (`rbd mirror image status IMAGE`)?",
        Errno::SHUTDOWN => "; the cluster has excluded this client: `ceph osd blocklist ls`",
        _ => "",
    }
}

const RIGHTS: &str =
    "; the user needs `profile rbd` for the monitors and the pool: `ceph auth get client.USER`";
