# A daemon in the guest drives a drive by VFIO, in its own sandbox, and serves it to the system's tools.

load_modules vfio
load_modules cuse
ulimit -l unlimited
one=0000:00:18.0
socket=/tmp/rpc.sock
aryk() { program aryk -s $socket "$@" 2>&1; }
rpc() { aryk rpc "$@"; }
refused() { if said=$("$@" 2>&1); then echo "not refused: $*"; exit 1; fi; echo "refused $said"; }

mkdir /tmp/vhost /tmp/disks
# Its log goes to the console. The sandbox leaves VFIO open, also for drives that are bound later, but no other devices.
program arykd -r $socket -S /tmp/vhost -m 0x1 --allow-dir /tmp/disks &
# The file of the socket is there before the daemon listens.
until aryk status >/dev/null; do sleep 0.1; done
refused aryk disk create kernels --file "/dev/$(ls /sys/bus/pci/devices/$one/nvme/nvme* | grep '^nvme[0-9]*n1$')"
program function bind $one
rpc bdev_nvme_attach_controller "{\"name\": \"nv\", \"trtype\": \"PCIe\", \"traddr\": \"$one\"}"
refused rpc bdev_nvme_cuse_unregister '{"name": "nv"}'
rpc bdev_nvme_cuse_register '{"name": "nv"}'
refused rpc bdev_nvme_cuse_register '{"name": "nv"}'
for device in /dev/aryk/*; do echo "device $device"; done
nvme id-ctrl /dev/aryk/nv
nvme list-ns /dev/aryk/nv
smartctl -a -d nvme /dev/aryk/nvn1
refused nvme format /dev/aryk/nvn1 --force
refused nvme reset /dev/aryk/nv
refused nvme read /dev/aryk/nvn1 -s 0 -c 0 -z 512
rpc bdev_nvme_cuse_unregister '{"name": "nv"}'
[ -e /dev/aryk ] || echo "the devices are gone"

rpc bdev_nvme_cuse_register '{"name": "nv", "allow_changes": true}'
nvme reset /dev/aryk/nv && echo "was reset"
nvme format /dev/aryk/nvn1 --force
nvme id-ctrl /dev/aryk/nv | grep ^sn
rpc bdev_nvme_get_controllers '{}' | grep '"resets"'
rpc bdev_nvme_detach_controller '{"name": "nv"}'
[ -e /dev/aryk ] || echo "the devices are gone with the controller"
refused rpc bdev_nvme_cuse_register '{"name": "nv"}'
