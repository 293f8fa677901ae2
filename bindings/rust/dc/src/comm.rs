//! Communicators: ranks that call the same collectives in the same order.

use crate::device::nanoseconds;
use crate::error::{c_name, check, counted, Error, Result, Status};
use crate::sys;
use crate::tensor::{view_of, view_of_mut, Element};
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::fmt;
use std::mem::size_of;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

/// The library takes no more ranks over any transport.
const MOST_RANKS: i32 = 1024;

/// Limits of a communicator; over TCP also its secret and addresses.
#[derive(Clone, Default)]
pub struct CommOptions {
    /// The longest wait for another rank; `None`: 300 s.
    pub timeout: Option<Duration>,
    /// The most shared memory that a rank may allocate; 0: the machine's memory.
    pub heap_bytes: usize,
    /// TCP: 16 to 1024 bytes that only the ranks know; `None`: loopback addresses only.
    pub secret: Option<String>,
    /// TCP, MPI: where to listen, as an interface's name or a CIDR; `None`: all addresses of the machine.
    pub network: Option<String>,
    /// TCP, MPI: the first and last port for listeners, except that of TCP's rank 0; `None`: any port.
    pub ports: Option<(u16, u16)>,
    /// TCP, MPI: the interval of heartbeats; `None`: 1 s.
    pub heartbeat: Option<Duration>,
    /// TCP, MPI: a text that all ranks of a machine share; "": none share memory; `None`: the machine's own.
    pub node: Option<String>,
    /// TCP: TLS 1.3 between the ranks, which needs a secret and OpenSSL's libssl.so.3.
    pub tls: bool,
}

impl fmt::Debug for CommOptions {
    /// Leaves out the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommOptions")
            .field("timeout", &self.timeout)
            .field("heap_bytes", &self.heap_bytes)
            .field("secret", &self.secret.as_ref().map(|_| "..."))
            .field("network", &self.network)
            .field("ports", &self.ports)
            .field("heartbeat", &self.heartbeat)
            .field("node", &self.node)
            .field("tls", &self.tls)
            .finish()
    }
}

impl CommOptions {
    pub(crate) fn table(&self) -> sys::dc_comm_options {
        sys::dc_comm_options {
            struct_size: size_of::<sys::dc_comm_options>(),
            timeout_ns: nanoseconds(self.timeout),
            heap_bytes: self.heap_bytes as i64,
            tls: i32::from(self.tls),
            ..Default::default()
        }
    }
}

/// How reductions combine ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
pub enum ReduceOp {
    /// The sum, in a fixed order.
    Sum = sys::DC_SUM,
    /// The sum, then one division by the number of ranks.
    Mean = sys::DC_MEAN,
}

#[derive(Debug)]
struct Handle(NonNull<sys::dc_comm>);

// Shared handles only use functions of the thread class [any]: abort, check, rank, size, destroy.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        unsafe { sys::dc_comm_destroy(self.0.as_ptr()) }
    }
}

/// One rank of a group. It may move to another thread, but only one thread at a time may use it.
#[derive(Debug)]
pub struct Comm {
    handle: Arc<Handle>,
    /// Whether a group is open. Being a Cell it also keeps the communicator to one thread at a time.
    pub(crate) grouped: Cell<bool>,
}

/// Makes the collectives of a communicator fail on every rank. Any thread may use it.
#[derive(Clone, Debug)]
pub struct Abort(Arc<Handle>);

impl Abort {
    /// Every present and future collective of the group fails with [`Status::ABORTED`] and this reason.
    pub fn abort(&self, reason: &str) {
        let reason: Vec<u8> = reason.bytes().filter(|byte| *byte != 0).collect();
        let reason = CString::new(reason).unwrap_or_default();
        unsafe { sys::dc_comm_abort(self.0 .0.as_ptr(), reason.as_ptr()) }
    }

