# A VM in the guest returns pages of its memory, and then uses them for the I/O of a drive that arykd drives by VFIO.

drive=0000:00:18.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
ulimit -l unlimited
load_modules vfio
echo 16 >/proc/sys/vm/nr_hugepages
program aryk nvme bind $drive >/dev/null
program arykd -r /tmp/rpc.sock -S /tmp -m 0x1 >/tmp/arykd.log 2>&1 &
for _ in $(seq 100); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
for dma in bounce auto pin; do
    attach='{"name": "nv0", "trtype": "PCIe", "traddr": "'$drive'", "dma": "'$dma'"}'
    aryk rpc bdev_nvme_attach_controller "$attach" >/dev/null || fail attach
    aryk attach nv0n1 >/dev/null
    for pages in '' huge; do
        program balloon /tmp/nv0n1 $pages >/tmp/said 2>&1 || fail "$(cat /tmp/said)"
        sed "s/^/$dma${pages:+ $pages} /" /tmp/said
    done
    aryk detach nv0n1 >/dev/null
    aryk rpc bdev_nvme_detach_controller '{"name": "nv0"}' >/dev/null || fail detach
done
