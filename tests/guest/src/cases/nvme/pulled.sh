# arykd in the guest drives two drives under load, and one of them is pulled out without notice: the power of its slot goes.

pulled=0000:01:00.0; other=0000:00:1a.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
attach() {
    params='{"name": "'$1'", "trtype": "PCIe", "traddr": "'$2'", "ctrlr_loss_timeout_sec": 3}'
    aryk rpc bdev_nvme_attach_controller "$params" >/dev/null || fail attach $1
    aryk attach $1n1 >/dev/null
}
ulimit -l unlimited
load_modules vfio
program aryk nvme bind $pulled $other >/dev/null
program arykd -r /tmp/rpc.sock -S /tmp -m 0x1 >/tmp/arykd.log 2>&1 &
for _ in $(seq 100); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
attach nv0 $pulled
attach nv1 $other
aryk bench nv1n1 --rw write --bs 4k --qd 8 --area 8M --requests 6k --verify --destroy --timeout 60 >/tmp/bench1 2>&1 & kept=$!
aryk bench nv0n1 --rw randread --bs 4k --qd 8 --area 8M --requests 1000k --timeout 60 >/tmp/bench0 2>&1 & lost=$!
sleep 1
kill -0 $lost || fail "the load ended before the drive went: $(cat /tmp/bench0)"

# The slot control register of the port (PCI Express 7.5.3.10): the power indicator and the power are switched off.
port=/sys/bus/pci/devices/0000:00:18.0/config
byte() { od -An -tu1 -j "$1" -N 1 $port | tr -d ' '; }
at=$(byte 52)
while [ "$(byte "$at")" != 16 ]; do at=$(byte $((at + 1))); done
hundredths() { cut -d ' ' -f 1 /proc/uptime | tr -d .; }
before=$(hundredths)
printf "\\$(printf %o $(($(byte $((at + 25))) | 7)))" | dd of=$port bs=1 seek=$((at + 25)) conv=notrunc 2>/dev/null
echo "pulled out, command register $(od -An -tx2 -j 4 -N 2 /sys/bus/pci/devices/$pulled/config 2>&1 | tr -d ' ')"
# The aim is 100 ms, on a computer that is not emulated and runs nothing else.
while took=$(($(hundredths) - before)); ! grep -q 'reset controller="nv0"\|gone.*controller="nv0"' /tmp/arykd.log; do
    [ $took -lt 50 ] || fail "nothing was noticed after ${took}0 ms"
done
kill -0 $lost || fail "requests did not wait: $(cat /tmp/bench0)"
echo "noticed after ${took}0 ms, its requests wait"
wait $kept || fail "$(cat /tmp/bench1)"
echo "the other drive is verified, resets $(aryk rpc bdev_nvme_get_controllers '{"name": "nv1"}' | sed -n 's/.*"resets": *\([0-9]*\).*/\1/p')"
