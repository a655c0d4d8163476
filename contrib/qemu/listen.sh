#!/bin/sh
# A machine that listens, and a daemon that connects to it:   listen.sh SOCKET [QEMU OPTIONS…]
# SOCKET is where both meet: `aryk attach vm1 --connect SOCKET`. Either may be started first, and a new daemon is back within milliseconds.
set -eu
socket=$1
shift
exec qemu-system-x86_64 \
    -machine q35,memory-backend=mem0 \
    -m 512M -object memory-backend-memfd,id=mem0,size=512M,share=on \
    -chardev socket,id=aryk0,path="$socket",server=on,wait=off \
    -device vhost-user-blk-pci,chardev=aryk0 \
    "$@"
