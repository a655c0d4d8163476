# The kernel's target over RDMA: `open` shares a disk there, and `close` ends all connections to it.

serve_by_kernel() {
    load_modules nvmet-rdma
    mount -t configfs configfs /sys/kernel/config
    cd /sys/kernel/config/nvmet
    truncate -s 96M /tmp/data.img
    mkdir subsystems/$nqn subsystems/$nqn/namespaces/1 ports/1
    echo 1 >subsystems/$nqn/attr_allow_any_host
    echo -n /tmp/data.img >subsystems/$nqn/namespaces/1/device_path
    echo 1 >subsystems/$nqn/namespaces/1/buffered_io
    echo 1 >subsystems/$nqn/namespaces/1/enable
    echo rdma >ports/1/addr_trtype
    echo ipv4 >ports/1/addr_adrfam
    echo $address >ports/1/addr_traddr
    echo 4420 >ports/1/addr_trsvcid
    open() { ln -s $PWD/subsystems/$nqn ports/1/subsystems/$nqn; }
    close() { rm ports/1/subsystems/$nqn; }
}
