#!/bin/sh
# A VM whose QEMU listens, and a daemon that connects to it:   listen.sh SOCKET [QEMU OPTIONS…]
# Give the daemon the same SOCKET: `aryk attach vm1 --connect SOCKET`. Start either first; a new daemon connects within milliseconds.
set -eu
socket=$1
shift
exec qemu-system-x86_64 \
    -machine q35,memory-backend=mem0 \
    -m 512M -object memory-backend-memfd,id=mem0,size=512M,share=on \
    -chardev socket,id=aryk0,path="$socket",server=on,wait=off \
    -device vhost-user-blk-pci,chardev=aryk0 \
    "$@"