    /// The first failure of the group, if there was one.
    pub fn check(&self) -> Result<()> {
        check(unsafe { sys::dc_comm_check(self.0 .0.as_ptr()) })
    }
}

impl Comm {
    pub(crate) unsafe fn from_raw(comm: *mut sys::dc_comm) -> Comm {
        let handle = Arc::new(Handle(NonNull::new(comm).expect("a communicator")));
        Comm { handle, grouped: Cell::new(false) }
    }

    /// Makes ranks that are threads of this process: one communicator for each.
    pub fn threads(world_size: i32, options: &CommOptions) -> Result<Vec<Comm>> {
        crate::check_version()?;
        if world_size > MOST_RANKS {
            let text = format!("world_size = {world_size}, must be at most {MOST_RANKS}, and for threads at most 64");
            return Err(Error::new(Status::INVALID, text)); // before there is room for as many
        }
        let mut comms = vec![ptr::null_mut(); usize::try_from(world_size).unwrap_or(0)];
        check(unsafe { sys::dc_comm_create_threads(world_size, &options.table(), comms.as_mut_ptr()) })?;
        Ok(comms.into_iter().map(|comm| unsafe { Comm::from_raw(comm) }).collect())
    }

    /// Joins a group of processes on this machine under a name. Waits until all ranks have joined.
    pub fn processes(name: &str, rank: i32, world_size: i32, options: &CommOptions) -> Result<Comm> {
        crate::check_version()?;
        let name = c_name("name", name)?;
        let mut comm = ptr::null_mut();
        check(unsafe { sys::dc_comm_create_processes(name.as_ptr(), rank, world_size, &options.table(), &mut comm) })?;
        Ok(unsafe { Comm::from_raw(comm) })
    }

    /// One rank of a group on any machines, over TCP. Waits until all have come. `address`: "HOST:PORT" of rank 0.
    /// On other addresses than loopback `options.secret` is needed.
    pub fn tcp(address: &str, name: &str, rank: i32, world_size: i32, options: &CommOptions) -> Result<Comm> {
        crate::check_version()?;
        let (address, name) = (c_name("address", address)?, c_name("name", name)?);
        let network = options.network.as_deref().map(|text| c_name("options.network", text)).transpose()?;
        let node = options.node.as_deref().map(|text| c_name("options.node", text)).transpose()?;
        let secret = options.secret.as_deref().map(CString::new).transpose();
        let secret = secret.map_err(|_| Error::new(Status::INVALID, "options.secret must not contain NUL"))?;
        let (first_port, last_port) = options.ports.unwrap_or((0, 0));
        let table = sys::dc_comm_options {
            secret: secret.as_deref().map_or(ptr::null(), CStr::as_ptr),
            network: network.as_deref().map_or(ptr::null(), CStr::as_ptr),
            node: node.as_deref().map_or(ptr::null(), CStr::as_ptr),
            heartbeat_ns: nanoseconds(options.heartbeat),
            first_port: i32::from(first_port),
            last_port: i32::from(last_port),
            ..options.table()
        };
        let mut comm = ptr::null_mut();
        let (address, name) = (address.as_ptr(), name.as_ptr());
        check(unsafe { sys::dc_comm_create_tcp(address, name, rank, world_size, &table, &mut comm) })?;
        Ok(unsafe { Comm::from_raw(comm) })
    }

    /// Makes this process's rank of MPI_COMM_WORLD; MPI moves the data. Waits until all ranks have joined. Start the
    /// processes with mpirun or another launcher. Ranks compare their calls over connections of their own, which use
    /// `options.network` and `ports`.
    pub fn mpi(options: &CommOptions) -> Result<Comm> {
        crate::check_version()?;
        let network = options.network.as_deref().map(|text| c_name("options.network", text)).transpose()?;
        let node = options.node.as_deref().map(|text| c_name("options.node", text)).transpose()?;
        let (first_port, last_port) = options.ports.unwrap_or((0, 0));
        let table = sys::dc_comm_options {
            network: network.as_deref().map_or(ptr::null(), CStr::as_ptr),
            node: node.as_deref().map_or(ptr::null(), CStr::as_ptr),
            heartbeat_ns: nanoseconds(options.heartbeat),
            first_port: i32::from(first_port),
            last_port: i32::from(last_port),
            ..options.table()
        };
        let mut comm = ptr::null_mut();
        check(unsafe { sys::dc_comm_create_mpi(&table, &mut comm) })?;
        Ok(unsafe { Comm::from_raw(comm) })
    }

