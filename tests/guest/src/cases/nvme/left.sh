# arykd in the guest: a VM is killed while the drive has its commands, and another VM on the same drive goes on.

drive=0000:00:18.0
export LD_LIBRARY_PATH=/programs/lib ARYK_SOCKET=/tmp/rpc.sock
aryk() { /programs/aryk "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
hundredths() { cut -d ' ' -f 1 /proc/uptime | tr -d .; }
registered() { aryk rpc aryk_memory_clients_get | tr -d ' \n' | sed -n 's/.*"registered":\([0-9]*\).*/\1/p'; }
unregistering() { aryk rpc aryk_memory_clients_get | tr -d ' \n' | sed -n 's/.*"unregistering":\([0-9]*\).*/\1/p'; }
ulimit -l unlimited
load_modules vfio
aryk nvme bind $drive >/dev/null
/programs/arykd -r /tmp/rpc.sock -S /tmp -m 0x3 >/tmp/arykd.log 2>&1 &
for _ in $(seq 100); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
aryk rpc bdev_nvme_attach_controller '{"name": "nv0", "trtype": "PCIe", "traddr": "'$drive'", "dma": "pin"}' >/dev/null || fail attach
for n in 1 2; do aryk attach nv0n$n >/dev/null; done

/programs/aryk bench nv0n2 --rw randread --bs 4k --qd 4 --time 60s >/tmp/bench2 2>&1 &
stays=$!
until [ "$(registered)" -gt 0 ]; do kill -0 $stays || fail "$(cat /tmp/bench2)"; done
sleep 0.5
its=$(registered)
/programs/aryk bench nv0n1 --rw randread --bs 4k --qd 64 --time 60s >/tmp/bench1 2>&1 &
leaves=$!
until [ "$(registered)" -gt "$its" ]; do kill -0 $leaves || fail "$(cat /tmp/bench1)"; done
sleep 0.5
both=$(registered)

# Of the commands in flight, the drive completes 16 a second: all 64 of them in four seconds.
echo slow
await kill
sleep 1
kill -9 $leaves
since=$(hundredths)
sleep 1
[ $(($(registered) + $(unregistering))) = "$both" ] || fail "unmapped with commands in the drive: $(aryk rpc aryk_memory_clients_get)"
echo "all memory is mapped after a second"
until [ $(($(registered) + $(unregistering))) = "$its" ]; do
    [ $(($(hundredths) - since)) -lt 2000 ] || fail "still mapped: $(aryk rpc aryk_memory_clients_get)"
done
echo "unmapped after $(($(hundredths) - since))0 ms"
kill -0 $stays || fail "$(cat /tmp/bench2)"
kill $stays
wait $stays || true
aryk rpc bdev_nvme_get_controllers '{"name": "nv0"}' | tr -d ' ' | grep '"resets":0,' || fail "the drive was reset"
aryk bench nv0n2 --rw randread --bs 4k --qd 4 --requests 1k >/tmp/bench2 2>&1 || fail "$(cat /tmp/bench2)"
echo "the other VM goes on"
