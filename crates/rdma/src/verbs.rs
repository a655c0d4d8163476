//! Structures of libibverbs and librdmacm, as far as they are used here: those of rdma-core 16 (2017) and later, whose layouts
//! are part of the libraries' ABI. Any context.

use std::ffi::{c_int, c_void};

/// `ibv_wc_status` of success.
pub(crate) const WC_SUCCESS: u32 = 0;
/// `ibv_wc_status` of a request that was not executed, because its queue pair has failed before.
pub(crate) const WC_FLUSHED: u32 = 5;

/// `ibv_access_flags`.
pub(crate) mod access {
    use std::ffi::c_int;

    pub(crate) const LOCAL_WRITE: c_int = 1;
    pub(crate) const REMOTE_WRITE: c_int = 1 << 1;
    pub(crate) const REMOTE_READ: c_int = 1 << 2;
}

pub(crate) const QPT_RC: u32 = 2;

/// `ibv_wr_opcode`.
pub(crate) mod opcode {
    pub(crate) const RDMA_WRITE: u32 = 0;
    pub(crate) const SEND: u32 = 2;
    pub(crate) const RDMA_READ: u32 = 4;
    pub(crate) const SEND_WITH_INV: u32 = 9;
}

/// `ibv_send_flags`.
pub(crate) mod send_flags {
    pub(crate) const SIGNALED: u32 = 1 << 1;
    pub(crate) const INLINE: u32 = 1 << 3;
}

/// `IBV_DEVICE_MEM_MGT_EXTENSIONS`: among others, the device can send with invalidation.
pub(crate) const MEM_MGT_EXTENSIONS: u32 = 1 << 21;

/// `IBV_EVENT_QP_LAST_WQE_REACHED`: a queue pair that has failed takes no more shared receives.
pub(crate) const LAST_RECEIVE: u32 = 16;

/// The status of a refusal by the other computer, and not by its kernel: `IB_CM_REJ_CONSUMER_DEFINED`.
pub(crate) const REJECTED_BY_CONSUMER: i32 = 28;

/// `rdma_port_space` of reliable connections.
pub(crate) const PS_TCP: u32 = 0x0106;

/// `rdma_cm_event_type`.
pub(crate) mod event {
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ADDR_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const ROUTE_ERROR: u32 = 3;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_ERROR: u32 = 6;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
}

/// `ibv_context`. The providers of devices set the functions; entries that are not used here are numbers.
#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    unused_0: [usize; 11],
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    unused_13: [usize; 7],
    pub post_srq_recv: unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    unused_21: [usize; 4],
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    unused_27: [usize; 5],
    cmd_fd: c_int,
    pub async_fd: c_int,
}

/// `ibv_cq`, the first fields.
#[repr(C)]
pub(crate) struct Cq {
    pub context: *mut Context,
}

/// `ibv_qp`, the first fields.
#[repr(C)]
pub(crate) struct Qp {
    pub context: *mut Context,
}

/// `ibv_srq`, the first fields.
#[repr(C)]
pub(crate) struct Srq {
    pub context: *mut Context,
}

/// `ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// `ibv_async_event`, with what it is about if that is a queue pair.
#[repr(C)]
pub(crate) struct AsyncEvent {
    pub qp: *mut Qp,
    pub kind: u32,
}

/// `ibv_comp_channel`, the first fields.
#[repr(C)]
pub(crate) struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// `ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut c_void,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wc {
    pub wr_id: u64,
    pub status: u32,
    opcode: u32,
    vendor_err: u32,
    pub byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

impl Wc {
    pub(crate) const EMPTY: Self = Self {
        wr_id: 0,
        status: 0,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_data: 0,
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };
}

/// `ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `ibv_send_wr`, of RDMA requests and of sends.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    pub invalidate_rkey: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    unused: [u64; 9],
}

impl SendWr {
    /// A request without memory of the other computer.
    pub(crate) const fn new(wr_id: u64, opcode: u32, send_flags: u32) -> Self {
        Self {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 1,
            opcode,
            send_flags,
            invalidate_rkey: 0,
            remote_addr: 0,
            rkey: 0,
            unused: [0; 9],
        }
    }
}

