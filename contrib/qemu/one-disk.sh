#!/bin/sh
# A VM with one disk of arykd:   one-disk.sh SOCKET [QEMU OPTIONS…]
# SOCKET is the path that `aryk attach` printed. Add the VM's other devices with QEMU OPTIONS.
set -eu
socket=$1
shift
# share=on lets the daemon map the VM's memory; with reconnect=1, the VM survives a restart of the daemon.
exec qemu-system-x86_64 \
    -machine q35,memory-backend=mem0 \
    -m 512M -object memory-backend-memfd,id=mem0,size=512M,share=on \
    -chardev socket,id=aryk0,path="$socket",reconnect=1 \
    -device vhost-user-blk-pci,chardev=aryk0 \
    "$@"
