# The kernel's target over RDMA, which accesses VMs' memory by itself, while it ends its connections.

serve_by_kernel
open
attach_far rdma 4420 --dma pin
verify_in_vm
begin_vm 6000
for _ in 1 2; do
    in_flight
    close
    sleep 1
    open
    sleep 3
done
in_flight
end_vm
detach_far
end_user
close
if grep -q panicked /tmp/arykd.log; then fail panic; fi