/// `ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvWr {
    pub wr_id: u64,
    pub next: *mut Self,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

impl RecvWr {
    /// A receive to so many pieces.
    pub(crate) const fn new(wr_id: u64, num_sge: c_int) -> Self {
        Self { wr_id, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge }
    }
}

/// A request of either queue, which is a part of a list.
pub(crate) trait WorkRequest {
    fn piece_count(&self) -> usize;
    /// Sets the pieces, which are as many as before, and the next request.
    fn link(&mut self, pieces: &mut [Sge], next: *mut Self);
}

impl WorkRequest for SendWr {
    fn piece_count(&self) -> usize {
        self.num_sge as usize
    }

    fn link(&mut self, pieces: &mut [Sge], next: *mut Self) {
        (self.sg_list, self.next) = (pieces.as_mut_ptr(), next);
    }
}

impl WorkRequest for RecvWr {
    fn piece_count(&self) -> usize {
        self.num_sge as usize
    }

    fn link(&mut self, pieces: &mut [Sge], next: *mut Self) {
        (self.sg_list, self.next) = (pieces.as_mut_ptr(), next);
    }
}

/// `ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `ibv_qp_attr`, of which one attribute is set: that of [`MIN_RNR_TIMER`].
#[repr(C, align(8))]
pub(crate) struct QpAttr {
    pub unused: [u8; 128],
    pub min_rnr_timer: u8,
    pub rest: [u8; 15],
}

/// `IBV_QP_MIN_RNR_TIMER`.
pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;

/// `ibv_device_attr`.
#[repr(C)]
pub(crate) struct DeviceAttr {
    fw_ver: [u8; 64],
    guids_and_sizes: [u64; 4],
    vendor: [u32; 3],
    max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    max_sge_rd: c_int,
    max_cq: c_int,
    pub max_cqe: c_int,
    max_mr: c_int,
    max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    unused_160: [u32; 14],
    pub max_srq_wr: c_int,
    rest: [u32; 3],
}

/// `rdma_event_channel`.
#[repr(C)]
pub(crate) struct EventChannel {
    pub fd: c_int,
}

/// `rdma_cm_id`, the first fields.
#[repr(C)]
pub(crate) struct CmId {
    pub verbs: *mut Context,
    channel: *mut EventChannel,
    context: *mut c_void,
    pub qp: *mut Qp,
    pub local: libc::sockaddr_storage,
    pub peer: libc::sockaddr_storage,
}

/// `rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `rdma_cm_event`. The parameters are a union of which connections use this part.
#[repr(C)]
pub(crate) struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: u32,
    pub status: c_int,
    pub conn: ConnParam,
    unused: [u64; 4],
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Context, poll_cq) == 8 + 88 && offset_of!(Context, req_notify_cq) == 8 + 96);
    assert!(offset_of!(Context, post_send) == 8 + 200 && offset_of!(Context, post_recv) == 8 + 208);
    assert!(offset_of!(Context, post_srq_recv) == 8 + 160 && offset_of!(Context, async_fd) == 8 + 256 + 4);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, min_rnr_timer) == 128);
    assert!(size_of::<SrqInitAttr>() == 24 && size_of::<AsyncEvent>() == 16);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36);
    assert!(size_of::<Wc>() == 48 && size_of::<Sge>() == 16 && size_of::<RecvWr>() == 32);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, remote_addr) == 40);
    assert!(size_of::<QpInitAttr>() == 64 && size_of::<DeviceAttr>() == 232);
    assert!(offset_of!(DeviceAttr, device_cap_flags) == 116 && offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156 && offset_of!(DeviceAttr, max_srq_wr) == 216);
    assert!(offset_of!(CmId, local) == 32 && offset_of!(CmId, peer) == 160);
    assert!(size_of::<ConnParam>() == 24 && offset_of!(ConnParam, rnr_retry_count) == 13);
    assert!(size_of::<CmEvent>() == 80 && offset_of!(CmEvent, conn) == 24);
};
