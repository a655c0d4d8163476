//! Requests to an image. Any context but a reactor's: librbd takes locks, and copies the data of writes.

use crate::image::{completion, result_of};
use crate::table::Table;
use crate::{CallError, Gate, Image};
use aryk_dma::Sgl;
use smallvec::SmallVec;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK_PROVISION: c_int = 1;

/// A token of no request: its result says that memory which was taken back has become quiet ([`Gate`]).
pub const NOTHING: u64 = u64::MAX;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads into the data. Its result is the number of bytes that were read.
    Read,
    /// Writes the data.
    Write,
    /// Makes all writes that have completed durable.
    Flush,
    /// Frees so many bytes.
    Discard(u64),
    /// Writes so many zeroes.
    WriteZeroes {
        /// The number of bytes.
        len: u64,
        /// Whether the bytes have space in the cluster afterwards.
        allocate: bool,
    },
    /// Compares with the first half of the data and, if it is equal, writes the second half. If not, the result is `-EILSEQ`.
    CompareAndWrite,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What it does.
    pub operation: Operation,
    /// The first byte.
    pub offset: u64,
    /// The data in memory.
    pub data: Sgl,
    /// Identifies the request for its sink.
    pub token: u64,
}

/// Takes the results of requests.
pub trait Sink: Send + Sync + 'static {
    /// The request with `token` has ended: with 0 or a number of bytes, or with a negated errno. Called once for each request, on
    /// any thread; it must not block.
    fn completed(&self, token: u64, result: i64);
}

/// A request that librbd has.
struct Context {
    image: Arc<Image>,
    sink: Arc<dyn Sink>,
    gate: Arc<Gate>,
    token: u64,
    /// Where the result of a read goes.
    target: Sgl,
    /// librbd reads the list until the request has ended.
    pieces: SmallVec<[libc::iovec; 16]>,
    /// The data of a compare-and-write, which librbd takes in two parts, or of a write that librbd may not copy itself.
    copy: Vec<u8>,
    mismatch: u64,
}

impl Context {
    /// Copies what a read has read to its target; returns the result of the request.
    fn deliver(&mut self, result: i64) -> i64 {
        let Ok(len @ 1..) = u32::try_from(result) else { return result };
        if self.target.is_empty() {
            return result;
        }
        assert!(len <= self.target.len(), "librbd has read more than its buffer holds");
        if !self.gate.enter() {
            return i64::from(-libc::ECANCELED);
        }
        // SAFETY: librbd has written these bytes, for which `submit` has made room.
        unsafe { self.copy.set_len(len as usize) };
        self.target.write(0, &self.copy);
        // The result that follows tells the owner of the memory that this has ended.
        self.gate.leave();
        result
    }

    fn end(self, result: i64) {
        let Self { image, sink, token, .. } = self;
        image.end_use();
        // The receiver of the result may end the client, so nothing of this request uses it any more.
        drop(image);
        sink.completed(token, result);
    }
}

unsafe extern "C" fn completed(completion: *mut c_void, context: *mut c_void) {
    // SAFETY: `submit` made the context from a box, and librbd calls back once.
    let mut context = *unsafe { Box::from_raw(context.cast::<Context>()) };
    // SAFETY: librbd has just called back with it.
    let result = unsafe { result_of(context.image.table(), completion) };
    let result = context.deliver(result);
    context.end(result);
}

impl Image {
    /// Starts a request; its result goes to `sink`. The memory of the request is used only while `gate` is open. If it is being
    /// closed meanwhile, there is a further result, that of [`NOTHING`].
    pub fn submit(self: &Arc<Self>, request: &Request, sink: &Arc<dyn Sink>, gate: &Arc<Gate>) {
        if !gate.enter() {
            return sink.completed(request.token, i64::from(-libc::ECANCELED));
        }
        if self.begin_use() {
            self.start(request, sink, gate);
        } else {
            sink.completed(request.token, i64::from(-libc::ECANCELED));
        }
        if gate.leave() {
            sink.completed(NOTHING, 0);
        }
    }

