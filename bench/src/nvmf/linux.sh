# Counts the instructions of requests of the kernel's initiator, at arykd and at the kernel's own target. The clock counts instructions
# while the processor is busy. $rounds, $depths and $requests are set.

nqn=nqn.2016-06.io.aryk
load_modules nvme-tcp
load_modules nvmet-tcp
insmod /modules/brd.ko rd_nr=1 rd_size=65536
ifconfig lo 127.0.0.1 up

# Starts a daemon with this sleep policy, which shares a disk in memory at this port.
start() {
    mkdir /tmp/$1
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/$1/rpc.sock -S /tmp/$1 -m 0x1 --sleep-policy $1 >/tmp/$1/log 2>&1 &
    echo $! >/tmp/$1/pid
    until program aryk -s /tmp/$1/rpc.sock status >/dev/null 2>&1; do sleep 0.1; done
    program aryk -s /tmp/$1/rpc.sock disk create data --memory --size 64M >/dev/null
    program aryk -s /tmp/$1/rpc.sock share data --listen 127.0.0.1:$2 --nqn $nqn:$1 >/dev/null
}
start interrupt 4420
start adaptive 4421

mount -t configfs configfs /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir subsystems/$nqn:nvmet subsystems/$nqn:nvmet/namespaces/1 ports/1
echo 1 >subsystems/$nqn:nvmet/attr_allow_any_host
echo -n /dev/ram0 >subsystems/$nqn:nvmet/namespaces/1/device_path
echo 1 >subsystems/$nqn:nvmet/namespaces/1/enable
echo tcp >ports/1/addr_trtype
echo ipv4 >ports/1/addr_adrfam
echo 127.0.0.1 >ports/1/addr_traddr
echo 4422 >ports/1/addr_trsvcid
ln -s $PWD/subsystems/$nqn:nvmet ports/1/subsystems/
cd /

# The disk of a target.
disk_of() {
    case $1 in interrupt) echo /dev/nvme0n1 ;; adaptive) echo /dev/nvme1n1 ;; nvmet) echo /dev/nvme2n1 ;; esac
}

load() {
    fio --name=load --filename="$(disk_of "$1")" --direct=1 --ioengine=io_uring --rw="$2" --bs=4k --size=64M --io_size=$(($4 * 4))k \
        --iodepth="$3" --norandommap --gtod_reduce=1 --thread --eta=never --output=/tmp/fio || { cat /tmp/fio >&2; exit 1; }
}

port=4420
for target in interrupt adaptive nvmet; do
    nvme connect -t tcp -a 127.0.0.1 -s $port -n $nqn:$target --nr-io-queues 1 --queue-size 128 --keep-alive-tmo 600 >&2
    until [ -b "$(disk_of $target)" ]; do sleep 0.1; done
    # All blocks exist in memory from here on.
    load $target write 32 16384
    port=$((port + 1))
done

# Nanoseconds of the clock, those in which the processor was busy, and those that the threads of the target's daemon have run.
counters() {
    ran=0
    if [ "$1" != nvmet ]; then
        ran=$(cat /proc/"$(cat /tmp/$1/pid)"/task/*/schedstat | awk '{ sum += $1 } END { printf "%.0f", sum }')
    fi
    awk -v ran="$ran" '/^now at/ { now = $3 } /(idle|iowait)_sleeptime/ { idle += $3 } END { printf "%.0f %.0f %.0f", now, now - idle, ran }' \
        /proc/timer_list
}

for _ in $(seq "$rounds"); do
    for rw in randread randwrite; do
        for depth in $depths; do
            for target in interrupt adaptive nvmet; do
                # The second run is three times as long: what a run costs at its start and its end cancels out.
                before=$(counters $target)
                load $target $rw "$depth" "$requests"
                between=$(counters $target)
                load $target $rw "$depth" $((3 * requests))
                echo "count $target $rw $depth $before $between $(counters $target)"
            done
        done
    done
done
