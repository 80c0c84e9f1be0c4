//! UCX's worker with its one endpoint: every call that is made of them, and what has to hold for
//! it. This file does the calls.

use super::callbacks::{self, Callbacks, Header};
use super::context::UcxContext;
use super::endpoint_description::EndpointDescription;
use super::error::UcxError;
use super::fabric::Fabric;
use super::report::{self, Lane};
use super::sys::{self, Begun, Callback, RequestParam, Status, StatusPtr};
use libc::c_void;
use rustix::fd::BorrowedFd;
use std::io;
use std::sync::Arc;

/// The only kind of active message.
const MESSAGE: libc::c_uint = 1;

/// A worker, used by one thread at a time. Ended when this is dropped.
pub(super) struct Worker {
    pub context: Arc<UcxContext>,
    handle: *mut sys::Worker,
    endpoint: *mut sys::Endpoint,
}

// SAFETY: the worker was made for several threads, one at a time.
unsafe impl Send for Worker {}

impl Worker {
    pub fn new(context: &Arc<UcxContext>) -> Result<Worker, UcxError> {
        // SAFETY: all fields are numbers or pointers that may be null; the mask says which are
        // meant.
        let mut params: sys::WorkerParams = unsafe { std::mem::zeroed() };
        params.field_mask = sys::WORKER_THREAD_MODE | sys::WORKER_FLAGS;
        params.thread_mode = sys::THREAD_MODE_SERIALIZED;
        // What a peer that is gone has not fetched is no leak.
        params.flags = sys::WORKER_IGNORE_REQUEST_LEAK;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is open, the parameters whole, and the worker is written.
        let created = unsafe { (context.ucp.worker_create)(context.handle, &params, &mut handle) };
        context.ucp.check("a worker", created)?;
        Ok(Worker { context: Arc::clone(context), handle, endpoint: std::ptr::null_mut() })
    }

    /// What becomes readable after [`arm`](Worker::arm). UCX's own: open as long as the worker, and
    /// never to be closed.
    pub fn event_fd(&self) -> Result<BorrowedFd<'static>, UcxError> {
        let mut fd = -1;
        // SAFETY: the worker is open; the descriptor is written.
        let got = unsafe { (self.context.ucp.worker_event_fd)(self.handle, &mut fd) };
        self.context.ucp.check("the worker's event descriptor", got)?;
        // SAFETY: the descriptor is open; whoever keeps it ends the worker after its last use.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// How others reach the worker.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let ucp = self.context.ucp;
        let (mut address, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: the worker is open; address and length are written.
        ucp.check("its address", unsafe { (ucp.worker_address)(self.handle, &mut address, &mut len) })?;
        // SAFETY: `len` bytes are at `address` until it is released.
        unsafe {
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            (ucp.worker_release_address)(self.handle, address);
            Ok(bytes)
        }
    }

    /// Has messages put on a callbacks.
    ///
    /// # Safety
    ///
    /// The callbacks must outlive the worker, and not be borrowed while any function of the worker
    /// is called.
    pub unsafe fn listen(&self, callbacks: &Callbacks) -> Result<(), UcxError> {
        let handler = sys::AmHandler {
            field_mask: sys::AM_HANDLER_ALL,
            id: MESSAGE,
            flags: sys::AM_WHOLE_MESSAGE | sys::AM_PERSISTENT_DATA,
            callback: callbacks::on_message,
            arg: (&raw const *callbacks).cast_mut().cast(),
        };
        // SAFETY: the caller says that the callbacks outlives the worker.
        let set = unsafe { (self.context.ucp.worker_set_am_handler)(self.handle, &handler) };
        self.context.ucp.check("a handler", set)
    }

    /// Names the peer.
    ///
    /// # Safety
    ///
    /// As for [`listen`](Worker::listen). The description must be of a peer that was let in: UCX
    /// believes its address.
    pub unsafe fn connect(
        &mut self,
        description: &EndpointDescription,
        callbacks: &Callbacks,
    ) -> Result<(), UcxError> {
        // SAFETY: all fields are numbers or pointers that may be null; the mask says which are
        // meant.
        let mut params: sys::EpParams = unsafe { std::mem::zeroed() };
        params.field_mask = sys::EP_REMOTE_ADDRESS | sys::EP_ERR_HANDLING_MODE | sys::EP_ERR_HANDLER;
        params.address = description.address.as_ptr().cast();
        // UCX refuses shared memory to those who ask for its errors, since it has none.
        params.err_mode = match self.context.fabric() {
            Fabric::Memory => sys::ERR_HANDLING_MODE_NONE,
            Fabric::Rdma | Fabric::Tcp => sys::ERR_HANDLING_MODE_PEER,
        };
        params.err_handler = Some(callbacks::on_failed);
        params.err_handler_arg = (&raw const *callbacks).cast_mut().cast();
        // SAFETY: the worker is open, the parameters whole; the endpoint is written.
        let created = unsafe { (self.context.ucp.ep_create)(self.handle, &params, &mut self.endpoint) };
        self.context.ucp.check("an endpoint", created)
    }

