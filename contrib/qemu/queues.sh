#!/bin/sh
# A VM with four processors, and a queue of its disk for each:   queues.sh SOCKET [QEMU OPTIONS…]
# Linux uses one queue per processor, if the disk has as many; the daemon spreads the queues over its cores.
# packed=on offers packed rings, which use less of both sides' caches.
set -eu
socket=$1
shift
exec qemu-system-x86_64 \
    -machine q35,memory-backend=mem0 -smp 4 \
    -m 512M -object memory-backend-memfd,id=mem0,size=512M,share=on \
    -chardev socket,id=aryk0,path="$socket",reconnect=1 \
    -device vhost-user-blk-pci,chardev=aryk0,num-queues=4,packed=on \
    "$@"