    /// Starts a request whose memory and handle are in use.
    fn start(self: &Arc<Self>, request: &Request, sink: &Arc<dyn Sink>, gate: &Arc<Gate>) {
        let (mut copy, mut pieces, mut target) = (Vec::new(), SmallVec::new(), Sgl::EMPTY);
        let len = request.data.len() as usize;
        match request.operation {
            Operation::CompareAndWrite => {
                copy.resize(len, 0);
                request.data.read(0, &mut copy);
            }
            Operation::Write if self.must_copy() => {
                copy.resize(len, 0);
                request.data.read(0, &mut copy);
                pieces.push(libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: len });
            }
            // librbd keeps its buffer as long as it likes, also when the guest's memory is gone.
            Operation::Read => {
                copy.reserve_exact(len);
                pieces.push(libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: len });
                target = request.data;
            }
            _ => {
                let iovec = |piece: aryk_dma::Seg| libc::iovec {
                    iov_base: piece.base().cast(),
                    iov_len: piece.len(),
                };
                pieces.extend(request.data.pieces().map(iovec));
            }
        }
        let (image, sink, gate, token) =
            (Arc::clone(self), Arc::clone(sink), Arc::clone(gate), request.token);
        let context = Context { image, sink, gate, token, target, pieces, copy, mismatch: 0 };
        let context = Box::into_raw(Box::new(context));
        let table = self.table();
        // SAFETY: `completed` takes the context, which it gets once.
        let started = unsafe { completion(table, context, completed) }.and_then(|completion| {
            // SAFETY: the handle is in use, and the context stays until librbd calls back.
            let result = unsafe { start(table, self.raw(), request, context, completion) };
            CallError::check("rbd_aio", result).inspect_err(|_| {
                // SAFETY: librbd does not call back after an error.
                unsafe { (table.rbd_aio_release)(completion) };
            })
        });
        if let Err(CallError { errno, .. }) = started {
            // SAFETY: librbd has not started the request, and will not call back.
            let context = *unsafe { Box::from_raw(context) };
            context.end(i64::from(-errno));
        }
    }
}

/// Calls the function of an operation.
///
/// # Safety
/// The handle `raw` is in use until the completion, and `context` is that of `request`, and stays until then.
unsafe fn start(
    table: &Table,
    raw: *mut c_void,
    request: &Request,
    context: *mut Context,
    completion: *mut c_void,
) -> c_int {
    let offset = request.offset;
    // SAFETY: nobody else has the context before librbd gets the request.
    let Context { pieces, copy, mismatch, .. } = unsafe { &mut *context };
    let (list, count) = (pieces.as_ptr(), pieces.len() as c_int);
    match request.operation {
        // SAFETY: the list and the buffer that it names stay in place until the completion.
        Operation::Read => unsafe { (table.rbd_aio_readv)(raw, list, count, offset, completion) },
        // SAFETY: the list stays in place until the completion; what it names is in use, and librbd copies it, or is the copy.
        Operation::Write => unsafe { (table.rbd_aio_writev)(raw, list, count, offset, completion) },
        // SAFETY: the handle is in use.
        Operation::Flush => unsafe { (table.rbd_aio_flush)(raw, completion) },
        // SAFETY: the handle is in use.
        Operation::Discard(len) => unsafe { (table.rbd_aio_discard)(raw, offset, len, completion) },
        Operation::WriteZeroes { len, allocate } => {
            let flags = if allocate { THICK_PROVISION } else { 0 };
            // SAFETY: the handle is in use.
            unsafe { (table.rbd_aio_write_zeroes)(raw, offset, len as usize, completion, flags, 0) }
        }
        Operation::CompareAndWrite => {
            let (old, new) = copy.split_at(copy.len() / 2);
            let (old, new, len) = (old.as_ptr().cast(), new.as_ptr().cast(), new.len());
            // SAFETY: the copy and the place of the mismatch stay until the completion.
            let result = unsafe {
                (table.rbd_aio_compare_and_write)(raw, offset, len, old, new, completion, mismatch, 0)
            };
            result as c_int
        }
    }
}
