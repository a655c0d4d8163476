# arykd in the guest drives one drive with three namespaces, for three front-ends on two cores.

drive=0000:00:18.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
start() {
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp --state-dir /tmp/state -m 0x3 >>/tmp/arykd.log 2>&1 &
    daemon=$!
    for _ in $(seq 100); do aryk status >/dev/null 2>&1 && return; sleep 0.1; done
    cat /tmp/arykd.log
    exit 1
}
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
ulimit -l unlimited
load_modules vfio
program aryk nvme bind $drive >/dev/null
start
attach='{"name": "nv0", "trtype": "PCIe", "traddr": "0000:00:18.0", "dma": "pin"}'
echo attached $(aryk rpc bdev_nvme_attach_controller "$attach" | tr -d '[]",')
print_files $daemon

# Another daemon does not get the drive.
mkdir /tmp/other
LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/other/rpc.sock -S /tmp/other -m 0x1 >>/tmp/other.log 2>&1 &
other=$!
for _ in $(seq 100); do program aryk -s /tmp/other/rpc.sock status >/dev/null 2>&1 && break; sleep 0.1; done
if program aryk -s /tmp/other/rpc.sock rpc bdev_nvme_attach_controller "$attach" >/tmp/refused 2>&1; then fail "attached twice"; fi
cat /tmp/refused
kill $other
wait $other

for n in 1 2 3; do aryk attach nv0n$n --cpumask "[$((n % 2))]" >/dev/null; done

# Verified writes by all three, while the controller is reset.
for n in 1 2 3; do
    aryk bench nv0n$n --rw write --bs 4k --qd 8 --area 8M --requests 4k --verify --destroy >/tmp/bench$n 2>&1 &
    eval "bench$n=$!"
done
for _ in 1 2 3; do
    sleep 1
    aryk rpc bdev_nvme_reset_controller '{"name": "nv0"}' >/dev/null || fail reset
done
for n in 1 2 3; do
    eval "wait \$bench$n" || fail "$(cat /tmp/bench$n)"
    echo verified nv0n$n
done
aryk rpc bdev_nvme_get_controllers >/tmp/statistics
member() { sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" /tmp/statistics | head -1; }
echo "reset $(member resets) times, failed $(member failed_by_reset)"
echo "pairs $(grep -c '"qid"' /tmp/statistics)"
# Each core has a pair of its own, which has completed the commands of its disks: 4,000 of the fewest.
for pair in $(tr -d ' \n' </tmp/statistics | grep -o '{[^{}]*"qid"[^{}]*}'); do
    of_pair() { echo "$pair" | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"; }
    [ "$(of_pair completed)" -ge 4000 ] || fail "$pair"
    echo "the pair of core $(of_pair core) has completed the commands"
done | sort

# No interrupts of I/O queues while a reactor polls: vector 0 is the admin queue's.
interrupts() {
    sum=0
    for count in $(grep 'vfio-msix\[[1-9]' /proc/interrupts | sed 's/^[^:]*://; s/[A-Za-z].*//'); do sum=$((sum + count)); done
    echo $sum
}
under() {
    aryk rpc aryk_controller_set_sleep_policy '{"ctrlr": "nv0n1", "policy": "'$1'"}' >/dev/null || fail policy
    since=$(interrupts)
    aryk bench nv0n1 --rw randread --bs 4k --qd 4 --area 8M --requests 4k >/tmp/bench1 2>&1 || fail "$(cat /tmp/bench1)"
    raised=$(($(interrupts) - since))
}
grep -q 'vfio-msix\[1\]' /proc/interrupts || fail "$(cat /proc/interrupts)"
under poll
[ $raised -le 4 ] || fail "$raised interrupts of 4,000 polled reads"
echo "polled: no interrupts"
under interrupt
[ $raised -ge 100 ] || fail "$raised interrupts of 4,000 reads of a reactor that sleeps"
echo "with interrupts"

# A daemon that is killed: its successor gets the drive only when DMA has ended.
kill_and_wait $daemon
start
for _ in $(seq 100); do aryk rpc bdev_get_bdevs '{"name": "nv0n3"}' >/dev/null 2>&1 && break; sleep 0.1; done
echo again $(aryk disk list --json | sed -n 's/.*"name": *"\(nv0n.\)".*/\1/p' | sort -u)
for n in 1 2 3; do
    aryk bench nv0n$n --rw read --bs 4k --qd 8 --area 8M --requests 2k --verify >/tmp/bench$n 2>&1 || fail "$(cat /tmp/bench$n)"
    echo unchanged nv0n$n
done
for n in 1 2 3; do aryk detach nv0n$n >/dev/null; done
aryk rpc bdev_nvme_detach_controller '{"name": "nv0"}' >/dev/null || fail detach
echo detached

# One namespace as a disk, and a format of it by its disk's name.
aryk disk create second --nvme $drive:2
aryk rpc bdev_get_bdevs '{"name": "second"}' >/tmp/disk
echo "second is namespace $(tr -d ' \n' </tmp/disk | sed -n 's/.*"ns_data":{[^}]*"id":\([0-9]*\).*/\1/p')"
if aryk nvme format second --block-size 4096 >/tmp/refused 2>&1; then fail "formatted without --force"; fi
aryk nvme format second --block-size 4096 --force || fail format
block_size() { aryk rpc bdev_get_bdevs '{"name": "second"}' 2>/dev/null | sed -n 's/.*"block_size": *\([0-9]*\).*/\1/p'; }
for _ in $(seq 100); do [ "$(block_size)" = 4096 ] && break; sleep 0.1; done
echo "second has blocks of $(block_size) bytes"
aryk attach second >/dev/null
aryk bench second --rw write --bs 4k --qd 8 --area 8M --requests 2k --verify --destroy >/tmp/bench2 2>&1 || fail "$(cat /tmp/bench2)"
echo "verified second"
aryk detach second >/dev/null
aryk disk remove second >/dev/null
program aryk nvme unbind $drive >/dev/null
echo returned
