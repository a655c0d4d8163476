# Counts the instructions of reads of 4 KiB at random: of fio on the kernel's driver, of the driver in user space, and of the daemon. The
# clock counts instructions while the processor is busy. $rounds, $depths, $long, $requests, $daemon_requests and $drive are set.

# Busy nanoseconds so far, reads that completed, interrupts of the drive's I/O queues.
counters() {
    awk 'FILENAME ~ /timer_list/ && /^now at/ { now = $3 }
        FILENAME ~ /timer_list/ && /(idle|iowait)_sleeptime/ { idle += $3 }
        FILENAME ~ /stat$/ { reads = $1 }
        FILENAME ~ /interrupts/ && /nvme0q[1-9]/ { interrupts += $2 }
        END { printf "%.0f %.0f %.0f", now - idle, reads, interrupts }' \
        /proc/timer_list /sys/block/nvme0n1/stat /proc/interrupts
}

# Prints a line with the change of the counters while the arguments run.
counted() {
    name=$1
    shift
    before=$(counters)
    "$@"
    echo "$name $before $(counters)"
}

load="--name=load --filename=/dev/nvme0n1 --direct=1 --rw=randread --bs=4k --size=256M --norandommap --gtod_reduce=1 \
    --thread --time_based --eta=never"

# Seconds for which reads are counted, and fio's time limit: one command in flight makes the processor idle, which costs time only.
window() {
    if [ "$1" = 1 ]; then echo "$long"; else echo 0.3; fi
}

# fio's counters while it runs, without its start and its end.
kernel() {
    name=$1
    depth=$2
    shift 2
    fio $load --iodepth="$depth" --runtime=$(($(window "$depth" | cut -d. -f1) + 1)) --output=/tmp/fio "$@" &
    begun=$(($(awk '{ print $1 }' /sys/block/nvme0n1/stat) + 4 * depth))
    while [ "$(awk '{ print $1 }' /sys/block/nvme0n1/stat)" -lt $begun ]; do sleep 0.05; done
    counted "kernel $name $depth" sleep "$(window "$depth")"
    if ! kill -0 $!; then
        echo "fio ended while it was counted" >&2
        exit 1
    fi
    wait $!
}

# A program of two instructions, executed 100 million times: `mov ecx, 100000000; again: dec ecx; jnz again; exit(0)`.
printf '\177ELF\2\1\1\0\0\0\0\0\0\0\0\0\2\0\76\0\1\0\0\0\170\0\100\0\0\0\0\0\100\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0' >/tmp/loop
printf '\0\0\0\0\100\0\70\0\1\0\0\0\0\0\0\0\1\0\0\0\5\0\0\0\0\0\0\0\0\0\0\0\0\0\100\0\0\0\0\0\0\0\100\0\0\0\0\0' >>/tmp/loop
printf '\210\0\0\0\0\0\0\0\210\0\0\0\0\0\0\0\0\20\0\0\0\0\0\0' >>/tmp/loop
printf '\271\0\341\365\5\377\311\165\374\270\74\0\0\0\61\377\17\5' >>/tmp/loop
chmod +x /tmp/loop
twice() { /tmp/loop; /tmp/loop; }

for round in $(seq "$rounds"); do
    counted "loop once" /tmp/loop
    counted "loop twice" twice
    for depth in $depths; do
        counted nothing sleep "$(window "$depth")"
        fio $load --ioengine=null --iodepth="$depth" --runtime=500ms --output-format=json --output=/tmp/fio
        publish "fio $depth $round" /tmp/fio
        kernel io_uring "$depth" --ioengine=io_uring
        kernel io_uring-fixed "$depth" --ioengine=io_uring --fixedbufs --registerfiles
        kernel libaio "$depth" --ioengine=libaio
    done
done

load_modules vfio
ulimit -l unlimited
echo vfio-pci >"/sys/bus/pci/devices/$drive/driver_override"
echo "$drive" >"/sys/bus/pci/devices/$drive/driver/unbind"
echo "$drive" >/sys/bus/pci/drivers_probe
for round in $(seq "$rounds"); do
    for depth in $depths; do
        echo "driver $depth $(program load "$drive" "$depth" "$requests")"
    done
done

# The daemon: nanoseconds that its threads have run, before, between and after two runs, the second of which is three times as long.
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
ran() { cat /proc/$daemon/task/*/schedstat | awk '{ sum += $1 } END { printf "%.0f", sum }'; }
load() { aryk bench nv0n1 --rw randread --bs 4k --qd "$1" --requests "$2" >/tmp/bench || { cat /tmp/bench >&2; exit 1; }; }
for policy in adaptive interrupt; do
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp -m 0x1 --sleep-policy $policy >/tmp/arykd.log 2>&1 &
    daemon=$!
    until aryk status >/dev/null 2>&1; do sleep 0.1; done
    params="{\"name\": \"nv0\", \"trtype\": \"PCIe\", \"traddr\": \"$drive\", \"dma\": \"pin\"}"
    aryk rpc bdev_nvme_attach_controller "$params" >/dev/null || { cat /tmp/arykd.log >&2; exit 1; }
    aryk attach nv0n1 >/dev/null
    for round in $(seq "$rounds"); do
        for depth in $depths; do
            before=$(ran)
            load "$depth" "$daemon_requests"
            between=$(ran)
            load "$depth" $((3 * daemon_requests))
            echo "daemon $policy $depth $daemon_requests $before $between $(ran)"
        done
    done
    kill $daemon
    wait $daemon
done
