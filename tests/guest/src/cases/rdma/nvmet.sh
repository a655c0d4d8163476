# The kernel's target over RDMA, and a daemon that uses its disk.

serve_by_kernel
open
use_far 4420
verify_far
begin_load
for _ in 1 2 3; do
    close
    sleep 1
    open
    sleep 3
done
end_load
leave_far
close
if grep -q panicked /tmp/arykd.log; then fail panic; fi
