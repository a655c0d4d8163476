# Debian's tools on an NVMe drive that the program `cuse` holds by VFIO and serves at /dev/NAME, in four ways: its callers may read;
# the drive hangs; its callers may change the drive; the program is killed.

load_modules vfio
load_modules cuse
ulimit -l unlimited
one=0000:00:18.0; two=0000:00:19.0
disk=$(ls -d /sys/bus/pci/devices/$one/nvme/nvme*/nvme*n1); disk=/dev/${disk##*/}
echo here | dd of=$disk conv=sync bs=4096 2>/dev/null
sync
program function bind $one
program function bind $two

cat >/tmp/read <<'END'
drive=/dev/aryk/drive
refused() { if said=$("$@" 2>&1); then echo "not refused: $*"; exit 1; fi; echo "refused $said"; }
ls -l $drive ${drive}n1 | cut -c 1-10
echo "== id-ctrl"; nvme id-ctrl $drive
echo "== smart-log"; nvme smart-log $drive
echo "== list-ns"; nvme list-ns $drive
echo "== id-ns"; nvme id-ns ${drive}n1
echo "== get-log"; nvme get-log $drive --log-id=2 --log-len=512 -b | wc -c
echo "== error-log"; nvme error-log $drive -e 1
echo "== a long log"; nvme admin-passthru $drive --opcode=2 -n 0xffffffff --cdw10=0x40ff0002 --data-len=66560 -r -b | wc -c
echo "== get-feature"; nvme get-feature $drive -f 4
echo "== ns-rescan"; nvme ns-rescan $drive
echo "== smartctl"; smartctl -a -d nvme $drive
echo "== smartctl n1"; smartctl -i -d nvme ${drive}n1
echo "== refused"
refused nvme format $drive -n 1 --force
refused nvme set-feature $drive -f 4 -v 0x150
refused nvme reset $drive
refused nvme subsystem-reset $drive
refused nvme detach-ns $drive -n 1 -c 0
refused nvme read ${drive}n1 -s 0 -c 0 -z 512
refused nvme write ${drive}n1 -s 0 -c 0 -z 512 -d /script
refused nvme admin-passthru $drive --opcode=2 --cdw10=0x7fff0002 --data-len=131072 -r
refused nvme admin-passthru $drive --opcode=6 --cdw10=1 --data-len=4096 --metadata-len=8 -r
refused nvme admin-passthru $drive --opcode=2 --cdw10=0x007f00ff --data-len=512 -r
refused nvme id-ns $drive -n 1000
refused dd if=$drive count=1
echo operator:x:1000:1000::/:/bin/sh >/etc/passwd
refused start-stop-daemon -S -c operator -x /usr/sbin/nvme -- id-ctrl $drive
END
program cuse $one aryk/drive sh -eu /tmp/read 2>&1
[ -e /dev/aryk ] || echo "/dev/aryk is gone"

# A drive that hangs.
cat >/tmp/hang <<'END'
nvme id-ctrl /dev/drive & tool=$!
sleep 1
kill -9 $tool
wait $tool || echo "killed with a command in flight"
nvme id-ctrl /dev/drive >/tmp/late 2>&1 &
sleep 1
END
program cuse --hang $one drive sh -eu /tmp/hang 2>/dev/null
while ! [ -s /tmp/late ]; do sleep 0.1; done
cat /tmp/late

cat >/tmp/change <<'END'
nvme set-feature /dev/drive -f 4 -v 0x150
nvme get-feature /dev/drive -f 4
nvme reset /dev/drive && echo "was reset"
nvme id-ctrl /dev/drive | grep ^sn
nvme format /dev/drive -n 1 --force
END
program cuse --change $one drive sh -eu /tmp/change 2>&1
if said=$(program cuse $one null true 2>&1); then exit 1; fi; echo "$said"
LD_LIBRARY_PATH=/programs/lib /programs/cuse $one drive sleep 1000 >/dev/null 2>&1 & holder=$!
while ! [ -e /dev/driven1 ]; do sleep 0.1; done
# The name is in use, although its node is not there.
rm /dev/drive
if said=$(program cuse $two drive true 2>&1); then exit 1; fi; echo "$said"
kill -9 $holder
while [ -e /dev/driven1 ]; do sleep 0.1; done
echo "gone with its process"
program function unbind $one
sleep 1
dd if=$disk bs=4 count=1 2>/dev/null | od -c | head -1
