# A hostile target, against a daemon that uses a disk of another one meanwhile.

start
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
aryk share data --rdma --listen $address:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
use_far 4420
begin_load
before=$(pinned $user)
hostile() { in_user aryk disk create $1 --nvme-rdma $address:4500 --subsystem $nqn >/tmp/reply.$1 2>&1; }
scenes=0
while read -r scene reason; do
    # Not the output of the scene before.
    : >/tmp/scene
    program hostile_rdma_target $address:4500 $scene >/tmp/scene 2>&1 &
    attack=$!
    until grep -q listening /tmp/scene; do kill -0 $attack || fail "$(cat /tmp/scene)"; sleep 0.1; done
    if [ $scene = stolen ]; then
        hostile other &
        other=$!
    fi
    if hostile hostile; then fail "$scene: a disk of a hostile target"; fi
    wait $attack || fail "$(cat /tmp/scene)"
    [ $scene != stolen ] || if wait $other; then fail "$scene: a disk of a hostile target"; fi
    grep -q "$reason" /tmp/reply.hostile || fail "$scene: $(cat /tmp/reply.hostile)"
    cat /tmp/scene /tmp/reply.hostile >&2
    scenes=$((scenes + 1))
done <<END
refuses refuses the connection: no resources
format unknown data
few 3 commands at a time
unknown completion of command 1
short a message of 8 bytes
long RDMA:
inside completion of command 65535
before closed the connection
behind closed the connection
key closed the connection
stolen closed the connection
END
[ $scenes = 11 ] || fail "$scenes scenes"
kill -0 $user || fail "the daemon has ended"
[ "$(pinned $user)" = "$before" ] || sleep 2
[ "$(pinned $user)" = "$before" ] || fail "registered before: $before KiB, afterwards: $(pinned $user) KiB"
end_load
leave_far
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
