# Works on the disks of a SCSI controller as the host says: each line of its is a command with a number, done beside the others, and ends in a line
# "did NUMBER STATUS ANSWER". What the kernel says of disks that come, go and grow is passed on as lines "heard ACTION TARGET SECTORS".

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

# The block device of target $1, if it is there.
lun() {
    for block in /sys/bus/scsi/devices/*:0:"$1":0/block/sd*; do
        [ -e "$block" ] && echo "/dev/${block##*/}" && return
    done
    echo "no disk at target $1" >&2
    return 1
}

# fio on a disk, with options common to all runs of it; its error number.
try_fio() {
    target=$1
    d=$(lun "$1") || return 1
    shift
    # A subshell's own name, for several run at the same time.
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

# Writes 1 MiB that text $2 makes to the disk's begin; its sum.
seal() {
    d=$(lun "$1") || return 1
    yes "$2" | head -c 1048576 >"/tmp/seal.$1"
    dd if="/tmp/seal.$1" of="$d" bs=256k oflag=direct 2>/dev/null || return 1
    sha256sum <"/tmp/seal.$1" | cut -d ' ' -f 1
}
# The sum of what is there.
sum() {
    d=$(lun "$1") || return 1
    dd if="$d" bs=256k count=4 iflag=direct 2>/dev/null | sha256sum | cut -d ' ' -f 1
}
# Writes all blocks of the part that is checked, for the first time.
lay() { try_fio "$1" --name=lay --rw=write --iodepth=16 $CHECKED --do_verify=0; }
# Reads them, and checks each.
whole() { try_fio "$1" --name=whole --rw=read --iodepth=16 $CHECKED; }
# Writes and verifies them until it fails or is told to stop. Pass after pass, not --time_based: with that fio forgets which blocks it has written
# again when it comes to verifying the first time.
load() {
    try_fio "$1" --name=load --rw=randwrite --iodepth=4 $CHECKED --verify_backlog=64 --loops=1000000 \
        --rate_iops="$2,$2"
}
stop() { kill -INT "$(cat "/tmp/fio.$1")"; }
# Writes another part as fast as it goes, until it fails.
burst() {
    try_fio "$1" --name=burst --rw=randrw --iodepth=32 --bs=4k --offset=6M --size=4M --time_based --runtime=36000
}
# Waits until the disk is written to.
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
# Waits until so many requests are in flight.
busy() {
    d=$(lun "$1") || return 1
    for _ in $(seq 200); do
        [ "$(awk '{print $1 + $2}' "/sys/block/${d##*/}/inflight")" -ge "$2" ] && return
        sleep 0.02
    done
    return 1
}
sectors() { d=$(lun "$1") && cat "/sys/block/${d##*/}/size"; }
# What the kernel has said of failed commands since it was asked last, each kind with its number.
kinds() {
    dmesg -c >/tmp/kinds
    grep -o -e 'I/O error' -e 'hostbyte=[A-Z_]*' -e 'Sense Key : .*' -e 'Add\. Sense: .*' /tmp/kinds | tr ' ' '_' | sort | uniq -c | sort -rn
}
# Has the guest look at target $1 for itself.
scan() { for host in /sys/class/scsi_host/*; do echo "0 $1 0" >"$host/scan"; done; }

# Makes a file system with files and their sums, and checks it; how many files there are. Each verb leaves it unmounted.
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
# The shell forgets what it has read of a line when a child ends; so it gets whole lines.
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