    /// The handle, for calls that only [`crate::sys`] offers.
    pub fn as_ptr(&self) -> *mut sys::dc_comm {
        self.handle.0.as_ptr()
    }

    /// This rank's number.
    pub fn rank(&self) -> i32 {
        unsafe { sys::dc_comm_rank(self.as_ptr()) }
    }

    /// The number of ranks.
    pub fn size(&self) -> i32 {
        unsafe { sys::dc_comm_size(self.as_ptr()) }
    }

    /// Another communicator of the same ranks, whose collectives may overlap this one's.
    pub fn dup(&self) -> Result<Comm> {
        let mut copy = ptr::null_mut();
        check(unsafe { sys::dc_comm_dup(self.as_ptr(), &mut copy) })?;
        Ok(unsafe { Comm::from_raw(copy) })
    }

    /// A communicator of the ranks with the same color, ordered by `key`, then by their rank here. All ranks must call
    /// it; a rank without a color gets `None`.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Comm>> {
        let color = color.map_or(Ok(-1), i32::try_from);
        let color = color.map_err(|_| Error::new(Status::INVALID, "color is larger than i32::MAX"))?;
        let mut part = ptr::null_mut();
        check(unsafe { sys::dc_comm_split(self.as_ptr(), color, key, &mut part) })?;
        Ok((!part.is_null()).then(|| unsafe { Comm::from_raw(part) }))
    }

    /// A handle that aborts this communicator from another thread.
    pub fn abort_handle(&self) -> Abort {
        Abort(self.handle.clone())
    }

    fn counts(&self, name: &str, counts: Option<&[i64]>) -> Result<*const i64> {
        match counts {
            None => Ok(ptr::null()),
            Some(counts) if counts.len() == self.size() as usize => Ok(counts.as_ptr()),
            Some(counts) => {
                let (entries, ranks) = (counted(counts.len(), "entry", "entries"), self.size() as usize);
                let text =
                    format!("{name} has {entries}, must have one for each of {}", counted(ranks, "rank", "ranks"));
                Err(Error::new(Status::INVALID, text))
            }
        }
    }

    pub(crate) unsafe fn queue_all_gather<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        counts: Option<&[i64]>,
    ) -> Result<()> {
        let (sent, received) = ([send.len() as i64], [recv.len() as i64]);
        let mut out = view_of_mut(recv, &received);
        let counts = self.counts("counts", counts)?;
        check(sys::dc_comm_all_gather(self.as_ptr(), &view_of(send, &sent), &mut out, counts, ptr::null_mut()))
    }

    pub(crate) unsafe fn queue_reduce_scatter<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        counts: Option<&[i64]>,
        op: ReduceOp,
    ) -> Result<()> {
        let (sent, received) = ([send.len() as i64], [recv.len() as i64]);
        let mut out = view_of_mut(recv, &received);
        let (counts, op) = (self.counts("counts", counts)?, op as i32);
        check(sys::dc_comm_reduce_scatter(self.as_ptr(), &view_of(send, &sent), &mut out, counts, op, ptr::null_mut()))
    }

    /// `recv` = the ranks' `send` one after the other. `counts`: each rank's number of elements, if they differ.
    pub fn all_gather<T: Element>(&self, send: &[T], recv: &mut [T], counts: Option<&[i64]>) -> Result<()> {
        self.ensure_ungrouped("all_gather")?;
        unsafe { self.queue_all_gather(send, recv, counts) }
    }

    /// Fills `recv` with this rank's block of the sum or mean of `send` over ranks.
    pub fn reduce_scatter<T: Element>(
        &self,
        send: &[T],
        recv: &mut [T],
        counts: Option<&[i64]>,
        op: ReduceOp,
    ) -> Result<()> {
        self.ensure_ungrouped("reduce_scatter")?;
        unsafe { self.queue_reduce_scatter(send, recv, counts, op) }
    }

    /// Replaces `data` by its sum or mean over ranks.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let length = [data.len() as i64];
        let mut tensor = view_of_mut(data, &length);
        check(unsafe { sys::dc_comm_all_reduce(self.as_ptr(), &mut tensor, op as i32, ptr::null_mut()) })
    }

    /// Copies `data` of rank `root` to every rank.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: i32) -> Result<()> {
        let length = [data.len() as i64];
        let mut tensor = view_of_mut(data, &length);
        check(unsafe { sys::dc_comm_broadcast(self.as_ptr(), &mut tensor, root, ptr::null_mut()) })
    }

    /// Fills `recv` with part `rank` of each rank's `send`, in rank order. The counts are those of the parts, if they
    /// differ.
    pub fn all_to_all<T: Element>(
        &self,
        send: &[T],
        send_counts: Option<&[i64]>,
        recv: &mut [T],
        recv_counts: Option<&[i64]>,
    ) -> Result<()> {
        let (sent, received) = ([send.len() as i64], [recv.len() as i64]);
        let mut out = view_of_mut(recv, &received);
        let (to, from) = (self.counts("send_counts", send_counts)?, self.counts("recv_counts", recv_counts)?);
        check(unsafe {
            sys::dc_comm_all_to_all(self.as_ptr(), &view_of(send, &sent), to, &mut out, from, ptr::null_mut())
        })
    }

    /// Fills `recv` of rank `root` with all ranks' `send`, in rank order; other ranks pass none. `counts`: each rank's
    /// number of elements, if they differ.
    pub fn gather<T: Element>(
        &self,
        send: &[T],
        recv: Option<&mut [T]>,
        counts: Option<&[i64]>,
        root: i32,
    ) -> Result<()> {
        let sent = [send.len() as i64];
        let received = [recv.as_ref().map_or(0, |recv| recv.len()) as i64];
        let mut out = recv.map(|recv| view_of_mut(recv, &received));
        let to = out.as_mut().map_or(ptr::null_mut(), |out| out as *mut _);
        let counts = self.counts("counts", counts.filter(|_| self.rank() == root))?;
        check(unsafe { sys::dc_comm_gather(self.as_ptr(), &view_of(send, &sent), to, counts, root, ptr::null_mut()) })
    }

    /// Fills `recv` with this rank's part of rank `root`'s `send`; other ranks pass none.
    pub fn scatter<T: Element>(
        &self,
        send: Option<&[T]>,
        counts: Option<&[i64]>,
        recv: &mut [T],
        root: i32,
    ) -> Result<()> {
        let (sent, received) = ([send.map_or(0, <[T]>::len) as i64], [recv.len() as i64]);
        let whole = send.map(|send| view_of(send, &sent));
        let from = whole.as_ref().map_or(ptr::null(), |whole| whole as *const _);
        let mut out = view_of_mut(recv, &received);
        let counts = self.counts("counts", counts.filter(|_| self.rank() == root))?;
        check(unsafe { sys::dc_comm_scatter(self.as_ptr(), from, counts, &mut out, root, ptr::null_mut()) })
    }

    /// Compares checksums of all data that ranks read from each other, for debugging. Every rank must set it.
    pub fn set_checksums(&self, enable: bool) -> Result<()> {
        check(unsafe { sys::dc_comm_set_checksums(self.as_ptr(), i32::from(enable)) })
    }

    /// Waits until every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        check(unsafe { sys::dc_comm_barrier(self.as_ptr()) })
    }
}
