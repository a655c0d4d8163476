# Functions for every script in the guest.

# The block device of the guest's N-th disk: disks are in PCI slots 0x10, 0x11, ...
disk() {
    slot=$(printf '/0000:00:%02x.0/' $((16 + $1)))
    for block in /sys/block/vd*; do
        case $(readlink -f "$block") in *"$slot"*) echo "/dev/${block##*/}" && return ;; esac
    done
    echo "no block device at $slot" >&2
    return 1
}

# The virtio device (virtioN) of the N-th disk, whether a driver is bound to it or not.
virtio_of() {
    path=$(printf '/sys/bus/pci/devices/0000:00:%02x.0/virtio*' $((16 + $1)))
    set -- $path
    echo "${1##*/}"
}

# Loads a list of modules (`MODULES_OF_SCRIPTS` of the image), if they are not loaded.
load_modules() {
    while read -r module; do
        [ -e "/sys/module/$(echo "$module" | tr - _)" ] || insmod "/modules/$module.ko"
    done <"/modules/$1"
}

# Runs a program of this host that the VM was given (`Vm::programs`).
program() {
    name=$1
    shift
    LD_LIBRARY_PATH=/programs/lib "/programs/$name" "$@"
}

# Kills a program that the script has started, and waits until it has ended: until then, its sockets are still there.
kill_and_wait() {
    kill -9 "$1"
    wait "$1" 2>/dev/null || true
}

# Sends a file to the host under a name.
publish() {
    printf '\naryk-file %s\n' "$1"
    cat "$2"
    printf '\naryk-end %s\n' "$1"
}

# Runs fio with the given options on direct I/O, and publishes its report under a name.
measure() {
    report=$1
    shift
    fio --name="$report" --direct=1 --ioengine=io_uring --eta=never --output-format=json \
        --output=/tmp/fio "$@" || { cat /tmp/fio >&2; return 1; }
    publish "$report" /tmp/fio
}

# Waits until the host has sent the word.
await() {
    while read -r heard; do
        [ "$heard" = "$1" ] && return
    done
    return 1
}

# Waits until the kernel has given a PCI device back, for so many tenths of a second. Prints the kernel's last messages if it keeps
# the device.
gave_back() {
    for _ in $(seq "$2"); do
        [ -e "/sys/bus/pci/devices/$1" ] || return 0
        sleep 0.1
    done
    dmesg | tail -20
    return 1
}
