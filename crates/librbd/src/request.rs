//! Requests to an image. Any context but a reactor's: librbd takes locks, and copies the data of writes.

use crate::image::{completion, result_of};
use crate::table::Table;
use crate::{CallError, Image};
use aryk_dma::Sgl;
use smallvec::SmallVec;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK_PROVISION: c_int = 1;

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
    token: u64,
    /// librbd reads the list until the request has ended.
    pieces: SmallVec<[libc::iovec; 16]>,
    /// The data of a compare-and-write, which librbd takes in two parts.
    copy: Vec<u8>,
    mismatch: u64,
}

impl Context {
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
    let context = *unsafe { Box::from_raw(context.cast::<Context>()) };
    // SAFETY: librbd has just called back with it.
    let result = unsafe { result_of(context.image.table(), completion) };
    context.end(result);
}

impl Image {
    /// Starts a request; its result goes to `sink`. librbd has the request's memory until then.
    pub fn submit(self: &Arc<Self>, request: &Request, sink: &Arc<dyn Sink>) {
        if !self.begin_use() {
            return sink.completed(request.token, i64::from(-libc::ESHUTDOWN));
        }
        let mut copy = Vec::new();
        let mut pieces = SmallVec::new();
        if request.operation == Operation::CompareAndWrite {
            copy = vec![0; request.data.len() as usize];
            request.data.read(0, &mut copy);
        } else {
            let iovec =
                |piece: aryk_dma::Seg| libc::iovec { iov_base: piece.base().cast(), iov_len: piece.len() };
            pieces.extend(request.data.pieces().map(iovec));
        }
        let (image, sink, token) = (Arc::clone(self), Arc::clone(sink), request.token);
        let context = Box::into_raw(Box::new(Context { image, sink, token, pieces, copy, mismatch: 0 }));
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
        // SAFETY: the list and the memory that it names stay in place until the completion.
        Operation::Read => unsafe { (table.rbd_aio_readv)(raw, list, count, offset, completion) },
        // SAFETY: as above.
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
