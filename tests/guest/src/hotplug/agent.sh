# Executes the host's commands on the disks of a SCSI controller. Each line is a command with a number; commands run in
# parallel, and each ends with a line "did NUMBER STATUS ANSWER". The kernel's events of added, removed and resized disks
# are reported as lines "heard ACTION TARGET SECTORS".

cat >/tmp/pass-on <<'END'
case $SUBSYSTEM:${DEVTYPE:-}:$ACTION:${RESIZE:-} in
block:disk:add:* | block:disk:remove:* | block:disk:change:1) ;;
*) exit 0 ;;
esac
case $DEVPATH in */target*) ;; *) exit 0 ;; esac
target=${DEVPATH%:0/block/*}
size=$(cat "/sys$DEVPATH/size" 2>/dev/null) || size=0
echo "heard $ACTION ${target##*:} $size"
END

# The block device of target $1, if it exists.
lun() {
    for block in /sys/bus/scsi/devices/*:0:"$1":0/block/sd*; do
        [ -e "$block" ] && echo "/dev/${block##*/}" && return
    done
    echo "no disk at target $1" >&2
    return 1
}

# Runs fio on a disk, with the options common to all runs; prints fio's error number.
try_fio() {
    target=$1
    d=$(lun "$1") || return 1
    shift
    # A name of this subshell's own, because several run at the same time.
    report=$(mktemp)
    fio --filename="$d" --direct=1 --ioengine=io_uring --eta=never --thread "$@" >"$report" 2>&1 &
    echo $! >"/tmp/fio.$target"
    wait $! || true
    error=$(sed -n 's/.*err= *\([0-9]*\).*/\1/p' "$report" | head -n 1)
    [ "${error:-}" = 0 ] || cat "$report" >&2
    rm "$report"
    echo "$error"
}

CHECKED="--offset=2M --size=1M --bs=4k --verify=crc32c --verify_fatal=1"

# Writes 1 MiB generated from text $2 to the start of the disk; prints its checksum.
seal() {
    d=$(lun "$1") || return 1
    yes "$2" | head -c 1048576 >"/tmp/seal.$1"
    dd if="/tmp/seal.$1" of="$d" bs=256k oflag=direct 2>/dev/null || return 1
    sha256sum <"/tmp/seal.$1" | cut -d ' ' -f 1
}
# The checksum of that part.
sum() {
    d=$(lun "$1") || return 1
    dd if="$d" bs=256k count=4 iflag=direct 2>/dev/null | sha256sum | cut -d ' ' -f 1
}
# Writes all blocks of the verified part for the first time.
lay() { try_fio "$1" --name=lay --rw=write --iodepth=16 $CHECKED --do_verify=0; }
# Reads the verified part, and checks each block.
whole() { try_fio "$1" --name=whole --rw=read --iodepth=16 $CHECKED; }
# Writes and verifies the part until an error or the stop command. In passes, not with --time_based: then fio forgets
# which blocks it has overwritten when it verifies the first pass.
load() {
    try_fio "$1" --name=load --rw=randwrite --iodepth=4 $CHECKED --verify_backlog=64 --loops=1000000 \
        --rate_iops="$2,$2"
}
stop() { kill -INT "$(cat "/tmp/fio.$1")"; }
# Writes another part as fast as possible, until an error.
burst() {
    try_fio "$1" --name=burst --rw=randrw --iodepth=32 --bs=4k --offset=6M --size=4M --time_based --runtime=36000
}
# Waits until the disk has received a write.
begun() {
    d=$(lun "$1") || return 1
    stat=/sys/block/${d##*/}/stat
    before=$(awk '{print $5}' "$stat")
    for _ in $(seq 600); do
        [ "$(awk '{print $5}' "$stat")" = "$before" ] || return 0
        sleep 0.05
    done
    return 1
}
# Waits until $2 requests are in flight.
busy() {
    d=$(lun "$1") || return 1
    for _ in $(seq 200); do
        [ "$(awk '{print $1 + $2}' "/sys/block/${d##*/}/inflight")" -ge "$2" ] && return
        sleep 0.02
    done
    return 1
}
sectors() { d=$(lun "$1") && cat "/sys/block/${d##*/}/size"; }
# The kernel's messages about failed commands since the last call, with the number of each kind.
kinds() {
    dmesg -c >/tmp/kinds
    grep -o -e 'I/O error' -e 'hostbyte=[A-Z_]*' -e 'Sense Key : .*' -e 'Add\. Sense: .*' /tmp/kinds | tr ' ' '_' | sort | uniq -c | sort -rn
}
# Makes the guest scan target $1 by itself.
scan() { for host in /sys/class/scsi_host/*; do echo "0 $1 0" >"$host/scan"; done; }

# Creates a file system with files and their checksums, and checks it; prints the number of files. Both verbs leave it
# unmounted.
make_files() {
    d=$(lun "$1") && mkfs.ext4 -q "$d" && mount -t ext4 "$d" /mnt && cp -r /usr/bin /usr/sbin /mnt/ || return 1
    (cd /mnt && find bin sbin -type f -exec sha256sum {} +) >/tmp/sums
    cp /tmp/sums /mnt/sums && umount /mnt && check_files "$1"
}
check_files() {
    d=$(lun "$1") && e2fsck -fn "$d" >/tmp/e2fsck && mount -t ext4 -r "$d" /mnt || return 1
    cmp /tmp/sums /mnt/sums && (cd /mnt && sha256sum -c sums) | grep -c ': OK$'
    umount /mnt
}

uevent sh /tmp/pass-on &
until awk '$2 == 15 && $4 != "00000000"' /proc/net/netlink | grep -q .; do sleep 0.05; done
# The shell loses the rest of a line that it has read when a child ends, so it gets whole lines from a FIFO.
mkfifo /tmp/orders
exec 3<&0
awk '{ print; fflush() }' <&3 >/tmp/orders &
echo ready
while read -r number verb words; do
    [ "$verb" != end ] || break
    (
        # shellcheck disable=SC2086
        if "$verb" $words >"/tmp/out.$number" 2>"/tmp/err.$number"; then status=0; else status=$?; fi
        cat "/tmp/err.$number" >&2
        echo "did $number $status $(tr '\n' ' ' <"/tmp/out.$number")"
        rm "/tmp/out.$number" "/tmp/err.$number"
    ) &
done </tmp/orders
