# The daemon in the guest, with 10,000 connections that do nothing, beside a host that works.

nqn=nqn.2016-06.io.aryk:crowd
fail() { tail -5 /tmp/arykd.log >&2; echo "failed: $*" >&2; exit 1; }
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
rpc() { aryk rpc "$@" >/tmp/reply 2>&1 || fail "$*: $(cat /tmp/reply)"; }
anonymous() { sed -n 's/^RssAnon:[[:space:]]*\([0-9]*\).*/\1/p' /proc/$daemon/status; }
ticks() { cut -d' ' -f14,15 /proc/$daemon/stat | tr ' ' + | xargs -I {} sh -c 'echo $(({}))'; }
hosts() { aryk --json hosts | grep -c '"cntlid"'; }

load_modules nvme-tcp
ifconfig lo 127.0.0.1 up
mkdir /tmp/vhost
ulimit -n 200000
LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp/vhost -m 0x1 >/tmp/arykd.log 2>&1 &
daemon=$!
for _ in $(seq 200); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
rpc bdev_malloc_create '{"name": "data", "num_blocks": 65536, "block_size": 512}'
aryk share data --listen 127.0.0.1:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
before=$(anonymous)
mkfifo /tmp/hold
program crowd 4420 $nqn 80 124 </tmp/hold >/tmp/crowd 2>&1 &
crowd=$!
exec 9>/tmp/hold
for _ in $(seq 3000); do [ -s /tmp/crowd ] && break; sleep 0.1; done
[ "$(cat /tmp/crowd)" = 10000 ] || fail "the crowd: $(cat /tmp/crowd)"
[ "$(hosts)" = 80 ] || fail "hosts: $(hosts)"
after=$(anonymous)
echo "KiB for each connection: $(((after - before) / 10000))" >&2
[ $(((after - before) / 10000)) -lt 32 ] || fail "memory: $before KiB, then $after KiB"
begun=$(ticks)
sleep 10
used=$(($(ticks) - begun))
echo "processor time of 10,000 idle connections in 10 s: $used ticks of 1000" >&2
nvme connect -t tcp -a 127.0.0.1 -s 4420 -n $nqn --nr-io-queues 1
until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
measure beside --filename=/dev/nvme0n1 --rw=randwrite --bs=4k --iodepth=16 --size=8M --verify=crc32c
exec 9>&-
wait $crowd || fail "the crowd has failed"
for _ in $(seq 600); do [ "$(hosts)" = 1 ] && break; sleep 0.1; done
[ "$(hosts)" = 1 ] || fail "hosts after the crowd: $(hosts)"
measure after --filename=/dev/nvme0n1 --rw=randwrite --bs=4k --iodepth=16 --size=8M --verify=crc32c
nvme disconnect -n $nqn
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
