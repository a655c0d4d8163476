#!/bin/sh
# A machine with one disk of arykd's:   one-disk.sh SOCKET [QEMU OPTIONS…]
# SOCKET is what `aryk attach` printed. The machine's own disk, network and the like are for the further options.
set -eu
socket=$1
shift
# share=on lets the daemon reach the machine's memory; reconnect=1 is what the machine survives the daemon's restart with.
exec qemu-system-x86_64 \
    -machine q35,memory-backend=mem0 \
    -m 512M -object memory-backend-memfd,id=mem0,size=512M,share=on \
    -chardev socket,id=aryk0,path="$socket",reconnect=1 \
    -device vhost-user-blk-pci,chardev=aryk0 \
    "$@"