    pub fn is_connected(&self) -> bool {
        !self.endpoint.is_null()
    }

    pub fn lanes(&self) -> Vec<Lane> {
        let ucp = self.context.ucp;
        if !self.is_connected() {
            return Vec::new();
        }
        // SAFETY: the endpoint and the stream are open.
        report::lanes(&ucp.printed(|stream| unsafe { (ucp.ep_print)(self.endpoint, stream) }))
    }

    /// Lets UCX work. Says whether there may be more to do.
    pub fn progress(&self) -> bool {
        // SAFETY: the worker is open, and used by one thread at a time.
        unsafe { (self.context.ucp.worker_progress)(self.handle) != 0 }
    }

    /// Has the event descriptor tell of what comes from now on. `false`: something has come
    /// already.
    pub fn arm(&self) -> io::Result<bool> {
        // SAFETY: the worker is open.
        match unsafe { (self.context.ucp.worker_arm)(self.handle) } {
            sys::OK => Ok(true),
            sys::BUSY => Ok(false),
            status => Err(io::Error::other(self.context.ucp.text(status))),
        }
    }

    /// Sends a message. `None`: `on_sent` will be called with the ticket. Otherwise it is over, and
    /// this is how it ended.
    ///
    /// # Safety
    ///
    /// The endpoint must be there. Header, bytes and ticket must stay as they are until it is over.
    pub unsafe fn send(
        &self,
        header: *const Header,
        bytes: *const u8,
        len: usize,
        ticket: *mut c_void,
    ) -> Option<Status> {
        let callback = Callback { send: callbacks::on_sent };
        let param = RequestParam::told(callback, ticket);
        let (header, header_len) = (header.cast(), callbacks::HEADER_BYTES);
        let am_send = self.context.ucp.am_send;
        // SAFETY: the caller's word.
        begun(unsafe { am_send(self.endpoint, MESSAGE, header, header_len, bytes.cast(), len, &param) })
    }

    /// Fetches what was offered. `None`: `on_fetched` will be called with the ticket. Otherwise as
    /// [`send`](Worker::send).
    ///
    /// # Safety
    ///
    /// The offer must be one that was not fetched or released. The bytes must be writable by UCX
    /// alone, and the ticket stay, until it is over.
    pub unsafe fn fetch(
        &self,
        offer: *mut c_void,
        bytes: *mut u8,
        len: usize,
        ticket: *mut c_void,
    ) -> Option<Status> {
        let callback = Callback { receive: callbacks::on_fetched };
        let param = RequestParam::told(callback, ticket);
        // SAFETY: the caller's word.
        begun(unsafe { (self.context.ucp.am_receive)(self.handle, offer, bytes.cast(), len, &param) })
    }

    /// Gives data, or an offer of some, back.
    ///
    /// # Safety
    ///
    /// It must be what a message came with, and not used after.
    pub unsafe fn release(&self, data: *mut c_void) {
        // SAFETY: the caller's word.
        unsafe { (self.context.ucp.am_release)(self.handle, data) };
    }

    /// Closes the endpoint without waiting for the peer. `None`: that is over; otherwise what is to
    /// be asked until it is.
    pub fn close(&mut self) -> Option<Closing> {
        if !self.is_connected() {
            return None;
        }
        let mut param = RequestParam::plain();
        param.op_attr_mask = sys::OP_FLAGS;
        param.flags = sys::EP_CLOSE_FORCE;
        // SAFETY: the endpoint is open, and not used after.
        let closing = unsafe { (self.context.ucp.ep_close)(std::mem::take(&mut self.endpoint), &param) };
        match sys::begun(closing) {
            Begun::Request(request) => Some(Closing { context: Arc::clone(&self.context), request }),
            Begun::Done | Begun::Failed(_) => None,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: nobody else has the worker; ending it closes the endpoint if that is open.
        unsafe { (self.context.ucp.worker_destroy)(self.handle) };
    }
}

/// An endpoint on its way out.
pub(super) struct Closing {
    context: Arc<UcxContext>,
    request: *mut c_void,
}

impl Closing {
    pub fn is_over(&self) -> bool {
        // SAFETY: the request is given back when this is dropped, not before.
        unsafe { (self.context.ucp.request_status)(self.request) != sys::IN_PROGRESS }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        // SAFETY: nobody asks for it after this. If it is not over, UCX keeps it until it is.
        unsafe { (self.context.ucp.request_free)(self.request) };
    }
}

/// What a call that may go on says.
fn begun(pointer: StatusPtr) -> Option<Status> {
    match sys::begun(pointer) {
        Begun::Done => Some(sys::OK),
        Begun::Failed(status) => Some(status),
        Begun::Request(_) => None,
    }
}
