/* libdc: sharded training (ZeRO 0 to 3) as operators behind one stable C ABI.
 *
 * This header is the manual. Chapters:
 *
 *    1  Version and features        5  Communicators            9  The operators
 *    2  Status and errors           6  Contexts                10  The step: forward, backward, update
 *    3  Data types and tensors      7  Parameters              11  Memory, wire bytes, dry runs, traces
 *    4  Devices, streams, memory    8  Graphs                  12  The transformer layer
 *                                                              13  Second-order operators
 *                                                              14  Optimizers
 *                                                              15  The counting device
 *
 * The walk of a ZeRO-3 parameter: register its shard (7) and a graph that uses it (8); all-gather, wait, use,
 * release (9); begin a backward (10), reduce the gradient into the shard's gradient buffer, end the backward (9);
 * update the shard and say so (7, dc_context_params_updated).
 *
 * Rules that hold for every declaration below
 *   - A function that can fail returns dc_status: 0 is success, negative is an error, and dc_last_error() has a
 *     sentence that names the argument, its value and what is allowed. On failure outputs keep their old value,
 *     except handles, which become NULL. Nothing is half-done: the call happened or it did not. The exception is
 *     memory that other ranks, a device or a file were writing: its contents are undefined after an error of
 *     communication, DC_E_DEVICE or DC_E_SYSTEM.
 *   - Options structs begin with struct_size. Zero in a field means "the default"; NULL means all defaults.
 *     Where none, off or zero is a choice beside the default, -1 stands for it, as the field says. A field in which
 *     every number is one, such as a row or a descriptor, has a switch beside it, and must be 0 while the switch is.
 *     Set them by DC_X_INIT in C or dc_x_init() from another language. Output structs are sized the same way.
 *   - A function is named by its object: dc_comm_rank, dc_context_dry_run. Those of a context that the original has
 *     (DeepCompile), and their opposites, keep its names: dc_init, dc_register_param. Linear algebra and sums have the
 *     names of their mathematics. A getter that cannot fail returns its value and is called after it; one that can
 *     returns dc_status and has `get` in its name.
 *   - Handles are opaque, made by a create function and freed by one destroy function, which takes NULL and returns
 *     nothing. Handles may be destroyed in any order: children keep what they need alive.
 *     A handle that was destroyed, or one of another kind, is DC_E_INVALID, what the call returns for NULL, or no
 *     effect. That does not hold once other memory lies there: do not rely on it.
 *   - The library never prints, aborts, installs signal handlers or keeps global state. Its one fork handler, installed
 *     by the first socket, closes the copies of sockets in a child. Of the environment it reads LIBDC_CPU, which bounds
 *     the instructions it uses (dc_device_open()), for MPI LIBDC_MPI_LIB, the variables of launchers
 *     (dc_launch_get(), dc_comm_create_mpi()), and NCCL_COMM_BLOCKING, which NCCL obeys. libdc_cuda.so reads
 *     LIBDC_CUDA_LIB_DIR, a folder of NVIDIA's libraries.
 *     It never frees the caller's memory, and the caller never calls free() on the library's.
 *   - Thread classes: [any] from any thread at any time; [handle] one thread at a time for one handle (calls on
 *     one context are serialised by the library itself, so autograd threads may call).
 *   - [..., collective]: every rank of the communicator, or of the context's or the optimizer's, makes the call, in the
 *     same order among its collective calls. It may wait for other ranks, at most until the deadline.
 *   - Handles belong to the process that made them. In a child made by fork(), a call on one is DC_E_STATE, and
 *     destroying and releasing do nothing. The parent is not affected; the child may make handles of its own, but not
 *     over the parent's MPI (dc_comm_create_mpi()).
 *   - A host may trap floating-point exceptions, as feenableexcept(), -ffpe-trap and Free Pascal do. Calls mask the
 *     traps and restore the caller's environment. The library's threads have no traps, nor do the caller's functions
 *     while a call or such a thread runs them. A function that sets traps clears them before it returns.
 *   - Inputs are read during the call alone, and outputs written during it alone, except where it says so. Texts
 *     are UTF-8 and end with NUL.
 *   - A pointer to const has data that the library reads; any other has data that it writes, or fills in. const of a
 *     tensor speaks of its elements. Each tensor, and each untyped memory, says what happens to its data: it is read
 *     [in], written [out], both [in,out], or not touched [none]. [view]: the struct is filled in, and its memory is the
 *     library's.
 *   - int64_t is the type of every number of bytes, elements and entries, so that a difference can be negative. size_t
 *     is the type of sizeof alone: struct_size, the size of an array's elements, and dc_dtype_size().
 *   - An array of structs comes as the array, or arrays, then the size of an element, then the count.
 *   - Each chapter names the source of its mathematics, or says that it computes nothing.
 *
 * Arguments, where a declaration does not say otherwise
 *   context      a context; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   device       a device; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   stream       a stream; NULL: the calling thread. As the place for a new one: a handle, the caller's to destroy
 *   event        an event; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   comm         a communicator; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   buffer       a buffer; not NULL. As the place for a new one: a reference, the caller's to release
 *   options, config  read during the call; NULL = all defaults. In an init function: the struct to fill in
 *   struct_size  the caller's sizeof of the struct
 *   graph_id     a graph's number, the caller's choice
 *   id           a parameter's number, the caller's choice; the same on every rank
 *   ids, count   count numbers; ids may be NULL when count is 0
 *   token        [none] carries device and data flow in a compiler's graph: not read, may be NULL
 *   dtype        enum dc_dtype
 *   rank, world_size  this rank, 0..world_size-1, and the number of ranks, 1..1024; 1..64 that are
 *                     threads, or processes of one machine
 *   timeout_ns   the longest wait in nanoseconds; 0 = no limit; negative is DC_E_INVALID
 *   user         handed to the caller's function, not touched
 *   linalg       a handle of chapter 13; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   optimizer    an optimizer; not NULL. As the place for a new one: a handle, the caller's to destroy
 *   info, info_size  NULL, or one entry a matrix, info_size = sizeof(dc_spectral_info) apart
 *
 * "ws" is the world size, "N" a parameter's number of elements, "P = ceil(N / ws)" its shard length.
 * Sizes are elements where a name says count, numel or elements, bytes where it says bytes, and nanoseconds
 * where it ends in _ns.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef DC_API_H
#define DC_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) && !defined(DC_API)
#define DC_API __attribute__((visibility("default")))
#elif !defined(DC_API)
#define DC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 1. Version and features =======================================================================================
 *
 * Computes nothing. */

/** This header's version. */
#define DC_VERSION_MAJOR 0
#define DC_VERSION_MINOR 1
#define DC_VERSION_PATCH 0
/** major * 1000000 + minor * 1000 + patch of this header. */
#define DC_API_VERSION 1000

/** Version of the library that is loaded: major * 1000000 + minor * 1000 + patch.
 *  A binding compares it with DC_API_VERSION: same major (before 1.0: same minor too), not older. [any] Since 0.1. */
DC_API uint32_t dc_api_version(void);

/** The loaded library's version as text, "0.1.0". Static. [any] Since 0.1. */
DC_API const char *dc_version_string(void);

/** 1 if the library has a feature, else 0.
 *  name  "cpu", "comm.threads", "comm.processes", "comm.tcp", "comm.external", "comm.mpi", "avx2", "avx512",
 *        "avx512bf16", "amx" (in use: the processor and the build have it, and LIBDC_CPU allows it; see dc_device_open()); other
 *        names and NULL give 0
 *  [any] Since 0.1. */
DC_API int32_t dc_has_feature(const char *name);

/** The CRC-32C (Castagnoli) of bytes, which finds damage on disks and networks; no protection from an enemy. Source: RFC
 *  3720, appendix B.4.
 *  crc    of the bytes before these; 0: there are none
 *  data   [in] may be NULL if bytes is 0; else NULL returns crc
 *  bytes  their number; a negative one returns crc
 *  [any] Since 0.1. */
DC_API uint32_t dc_crc32c(uint32_t crc, const void *data, int64_t bytes);

/* ==== 2. Status and errors ==========================================================================================
 *
 * Computes nothing. */

/** 0 is success, negative values are errors; see dc_status_code. */
typedef int32_t dc_status;

/** The values of a dc_status. Errors are spaced, never renumbered and never reused. */
enum dc_status_code {
  DC_OK = 0,                   /**< done */
  DC_E_INVALID = -100,         /**< an argument's value is not allowed */
  DC_E_NOT_FOUND = -101,       /**< no such graph, parameter or tensor id */
  DC_E_EXISTS = -102,          /**< the id is registered already */
  DC_E_STATE = -103,           /**< the object is not in a state in which this call is legal */
  DC_E_STAGE = -104,           /**< the operator does not exist for the graph's ZeRO stage */
  DC_E_DTYPE = -105,           /**< this data type is not supported here, or types disagree */
  DC_E_SHAPE = -106,           /**< shapes or element counts disagree, or a tensor is not contiguous */
  DC_E_BUSY = -107,            /**< work is pending that this call would lose */
  DC_E_NO_MEMORY = -108,       /**< memory could not be allocated */
  DC_E_NO_DEVICE = -109,       /**< no such device on this machine or in this build */
  DC_E_UNSUPPORTED = -110,     /**< legal, but not offered by this build, device or communicator */
  DC_E_BUFFER_TOO_SMALL = -111,/**< the output array is too short; the needed length was stored */
  DC_E_NOT_FINITE = -112,      /**< a value is NaN or infinite; trying again will not help */
  DC_E_NOT_SYMMETRIC = -113,   /**< a matrix that must be symmetric is not */
  DC_E_NOT_POSITIVE = -114,    /**< a matrix that must be positive (semi)definite is not */
  DC_E_NOT_CONVERGED = -115,   /**< an iteration did not converge */
  DC_E_MISMATCH = -200,        /**< ranks called different collectives, or with different sizes */
  DC_E_TIMEOUT = -201,         /**< a rank, or a stream, was not done before the deadline */
  DC_E_PEER_DEAD = -202,       /**< a rank's process ended while others waited for it */
  DC_E_ABORTED = -203,         /**< dc_comm_abort() was called, here or on another rank */
  DC_E_CALLBACK = -204,        /**< a function of the caller's table returned an error */
  DC_E_SYSTEM = -205,          /**< the operating system refused something; the text has its reason */
  DC_E_CORRUPT = -206,         /**< what arrived from a rank is not what it sent (dc_comm_set_checksums) */
  DC_E_DEVICE = -207,          /**< the device failed: an illegal address, a lost device; the text has its word for it */
  DC_E_INTERNAL = -900         /**< a defect of libdc; please report the text */
};

/** A status's identifier, "DC_E_INVALID".
 *  status  any number; "DC_E_UNKNOWN" for one that is no status
 *  Static, never NULL. [any] Since 0.1. */
DC_API const char *dc_status_name(dc_status status);

/** A status's meaning as one sentence.
 *  status  any number
 *  Static, never NULL. [any] Since 0.1. */
DC_API const char *dc_status_string(dc_status status);

/** The text of the last call that failed on the calling thread; "" if none did yet. Kept until the next failing
 *  libdc call on this thread: read it on the thread that failed, before any other call. Never NULL; the library's.
 *  [any] Since 0.1. */
DC_API const char *dc_last_error(void);

/** Copies dc_last_error() with its closing NUL into buf. For runtimes that move between threads.
 *  buf     cap bytes, may be NULL when cap is 0
 *  cap     bytes
 *  needed  set to the length with NUL; may be NULL
 *  Returns DC_OK; DC_E_BUFFER_TOO_SMALL (needed is set, buf untouched, and the text stays what it was), DC_E_INVALID
 *  (buf is NULL, and cap would be enough).
 *  [any] Since 0.1. */
DC_API dc_status dc_last_error_copy(char *buf, int64_t cap, int64_t *needed);

/* ==== 3. Data types and tensors =====================================================================================
 *
 * Casts round to nearest, ties to even; Source: IEEE 754-2019, and its upper half of a binary32 for bfloat16. Those of
 * float64 and integers to float16 and bfloat16 go by way of float32, as PyTorch's do, and each step rounds so. */

/** Element types. Fields and arguments that hold one are int32_t. Collectives and casts take the first seven. */
enum dc_dtype {
  DC_DTYPE_NONE = 0, /**< not given: the parameter's own type */
  DC_FLOAT32 = 1,    /**< IEEE 754 binary32 */
  DC_FLOAT64 = 2,    /**< IEEE 754 binary64 */
  DC_FLOAT16 = 3,    /**< IEEE 754 binary16 */
  DC_BFLOAT16 = 4,   /**< upper half of an IEEE 754 binary32, rounded to nearest even */
  DC_INT8 = 5,       /**< one byte, two's complement, as all integers */
  DC_INT32 = 6,      /**< four bytes */
  DC_INT64 = 7,      /**< eight bytes */
  DC_UINT8 = 8,      /**< one byte, 0 to 255 */
  DC_INT16 = 9,      /**< two bytes */
  DC_BOOL = 10       /**< one byte, 0 or 1 */
};

/** Bytes of one element; 0 for a number that is no element type. [any] Since 0.1. */
DC_API size_t dc_dtype_size(int32_t dtype);

/** "float32", "bfloat16", …; "none" for 0 and "unknown" for a number that is no type. Static. [any] Since 0.1. */
DC_API const char *dc_dtype_name(int32_t dtype);

/** Memory that the library owns and counts references to: a gathered parameter, a reloaded tensor, an allocation of
 *  dc_context_alloc(). See chapter 4. */
typedef struct dc_buffer dc_buffer;

/** A view of a dense, row-major tensor; it owns nothing. As an input it describes the caller's memory, which the
 *  call reads or writes as said there. As an output, set struct_size first; the library fills in the rest. On a card
 *  data is a multiple of the element's size, else calls that compute with it, or register it, are DC_E_INVALID. */
typedef struct dc_tensor {
  size_t struct_size;     /**< sizeof(dc_tensor) */
  void *data;             /**< [in,out] first element; may be NULL only when a dimension is 0 */
  const int64_t *shape;   /**< ndim lengths, each >= 0; may be NULL when ndim is 0 (a scalar) */
  const int64_t *strides; /**< ndim strides in elements, or NULL for contiguous */
  int32_t ndim;           /**< 0 to 64 */
  int32_t dtype;          /**< enum dc_dtype, not DC_DTYPE_NONE */
  dc_buffer *buffer;      /**< outputs: the memory's owner, borrowed; NULL for the caller's own memory */
} dc_tensor;

/** A dc_tensor of no type and no data. */
#define DC_TENSOR_INIT {sizeof(dc_tensor), NULL, NULL, NULL, 0, DC_DTYPE_NONE, NULL}

/** DC_TENSOR_INIT as a function.
 *  tensor  [view] the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_tensor_init(dc_tensor *tensor, size_t struct_size);

/* ==== 4. Devices, streams, memory ===================================================================================
 *
 * Computes nothing. A device, a stream and an event are each made and destroyed by the caller; whatever was queued
 * on them is done first, and what others still need stays alive. A call on a card that failed may be DC_E_DEVICE. */

/** A compute device. The CPU is always there. */
typedef struct dc_device dc_device;
/** An in-order queue of asynchronous work on a device. On the CPU it is a worker thread. Where a call takes a
 *  dc_stream, NULL means the calling thread itself: what it did before the call is done, and waiting blocks it. */
typedef struct dc_stream dc_stream;
/** A point in a stream that others can wait for. */
typedef struct dc_event dc_event;

/** The caller's allocator for a device's memory; both functions may be called from any thread, must not call back
 *  into libdc and must not unwind. */
typedef struct dc_allocator {
  size_t struct_size;                                    /**< sizeof(dc_allocator) */
  void *(*alloc)(int64_t bytes, int64_t align, void *user); /**< NULL on failure; align is a power of two, <= 4096 */
  void (*free)(void *ptr, int64_t bytes, int64_t align, void *user); /**< bytes and align as given to alloc */
  void (*destroy_user)(void *user);                      /**< called once, when the device is gone; may be NULL */
  void *user;                                            /**< handed to every function */
} dc_allocator;

/** A dc_allocator without functions. */
#define DC_ALLOCATOR_INIT {sizeof(dc_allocator), NULL, NULL, NULL, NULL}

/** DC_ALLOCATOR_INIT as a function.
 *  allocator  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_allocator_init(dc_allocator *allocator, size_t struct_size);

/** Choices for dc_device_open(). */
typedef struct dc_device_options {
  size_t struct_size;             /**< sizeof(dc_device_options) */
  const dc_allocator *allocator;  /**< copied; NULL = the device's own (huge pages on the CPU) */
  int64_t max_pinned_bytes;       /**< most host memory that the device pins at once; 0 = half of the machine's. Pinned
                                   *   pages are lost to other programs. The CPU device pins none and only checks it */
} dc_device_options;

/** A dc_device_options with all defaults. */
#define DC_DEVICE_OPTIONS_INIT {sizeof(dc_device_options), NULL, 0}

/** DC_DEVICE_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_device_options_init(dc_device_options *options, size_t struct_size);

/** Opens a device by name. The handle is counted; contexts and streams keep the device alive. CUDA comes from
 *  libdc_cuda.so beside this library and from the NVIDIA driver, both opened here. It uses the device's primary
 *  context, as all other users of CUDA in the process do. On the CPU the process uses the widest instructions that
 *  there are. The environment's LIBDC_CPU, which is read once, bounds them: generic (plain C), avx2, avx512, avx512bf16
 *  or amx. AMX is requested from Linux. From then on a thread's own signal stack (sigaltstack) must have the system's
 *  AT_MINSIGSTKSZ bytes, which include AMX's registers. AMX is not used if a thread's stack is smaller.
 *  name  "cpu"; "cuda" or "cuda:N", the first or the N-th device; "count", which computes nothing (chapter 15)
 *  Returns DC_OK; DC_E_NO_DEVICE (unknown name, or not on this machine: the text says what is missing), DC_E_INVALID
 *  (also: max_pinned_bytes < 0, LIBDC_CPU is none of those, or an allocator for "count"), DC_E_NO_MEMORY, DC_E_DEVICE
 *  (the device or its driver refused). [any] Since 0.1. */
DC_API dc_status dc_device_open(const char *name, const dc_device_options *options, dc_device **device);
/** Gives the handle back.
 *  device  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_device_destroy(dc_device *device);
/** The name a device was opened by. Lives as long as the device; "" for NULL. [any] Since 0.1. */
DC_API const char *dc_device_name(const dc_device *device);

/** Makes a stream. Returns DC_OK; DC_E_NO_MEMORY, DC_E_SYSTEM (no thread to be had). [any] Since 0.1. */
DC_API dc_status dc_stream_create(dc_device *device, dc_stream **stream);
/** A stream that the caller made and goes on using, as PyTorch does: a CUDA device's cudaStream_t or CUstream. A
 *  function queued on it by dc_stream_call() runs on the calling thread, when the work before it is done.
 *  native  the stream, of this device; NULL is CUDA's default stream. It must live until the handle is destroyed,
 *          which waits for nothing
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY, DC_E_UNSUPPORTED (the CPU has no such streams). [any] Since 0.1. */
DC_API dc_status dc_stream_wrap(dc_device *device, void *native, dc_stream **stream);
/** Waits for queued work, then frees.
 *  stream  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_stream_destroy(dc_stream *stream);
/** Blocks until all work queued so far is done.
 *  stream  not NULL
 *  Returns DC_OK; DC_E_TIMEOUT; DC_E_INVALID (stream is NULL); DC_E_STATE (called by the stream's own work).
 *  [any] Since 0.1. */
DC_API dc_status dc_stream_synchronize(dc_stream *stream, int64_t timeout_ns);
/** Work for dc_stream_call(): runs on the stream's thread, may block it, must not unwind. It may call libdc, but
 *  not wait for its own stream. */
typedef void (*dc_stream_fn)(void *user);
/** Queues fn(user). Does not block, unless the stream's queue (256 entries) is full. The stream's own work never blocks:
 *  all that it queues runs behind it, in order, and takes memory beyond those entries. A call that finds none, and
 *  cannot say so, fails the device: every later operator on it is that error.
 *  stream  NULL: fn runs here and now
 *  fn      called once, on the stream's thread; not NULL
 *  user    must live until fn ran
 *  Returns DC_OK; DC_E_INVALID; DC_E_NO_MEMORY; DC_E_STATE (the stream is captured into a CUDA graph). [any]
 *  Since 0.1. */
DC_API dc_status dc_stream_call(dc_stream *stream, dc_stream_fn fn, void *user);

/** Makes an event; one that was never recorded counts as passed.
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_event_create(dc_device *device, dc_event **event);
/** Frees an event; work that waits for it is not disturbed.
 *  event  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_event_destroy(dc_event *event);
/** Marks the present end of a stream's queue; replaces an earlier mark.
 *  stream  of the event's device; NULL: the mark is passed at once
 *  Returns DC_OK; DC_E_INVALID (also: a stream of another device). [any] Since 0.1. */
DC_API dc_status dc_event_record(dc_event *event, dc_stream *stream);
/** Lets all later work of a stream wait for the event's latest mark.
 *  stream      of the event's device; NULL: blocks the caller
 *  timeout_ns  with stream NULL the longest wait, 0 = no limit; otherwise not used
 *  Returns DC_OK; DC_E_TIMEOUT; DC_E_INVALID (also: a stream of another device); DC_E_NO_MEMORY; DC_E_STATE (called by
 *  the work that the event waits for, or the mark is one of a capture, which the host cannot wait for; or a failed
 *  capture refused the mark). [any] Since 0.1. */
DC_API dc_status dc_event_wait(dc_event *event, dc_stream *stream, int64_t timeout_ns);
/** Stores whether the event's latest mark has passed.
 *  passed  set to 1 or 0; to 0 with DC_E_DEVICE too
 *  Returns DC_OK; DC_E_INVALID; DC_E_DEVICE (the device failed before the mark passed, which it may still do). [any]
 *  Since 0.1. */
DC_API dc_status dc_event_query(dc_event *event, int32_t *passed);

/** One more reference to a buffer. Returns its argument.
 *  buffer  NULL does nothing
 *  [any] Since 0.1. */
DC_API dc_buffer *dc_buffer_retain(dc_buffer *buffer);
/** Drops a reference; the memory goes back when none is left.
 *  buffer  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_buffer_release(dc_buffer *buffer);
/** First byte, 256-byte aligned. NULL once the library has taken the memory back (dc_release_param), and for NULL.
 *  The memory is the buffer's. [any] Since 0.1. */
DC_API void *dc_buffer_data(const dc_buffer *buffer);
/** Usable bytes of a buffer; 0 for NULL. [any] Since 0.1. */
DC_API int64_t dc_buffer_bytes(const dc_buffer *buffer);

/* ==== 5. Communicators ==============================================================================================
 *
 * Ranks meet in collectives: every rank calls the same ones in the same order. Source: the reductions are those of the
 * Message Passing Interface standard (MPI 4.1, chapter 6), with a fixed order of additions. */

/** A group of ranks that call the same collectives in the same order. Every wait ends: with the result, at the
 *  deadline, when a peer's process dies, or after an abort. Then each rank gets the same error, which names the
 *  operator, the parameter and the rank, and the communicator refuses further work. A deadline's error names the ranks
 *  that are the reason, not those that are held up by them. The caller's own functions are the exception:
 *  dc_comm_create_external() says what ends a wait in them.
 *  Ranks may wait for each other in different calls of a communicator and its copies: one in dc_comm_barrier(), say,
 *  and another in a gather of a context on it. They get DC_E_MISMATCH after a second or two, and the text names both
 *  calls. That is found if, on two such ranks, one thread alone has made and used both communicators, and waits. A
 *  thread that never used them is not expected to take over. All other such waits end at the deadline. */
typedef struct dc_comm dc_comm;

/** Choices for communicators. */
typedef struct dc_comm_options {
  size_t struct_size;   /**< sizeof(dc_comm_options) */
  int64_t timeout_ns;   /**< longest wait for another rank; 0 = 300 s */
  int64_t heap_bytes;   /**< most shared memory a rank may allocate; 0 = the machine's memory. Reserved, not used up */
  const char *secret;   /**< TCP: 16 to 1024 bytes that the group's ranks alone have; NULL = none, loopback only */
  const char *network;  /**< TCP, MPI: where to listen, an interface's name or a CIDR, at most 63 bytes; NULL = all the
                             machine's addresses */
  int64_t heartbeat_ns; /**< TCP, MPI: pause between heartbeats, 10 ms or more; 0 = 1 s. A machine silent for three, and
                             3 s, is dead */
  int32_t first_port;   /**< TCP, MPI: the listeners of other ranks than 0, and of MPI's rank 0, take ports from
                             first_port ... */
  int32_t last_port;    /**< ... to last_port, at most 65535; both 0 = any */
  const char *node;     /**< TCP, MPI: a text that the ranks of one machine have in common, at most 255 bytes; NULL =
                             the machine's boot and network namespace; "" = this rank shares memory with no other */
  int32_t tls;          /**< TCP: 1 = TLS 1.3 between the ranks, which needs a secret; 0 = data are not encrypted */
  int32_t reserved0;    /**< 0 */
} dc_comm_options;

/** A dc_comm_options with all defaults. */
#define DC_COMM_OPTIONS_INIT {sizeof(dc_comm_options), 0, 0, NULL, NULL, 0, 0, 0, NULL, 0, 0}

/** DC_COMM_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_comm_options_init(dc_comm_options *options, size_t struct_size);

/** Ranks as threads of this process: makes world_size communicators at once, one for each thread to use.
 *  They read each other's memory in place: the host's, or that of one card or of several that have peer access to each
 *  other. A collective of cards without peer access is DC_E_UNSUPPORTED, and so is one of a card's memory to which its
 *  allocator gives other cards no access. dc_comm_create_nccl() needs neither.
 *  comms   array of world_size handles; rank r is comms[r]; each is destroyed on its own
 *  Returns DC_OK; DC_E_INVALID (world_size not in 1..64), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_comm_create_threads(int32_t world_size, const dc_comm_options *options, dc_comm **comms);

/** Ranks as processes of this machine, over shared memory. Collective: blocks until all ranks have come, at most
 *  timeout_ns. Nothing is left behind in the file system, however a rank ends.
 *  name    the group's name, the same on every rank and unlike any other group's; 1..80 bytes
 *  Returns DC_OK; DC_E_INVALID (rank not in 0..world_size-1, world_size not in 1..64), DC_E_EXISTS (the rank or the
 *  name is taken), DC_E_MISMATCH (world sizes differ), DC_E_TIMEOUT, DC_E_PEER_DEAD (a rank ended meanwhile),
 *  DC_E_SYSTEM, DC_E_NO_MEMORY. [any, collective] Since 0.1. */
DC_API dc_status dc_comm_create_processes(const char *name, int32_t rank, int32_t world_size,
                                          const dc_comm_options *options, dc_comm **comm);

/** Ranks as processes, or threads, of any machines, over TCP. Collective: blocks until all ranks have come, at most
 *  timeout_ns, and so does its dc_comm_dup(). Rank 0 listens at the address's port. The others listen on a port of their
 *  own, at the address from which they reach rank 0, and tell rank 0 so; every rank connects to every other one.
 *  options.network and the range of ports bound that. Listeners close when the group is complete; dc_comm_dup() opens
 *  others while it runs. Every connection begins with a proof, by HMAC-SHA-256 and in both directions, that its ends
 *  have options.secret. Without a secret all addresses must be loopback, where every user of the machine can join. Later
 *  data are neither encrypted nor signed, unless options.tls is 1 on all ranks (docs/security.md). Then a handshake of
 *  TLS 1.3 follows the proof (RFC 8446: TLS_AES_128_GCM_SHA256 with a pre-shared key and ephemeral Diffie-Hellman). The
 *  connections with which the ranks meet stay outside: they carry addresses alone. OpenSSL's libssl.so.3 is opened here.
 *  Bytes that change on the way are DC_E_CORRUPT then, or DC_E_PEER_DEAD on the connection with the heartbeats. TLS
 *  covers what goes over TCP: not what NCCL or MPI move between these ranks.
 *  Ranks send heartbeats. A machine that answers none for three is DC_E_PEER_DEAD on all others, whatever the deadline.
 *  It answers as long as it acknowledges data, too. Where a slow link's queue keeps bytes for longer than four
 *  heartbeats, heartbeat_ns has to be longer.
 *  Bits are those of every other transport. A collective's deadline runs while nothing moves. symmetric_memory needs
 *  shared memory, which these ranks do not have. All machines must have one byte order.
 *  Ranks of several machines move larger data in two levels, if the machines have blocks of 2^k ranks that follow each
 *  other. Ranks of a block give each other data over shared memory. Between machines each byte of a gather goes once,
 *  and of a reduction the sum of a block. The bits are the same. dc_optimizer_stats.wire_bytes then counts what comes
 *  over the network alone; the wire bytes of dc_memory_stats and dc_op_info stay those of the direct exchange.
 *  options.node overrides which ranks share a machine.
 *  Up to 64 ranks have a connection between any two, and listen only while a communicator is made. More ranks connect
 *  when a collective first needs it, and listen as long as the group lives. Small collectives take log2(ranks)
 *  connections; one of much data takes all.
 *  At a deadline the ranks query each other for those that are late, and before any error they agree on one for all.
 *  That takes one message, or at most 3 s where a rank does not answer, being stopped or cut off; of more than 64, 4 s.
 *  Ranks that cannot reach each other at all name those that they lack. A data connection that breaks though its rank
 *  lives is DC_E_SYSTEM; the text names both ranks and the system's error. If the connection breaks that carries
 *  heartbeats, it is DC_E_PEER_DEAD on both ranks 0.3 s later, even while data move. Texts of other machines are shown
 *  without control characters.
 *  address  "HOST:PORT" or "[ADDRESS]:PORT", the same on every rank: where rank 0 is, as all of them reach it
 *  name     the group's name, the same on every rank and unlike any other group's; 1..80 bytes
 *  options  heap_bytes is not used; NULL = defaults
 *  Returns DC_OK; DC_E_INVALID (rank not in 0..world_size-1, world_size not in 1..1024, an address of another form, or
 *  not loopback without a secret, or TLS without one), DC_E_EXISTS (the rank or the port is taken, or a group of another
 *  name, secret or run is there), DC_E_MISMATCH (world sizes or versions differ, or one rank has a secret or TLS and
 *  another none), DC_E_UNSUPPORTED (TLS without libssl.so.3), DC_E_TIMEOUT, DC_E_PEER_DEAD (a rank ended meanwhile),
 *  DC_E_SYSTEM (no such host, say), DC_E_NO_MEMORY.
 *  [any, collective] Since 0.1. */
DC_API dc_status dc_comm_create_tcp(const char *address, const char *name, int32_t rank, int32_t world_size,
                                    const dc_comm_options *options, dc_comm **comm);

/** The caller's collectives, for a transport that libdc does not have (torch.distributed, say). Each function
 *  blocks until done and returns 0 or an error number. It runs on one of libdc's stream threads or the caller's, may
 *  call nothing of libdc but dc_dtype_size(), and must not unwind. Counts are elements of dtype. */
typedef struct dc_comm_callbacks {
  size_t struct_size; /**< sizeof(dc_comm_callbacks) */
  /** recv (ws * count) = every rank's send (count) in rank order. Never in place. */
  int32_t (*all_gather)(const void *send, void *recv, int64_t count, int32_t dtype, void *user);
  /** recv (count) = sum over ranks of block `rank` of send (ws * count). Never in place. */
  int32_t (*reduce_scatter)(const void *send, void *recv, int64_t count, int32_t dtype, void *user);
  /** data (bytes) of rank root to every rank. */
  int32_t (*broadcast)(void *data, int64_t bytes, int32_t root, void *user);
  /** Returns after every rank has called. */
  int32_t (*barrier)(void *user);
  /** Makes an independent group of the same ranks. NULL: gathers and reductions share one stream, and only one context
   *  at a time can be initialised with the communicator, beside which the caller must not use it. */
  int32_t (*dup)(void *user, void **new_user);
  /** Makes blocked calls return an error, on other ranks too if it can. Called at the deadline and by dc_comm_abort(), on
   *  another thread. Also called when this rank alone cannot go on with a collective, for which the others may wait.
   *  libdc starts no collective function after it. One that has just begun may not block yet, so the effect should be
   *  sticky: calls that block later return an error, too. May be NULL. */
  void (*abort)(void *user);
  /** Called once for each user pointer when its communicator is destroyed. May be NULL. */
  void (*destroy_user)(void *user);
  void *user; /**< handed to every function */
  /** For dc_comm_split(): makes a group of `count` ranks of this one, of which this rank is one, in this order. Every
   *  rank calls it; one in no part with count = 0, for which *new_user stays NULL. NULL: dc_comm_split() is
   *  DC_E_UNSUPPORTED. */
  int32_t (*split)(const int32_t *ranks, int32_t count, void *user, void **new_user);
  /** send has send_counts[r] elements for rank r, one part behind the other, and recv gets recv_counts[r] from it. With
   *  this function libdc adds itself: the bits are those of every other transport, 16-bit types are sent as they are,
   *  nothing is padded, and reduce_scatter may be NULL. NULL: reductions go through reduce_scatter, and an all-to-all
   *  gathers all that any rank sends. Never in place. */
  int32_t (*all_to_all)(const void *send, const int64_t *send_counts, void *recv, const int64_t *recv_counts,
                        int32_t dtype, void *user);
} dc_comm_callbacks;

/** A dc_comm_callbacks without functions. */
#define DC_COMM_CALLBACKS_INIT {sizeof(dc_comm_callbacks), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/** DC_COMM_CALLBACKS_INIT as a function.
 *  callbacks  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_comm_callbacks_init(dc_comm_callbacks *callbacks, size_t struct_size);

/** A communicator over the caller's collectives. options.timeout_ns is the longest time that a function may take. After
 *  it the communicator and its copies fail with DC_E_TIMEOUT on this rank, abort is called, and the function's later
 *  result is not used. libdc cannot end a function itself: one that does not return, with or without an abort, blocks
 *  its caller for ever. A function, dup and split included, that calls a collective of its own communicator makes that
 *  fail with DC_E_STATE, and the communicator with it. The tables of all ranks have the same functions, but for abort
 *  and destroy_user. Each collective compares them; a difference is DC_E_MISMATCH.
 *  libdc has no other way to reach the ranks, so it does not find ranks that wait for each other in different calls;
 *  the timeout ends them.
 *  callbacks  the table, which is copied; its user pointer must live until destroy_user
 *  Returns DC_OK; DC_E_INVALID (one of all_gather, broadcast, barrier is NULL, or both of reduce_scatter and
 *  all_to_all), DC_E_SYSTEM (no thread for the deadline), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world_size,
                                         const dc_comm_options *options, dc_comm **comm);

/** The same ranks, each on a card of its own: a communicator that moves a device's memory through NVIDIA's NCCL, 2.19
 *  or later. libnccl.so.2 is opened here, from the first of these that has it: the folder of the environment's
 *  LIBDC_CUDA_LIB_DIR, the process, the system, the wheel nvidia-nccl beside this library. The ranks meet and compare
 *  their calls over a copy of comm, which also carries the host's own data. Collective: blocks until all ranks have
 *  come, at most comm's timeout_ns, and so does its dc_comm_dup(). dc_init() makes one where the device needs it. Bits
 *  are those of every other transport, since NCCL moves the data and the device adds it. The environment's
 *  NCCL_COMM_BLOCKING must be 0 or not be set: with 1 NCCL would block without a deadline.
 *  Collectives are work of their stream, which no host waits for. On a stream of dc_stream_wrap() a call blocks until
 *  the ranks' hosts have met; on other streams it does not. Those of one communicator follow each other also on several
 *  streams. The deadline runs from the moment when the stream reaches a collective; dc_comm_check() returns a failure
 *  of work under way.
 *  comm    the ranks, of one machine or several; it stays the caller's. The caller's own collectives without dup are
 *          shared with the new communicator, and must not be used beside it
 *  device  "cuda" or "cuda:N", this rank's
 *  nccl    the new handle, the caller's to destroy
 *  Returns DC_OK; DC_E_UNSUPPORTED (a rank has no NCCL that can be used; the text says which and why, the device is
 *  no card, or comm has more than 256 ranks), DC_E_MISMATCH (versions of NCCL differ), DC_E_INVALID (also this rank's
 *  NCCL_COMM_BLOCKING), and after an abort of the group what NCCL failed with: DC_E_TIMEOUT, DC_E_PEER_DEAD,
 *  DC_E_DEVICE, DC_E_SYSTEM. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_create_nccl(dc_comm *comm, dc_device *device, dc_comm **nccl);
/** The version of the NCCL that dc_comm_create_nccl() would use here: major * 10000 + minor * 100 + patch.
 *  version  set to it
 *  Returns DC_OK; DC_E_UNSUPPORTED (there is none, or it is too old; the text says so), DC_E_INVALID.
 *  [any] Since 0.1. */
DC_API dc_status dc_nccl_get_version(int32_t *version);

/** Ranks as the processes that a launcher of MPI started (mpirun, mpiexec, srun --mpi): those of MPI_COMM_WORLD. MPI
 *  moves their data, over InfiniBand, Slingshot or other networks that it knows. Collective: blocks until all ranks have
 *  come, at most timeout_ns, and so does its dc_comm_dup().
 *  MPI's library is opened here. The environment's LIBDC_MPI_LIB may name it, or the process has one already. Else it is
 *  the first that loads of libmpi.so.40 (Open MPI), libmpi_abi.so.1 (the standard's ABI), libmpi.so.12 and libmpich.so.12
 *  (MPICH). Where Open MPI's launcher did not start the process, libmpi.so.40 is last. A
 *  library that does not fit the launcher is an error, and is not initialised.
 *  Bits are those of every other transport: MPI moves bytes and libdc adds them. Ranks compare their calls by short
 *  messages of MPI. They find missing and dead ranks over TCP connections of libdc's own, so errors and their texts are
 *  those of dc_comm_create_tcp(). MPI tells the ranks where rank 0 listens, and a secret. wire_bytes does not count the
 *  messages by which ranks compare a collective's calls. The deadline runs while ranks are missing, and anew for each 2 GiB that
 *  MPI moves. The memory is the host's; for a card's see dc_comm_create_nccl(), on this one.
 *  libdc initialises MPI with MPI_THREAD_MULTIPLE, unless the caller has. Only then libdc finalizes it, at exit(), once
 *  all ranks have come there. It does not after a collective was given up or while a rank is dead, and mpirun reports
 *  an irregular exit. Most launchers end all processes as soon as one dies, and MPICH over UCX may end a survivor itself.
 *  dc_comm_split() calls MPI_Comm_split once all ranks have met, on a thread of its own.
 *  A collective that fails while MPI moves its data cannot be taken back, and neither can a split. MPI may write to its
 *  memory for as long as the process lives. So after DC_E_TIMEOUT or DC_E_PEER_DEAD the process should end; further
 *  communicators over MPI are DC_E_STATE in it.
 *  MPI belongs to the process that initialised it. In a child made by fork() this call is DC_E_STATE, and leaves the
 *  parent's MPI alone. Where the caller initialised MPI, libdc knows its process from the first call there.
 *  options  timeout_ns and node; network, first_port, last_port and heartbeat_ns for the TCP connections; NULL =
 *           defaults. tls must be 0, since libdc cannot encrypt what MPI moves.
 *           Without network rank 0 is found at loopback if all ranks are on its machine, else at the address from which
 *           its machine sends
 *  comm     the new handle, the caller's to destroy
 *  Returns DC_OK; DC_E_UNSUPPORTED (there is no MPI, no launcher or that of another MPI, a thread level below
 *  MPI_THREAD_MULTIPLE, or more than 1024 ranks), DC_E_STATE (MPI has been finalized, belongs to the process that
 *  forked this one, or a collective was given up before), DC_E_MISMATCH (MPI has another number of ranks than the
 *  launcher started), DC_E_INVALID, and the errors of dc_comm_create_tcp(). [any, collective] Since 0.1. */
DC_API dc_status dc_comm_create_mpi(const dc_comm_options *options, dc_comm **comm);
/** The MPI that dc_comm_create_mpi() would use here, as a text: "MPICH Version: 4.0.2, by the ABI of MPICH,
 *  libmpich.so.12". Opens the library, and initialises nothing.
 *  version  set to the text, which stays; NULL on an error
 *  Returns DC_OK; DC_E_UNSUPPORTED (there is none; the text says so), DC_E_INVALID. [any] Since 0.1. */
DC_API dc_status dc_mpi_get_version(const char **version);

/** A process's place among the ranks, as its launcher says in the environment. */
typedef struct dc_launch {
  size_t struct_size;   /**< sizeof(dc_launch) */
  const char *launcher; /**< "environment", "openmpi", "pmi", "slurm", "flux", or "none" for a process started alone */
  const char *address;  /**< "HOST:PORT" for dc_comm_create_tcp(); NULL: the launcher does not say */
  const char *group;    /**< a name that no other group has, at most 64 bytes; NULL: the launcher does not say */
  int32_t rank;         /**< 0..world_size-1 */
  int32_t world_size;   /**< >= 1 */
  int32_t local_rank;   /**< among the ranks of this machine; -1: the launcher does not say */
  int32_t local_size;   /**< ranks of this machine; 0: the launcher does not say */
  int32_t node;         /**< this machine, from 0; -1: the launcher does not say */
  int32_t uses_mpi;     /**< 1: the launcher can start MPI, and dc_comm_create_mpi() is meant */
} dc_launch;

/** A dc_launch to be filled in. */
#define DC_LAUNCH_INIT {sizeof(dc_launch), NULL, NULL, NULL, 0, 0, 0, 0, 0, 0}

/** DC_LAUNCH_INIT as a function.
 *  launch  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_launch_init(dc_launch *launch, size_t struct_size);

/** Reads the environment for the launcher that started this process: the first in this order whose number of ranks is
 *  there. A number of 1 without a rank counts only if no later one has both. LIBDC_LAUNCHER names another one; "slurm"
 *  and "flux" then have uses_mpi = 0.
 *    environment  WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK: torchrun, python -m libdc.run, Kubernetes
 *    openmpi      OMPI_COMM_WORLD_SIZE, _RANK, _LOCAL_RANK, _LOCAL_SIZE: Open MPI's mpirun
 *    pmi          PMI_SIZE, PMI_RANK, MPI_LOCALRANKID, MPI_LOCALNRANKS: MPICH's and Intel's; where Slurm or Flux gives
 *                 the same numbers it is that one
 *    slurm        SLURM_STEP_NUM_TASKS, SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID: srun
 *    flux         FLUX_JOB_SIZE, FLUX_TASK_RANK, FLUX_TASK_LOCAL_ID: flux run
 *  The address is MASTER_ADDR with the port after MASTER_PORT, or the first of SLURM_STEP_NODELIST with a port of
 *  61440..65439 by the job's number. The group is LIBDC_GROUP, or made of the job's or the meeting's variables. Under
 *  Slurm and Flux uses_mpi says that PMI_RANK or PMIX_RANK is there. Variables that are empty count as not set.
 *  launch  filled in; struct_size is set by the caller. Its texts live until this thread's next call
 *  Returns DC_OK; DC_E_INVALID (a variable's value is no number in its bounds, numbers disagree, or a rank or
 *  LIBDC_LAUNCHER's launcher is missing; the text names the variable). [any] Since 0.1. */
DC_API dc_status dc_launch_get(dc_launch *launch);

/** Gives the handle back; contexts that use the communicator keep it alive. Not collective. Destroy CUDA graphs that
 *  captured its collectives before: NCCL holds on to them. Otherwise its end takes up to 15 s, and NCCL's memory stays
 *  until they are gone. The same may be so while other ranks of the machine keep theirs over NCCL. Their cards may read
 *  this process's memory until then, so let it live as long.
 *  comm  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_comm_destroy(dc_comm *comm);
/** This rank, 0..size-1; -1 for NULL. [any] Since 0.1. */
DC_API int32_t dc_comm_rank(const dc_comm *comm);
/** Number of ranks; -1 for NULL. [any] Since 0.1. */
DC_API int32_t dc_comm_size(const dc_comm *comm);

/** Another communicator of the same ranks, whose collectives overlap this one's. All ranks must make a group's copies in
 *  the same order, also copies of several of its communicators by several threads. The n-th copies of all ranks belong
 *  together, and the first collective of copies whose originals differ is DC_E_MISMATCH.
 *  A group may have any number of them, and destroying one takes no other rank.
 *  Threads and processes of one machine do not wait for others to come, only while another rank makes or destroys a
 *  copy, at most timeout_ns. Over TCP the ranks meet at listeners that they open meanwhile, so each waits for all others,
 *  at most timeout_ns. A rank that is dead or does not come is an error for all. Each copy over TCP has a connection, and
 *  so a descriptor, to every other rank. NCCL also waits for all ranks.
 *  copy  the new handle, the caller's to destroy
 *  Returns DC_OK; DC_E_UNSUPPORTED (external without dup), DC_E_NO_MEMORY, DC_E_SYSTEM (no more descriptors),
 *  DC_E_INVALID, DC_E_CALLBACK, DC_E_TIMEOUT, DC_E_PEER_DEAD; over TCP, MPI and NCCL also DC_E_ABORTED, DC_E_EXISTS
 *  (two connections say that they are one rank's); and what dc_comm_check() returns, of a failure before.
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_dup(dc_comm *comm, dc_comm **copy);

/** Divides the ranks: those with one color get a communicator of their own, in which they are ordered by key, and by
 *  their rank in comm where keys are equal. Collective over comm, for ranks without a color too. It may be used as any
 *  other: copied, split again, given to contexts. Its ranks are a group of their own: they fail together, and neither
 *  with comm nor with other parts. Waits for each other across communicators of different groups end at the deadline.
 *  The transport is comm's, and so are timeout_ns, secret, network and ports. Over TCP a part's rank 0 listens until its
 *  ranks have met. On NCCL each part is a new communicator of NCCL, on the same devices. Over MPI it is one of
 *  MPI_Comm_split. Source: the Message Passing Interface standard (MPI 4.1, section 7.4.2).
 *  color  >= 0; -1: this rank is in no part
 *  key    any
 *  part   the new handle, the caller's to destroy; NULL if color is -1
 *  Returns DC_OK; DC_E_UNSUPPORTED (the caller's collectives without split), DC_E_INVALID, DC_E_NO_MEMORY, DC_E_SYSTEM,
 *  DC_E_CALLBACK, and the errors of dc_comm_all_gather and of the function that made comm. An error of one rank is one
 *  of all. comm stays usable unless it has failed itself, as dc_comm_check() says. It may have at a deadline, where a
 *  rank dies, aborts or has no memory, and over MPI and NCCL at other errors too.
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_split(dc_comm *comm, int32_t color, int32_t key, dc_comm **part);

/** How reductions combine ranks. */
enum dc_reduce_op {
  DC_SUM = 1, /**< the sum, in order */
  DC_MEAN = 2 /**< the sum, in order, then one division by the world size */
};

/** All-gather: recv = the ranks' send tensors one after the other, in rank order.
 *  send    [in] contiguous, count_r elements on rank r; counts may differ and be 0
 *  recv    [out] contiguous, sum of the counts elements; same dtype
 *  counts  ws element counts, or NULL when all are send's; the ranks must agree on them, which the library compares
 *  stream  where the work runs; NULL: on the calling thread, which blocks until done. A CUDA stream that is captured
 *          into a graph: on NCCL alone (else DC_E_UNSUPPORTED), as in dc_context_set_stream()
 *  The caller orders calls of one communicator on several streams, or on a stream and on none, by events or a wait. Where
 *  a rank runs them in another order than it called them, and others do not, that is DC_E_MISMATCH.
 *  send may be reused, and recv read, when the work is done on every rank; send may lie inside recv at its place.
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE, DC_E_UNSUPPORTED (a stream's device whose memory the ranks
 *  cannot exchange), DC_E_NO_MEMORY, and what dc_comm_check() may return: DC_E_MISMATCH, DC_E_TIMEOUT, DC_E_PEER_DEAD,
 *  DC_E_ABORTED (stream NULL: of this collective; otherwise of an earlier one).
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_all_gather(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts,
                                    dc_stream *stream);

/** Reduce-scatter: recv = this rank's block of the sum (or mean) over ranks of send.
 *  The order of additions is fixed: a binary tree over ranks, ((0+1)+(2+3))+…, in float32 for 16-bit types and in
 *  the type itself otherwise. So the bits depend on nothing but the values and the world size.
 *
 *      recv[j] = sum_r send_r[offset + j]      j = 0 … counts[rank] - 1, offset = sum of the counts before rank
 *
 *  send    [in] contiguous, sum of the counts elements
 *  recv    [out] contiguous, counts[rank] elements of the same dtype; must not overlap send
 *  counts  as in dc_comm_all_gather; NULL when all are recv's
 *  op      enum dc_reduce_op; integers take DC_SUM only
 *  stream  as in dc_comm_all_gather
 *  Errors as dc_comm_all_gather. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_reduce_scatter(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts,
                                        int32_t op, dc_stream *stream);

/** All-reduce in place: data = the sum (or mean) over ranks, the same bits as dc_comm_reduce_scatter.
 *  data    [in,out] contiguous, as many elements on every rank
 *  op      enum dc_reduce_op; integers take DC_SUM only
 *  stream  as in dc_comm_all_gather
 *  Errors as dc_comm_all_gather; DC_E_STATE (a group is open). [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_all_reduce(dc_comm *comm, dc_tensor *data, int32_t op, dc_stream *stream);

/** Broadcast: data of rank root to every rank's data.
 *  data    [in,out] contiguous, as many elements on every rank
 *  root    0..size-1, the same on every rank
 *  stream  as in dc_comm_all_gather
 *  Errors as dc_comm_all_reduce. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_broadcast(dc_comm *comm, dc_tensor *data, int32_t root, dc_stream *stream);

/** All-to-all: every rank gets a part of each rank's send, in rank order.
 *
 *      part s of recv on rank r = part r of send on rank s
 *
 *  Ranks compare what they expect with what the others send. A difference is DC_E_MISMATCH for the group, whose text
 *  names both ranks; over TCP a rank whose own parts have come may learn of it at its next call.
 *  Source: MPI_Alltoallv of the Message Passing Interface standard (MPI 4.1, section 6.8).
 *  send         [in] contiguous, sum of the send_counts elements: the parts for all ranks, in rank order
 *  send_counts  ws element counts, which may differ and be 0; NULL: all are alike, send's elements divided by ws
 *  recv         [out] contiguous, sum of the recv_counts elements of the same dtype; must not overlap send
 *  recv_counts  ws element counts, recv_counts[s] of what rank s sends to this rank; NULL: all are alike
 *  stream       as in dc_comm_all_gather
 *  Errors as dc_comm_all_reduce. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_all_to_all(dc_comm *comm, const dc_tensor *send, const int64_t *send_counts, dc_tensor *recv,
                                    const int64_t *recv_counts, dc_stream *stream);

/** Gather: recv of rank root = the ranks' send tensors one after the other, in rank order. Ranks compare what they send
 *  with what the root expects, as in dc_comm_all_to_all(). Source: MPI_Gatherv (MPI 4.1, section 6.5).
 *  send    [in] contiguous, count_r elements on rank r, which may differ and be 0
 *  recv    [out] on the root: contiguous, sum of the counts elements of the same dtype; must not overlap send. Elsewhere
 *          it is not read, and may be NULL
 *  counts  on the root: ws element counts; NULL: all are alike. Elsewhere it is not read
 *  root    0..size-1, the same on every rank
 *  stream  as in dc_comm_all_gather
 *  Errors as dc_comm_all_reduce. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_gather(dc_comm *comm, const dc_tensor *send, dc_tensor *recv, const int64_t *counts,
                                int32_t root, dc_stream *stream);

/** Scatter: recv = this rank's part of rank root's send, in rank order. Ranks compare what they expect with what the
 *  root sends, as in dc_comm_all_to_all(). Source: MPI_Scatterv (MPI 4.1, section 6.6).
 *  send    [in] on the root: contiguous, sum of the counts elements. Elsewhere it is not read, and may be NULL
 *  counts  on the root: ws element counts, which may differ and be 0; NULL: all are alike. Elsewhere it is not read
 *  recv    [out] contiguous, counts[rank] elements of the same dtype; must not overlap send
 *  root    0..size-1, the same on every rank
 *  stream  as in dc_comm_all_gather
 *  Errors as dc_comm_all_reduce. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_scatter(dc_comm *comm, const dc_tensor *send, const int64_t *counts, dc_tensor *recv,
                                 int32_t root, dc_stream *stream);

/** Blocks the caller until every rank has called. Errors as dc_comm_all_reduce. [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_barrier(dc_comm *comm);

/** Opens a group: all-gathers and reduce-scatters queued on the communicator until dc_comm_group_end() start as
 *  one, with one handshake between the ranks. Groups do not nest.
 *  Returns DC_OK; DC_E_STATE (a group is open), DC_E_NO_MEMORY, and what dc_comm_check() returns.
 *  [handle] Since 0.1. */
DC_API dc_status dc_comm_group_begin(dc_comm *comm);
/** Starts the group on a stream. All members must be of one kind and have been given the same stream. After an error
 *  the group is closed and none of it happened.
 *  stream  where the group runs; NULL: blocks until done
 *  Errors as dc_comm_all_gather; DC_E_STATE (no group open). [handle, collective] Since 0.1. */
DC_API dc_status dc_comm_group_end(dc_comm *comm, dc_stream *stream);

/** Makes every present and future collective of the group fail with DC_E_ABORTED, on every rank.
 *  comm    NULL does nothing
 *  reason  a sentence for the other ranks' error text, copied; may be NULL
 *  [any] Since 0.1. */
DC_API void dc_comm_abort(dc_comm *comm, const char *reason);

/** Turns checksums on (1) or off (0), for debugging. From its next collective on, this rank offers a checksum of the
 *  data that peers read from it, and verifies data from ranks that do the same. It holds for every copy of the
 *  communicator, those of contexts too; set it on every rank. Memory that is overwritten while peers read it, or that
 *  arrives changed, is then DC_E_CORRUPT on every rank, whose text names both ranks, the operator, the parameter and
 *  the elements. All data that moves is read twice more. Source: FNV-1a (Fowler, Noll, Vo), over words.
 *  Over TCP a CRC-32C follows each rank's call and data, computed while they move. The text names both ranks and the
 *  operator. A reduction verifies its inputs before it adds them. docs/architecture-transports.md has the cost.
 *  enable  1 or 0; else DC_E_INVALID
 *  Returns DC_OK; DC_E_INVALID, DC_E_UNSUPPORTED (external, NCCL, and MPI, also where it is one of two levels).
 *  [handle] Since 0.1. */
DC_API dc_status dc_comm_set_checksums(dc_comm *comm, int32_t enable);

/** Whether the communicator still works: DC_OK, or the first failure of its group, with its text in dc_last_error().
 *  Returns DC_OK; DC_E_INVALID, DC_E_MISMATCH, DC_E_TIMEOUT, DC_E_PEER_DEAD, DC_E_ABORTED, DC_E_CALLBACK,
 *  DC_E_SYSTEM (a connection broke), DC_E_CORRUPT, DC_E_STATE (a function of the caller's called its own communicator),
 *  and where one rank could not go on its reason: DC_E_NO_MEMORY, DC_E_DEVICE, DC_E_UNSUPPORTED or DC_E_EXISTS.
 *  [any] Since 0.1. */
DC_API dc_status dc_comm_check(dc_comm *comm);

/* ==== 6. Contexts ===================================================================================================
 *
 * Computes nothing. */

/** One training run on one rank: its parameters, graphs, buffers and streams. Contexts share nothing. */
typedef struct dc_context dc_context;

/** Severity of a log line. */
enum dc_log_level {
  DC_LOG_ERROR = 1,   /**< something failed that no call could return */
  DC_LOG_WARNING = 2, /**< the caller probably did not mean this */
  DC_LOG_INFO = 3     /**< what is worth knowing once */
};
/** Gets finished lines without a newline; called on the thread that did the work; must not call libdc. */
typedef void (*dc_log_fn)(int32_t level, const char *message, void *user);

/** Choices for dc_context_create(). */
typedef struct dc_context_options {
  size_t struct_size; /**< sizeof(dc_context_options) */
  dc_log_fn log;      /**< NULL = no logging */
  void *log_user;     /**< handed to log */
} dc_context_options;

/** A dc_context_options with all defaults. */
#define DC_CONTEXT_OPTIONS_INIT {sizeof(dc_context_options), NULL, NULL}

/** DC_CONTEXT_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_context_options_init(dc_context_options *options, size_t struct_size);

/** Makes a context on a device, which it keeps alive. Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_context_create(dc_device *device, const dc_context_options *options, dc_context **context);
/** Cleans up (dc_cleanup) and frees. Buffers that the caller still holds stay readable until released. Graphs that
 *  captured steps of several ranks are destroyed before, as for dc_comm_destroy().
 *  context  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_context_destroy(dc_context *context);

/** The `compile` keys of the original, each with a meaning on every device. */
typedef struct dc_config {
  size_t struct_size;                /**< sizeof(dc_config) */
  int32_t symmetric_memory;          /**< 1: peers read shards in place, so each shard must lie in memory that they
                                          can read (dc_context_alloc, or any with thread ranks); 0 = default: shards
                                          are staged through libdc's own shared memory. On NCCL 1 registers the
                                          memory of gathers, from 2.27 on as windows. Gathers use windows where memory
                                          lies alike on all ranks, as it does while they call in the same order. Shards
                                          of DC_MEMORY_SHARED must lie alike too; others suffice from 2.29 on.
                                          Elsewhere a gather is as right, but slower */
  int32_t double_buffer;             /**< 0 = default = 1: two reduce buckets a type, one fills while the other is
                                          reduced; -1: one bucket */
  int64_t free_activation_threshold; /**< elements; dc_free_tensors frees tensors with more; 0 = default = 10485760;
                                          -1: every non-empty tensor */
  int32_t sync_before_reduce;        /**< 1: all streams are drained before each dc_reduce_grad (debugging) */
  int32_t sync_after_reduce;         /**< 1: … after each dc_reduce_grad */
  int32_t sync_before_allgather;     /**< 1: … before each all-gather that communicates */
  int32_t sync_after_allgather;      /**< 1: … after each all-gather that communicates */
  int32_t check_finite;              /**< 1: dc_reduce_grad looks for infinities and NaN in what it copies, for
                                          dc_context_grads_finite; 0 = default: it does not */
  int32_t replicas;                  /**< hybrid sharding: the ranks are so many groups of consecutive ranks; must divide
                                          their number. Shards and parts of gradients are those of a rank among its
                                          group, and each group has all. Gradients are averaged over all ranks, with
                                          the bits that replicas = 1 has; 0 = default = 1 */
} dc_config;

/** A dc_config with all defaults. */
#define DC_CONFIG_INIT {sizeof(dc_config), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_CONFIG_INIT as a function. [any] Since 0.1. */
DC_API void dc_config_init(dc_config *config, size_t struct_size);

/** Starts a context: joins the ranks of comm, reads the config, makes the streams. Collective: compares the config
 *  over ranks. Once in a context's life.
 *  comm     NULL = a world of one rank; kept alive by the context, which uses private copies (dc_comm_dup), or comm
 *           itself where there can be none
 *  initial_reduce_bucket_size  elements a gradient bucket holds, 1 to 2^48. A larger gradient that is split as a shard
 *           is goes through it in pieces of at least 65536 elements. Any other makes its bucket grow.
 *  Returns DC_OK; DC_E_STATE (second time, or after dc_cleanup), DC_E_INVALID, DC_E_BUSY (comm cannot be copied, and
 *  another context uses it), DC_E_MISMATCH, DC_E_UNSUPPORTED (symmetric_memory where ranks cannot read each other's),
 *  DC_E_NO_MEMORY, those of dc_comm_dup and dc_comm_create_nccl, and with config.replicas those of dc_comm_split.
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_init(dc_context *context, dc_comm *comm, const dc_config *config,
                         int64_t initial_reduce_bucket_size);

/** Ends a context: waits for its streams, frees graphs, parameters, gathered blocks and buckets. Pending
 *  reductions are dropped. A second call does nothing; every other call is DC_E_STATE from then on, except
 *  destroy. Not collective. Returns DC_OK; DC_E_STATE (never initialised). [handle] Since 0.1. */
DC_API dc_status dc_cleanup(dc_context *context);

/** Drops all graphs; parameters, gathered weights and buckets stay.
 *  Returns DC_OK; DC_E_BUSY (reductions are pending: call dc_end_backward or dc_context_step_abort first; or local sums
 *  of stage 1: end a backward with update = 1, or call dc_context_step_abort, first).
 *  [handle] Since 0.1. */
DC_API dc_status dc_reset(dc_context *context);

/** Leaves a step in the middle, after an exception in the caller's code, say. It waits for collectives under way, and
 *  drops gradients not yet reduced, gathered weights that are not persistent, and use counts. The next reductions
 *  replace the gradient buffers. Every rank must do it at the same point of the step, or abort the communicator.
 *  Returns DC_OK; DC_E_STATE, and the communication errors of dc_comm_all_gather. [handle] Since 0.1. */
DC_API dc_status dc_context_step_abort(dc_context *context);

/** Sets the stream on which the caller's own work runs: operators order themselves against it. Later work waits for the
 *  work queued on the stream set before.
 *  A CUDA stream of dc_stream_wrap() may be captured into a CUDA graph, in a context of one rank or of ranks on NCCL. A
 *  capture holds whole steps: no parameter is gathered and no gradient pending when it begins and ends. Otherwise every
 *  call is DC_E_STATE while it cannot begin, and one call after it has ended. All work is on that stream then,
 *  dc_end_backward does not block, and no parameter is persistent. A launch repeats the captured work, in memory of
 *  captures alone. Launches and other work of the context must follow each other, and what the graph uses must stay
 *  registered. Ranks must all capture the same step or none (else DC_E_MISMATCH); their calls are compared as always.
 *  Over NCCL make the same step before the capture, since NCCL connects ranks at the first use of each of its algorithms.
 *  They must launch their graphs equally often and in the same places of the run: launches are not compared, and have
 *  no deadline. A rank that dies or aborts ends its peers' launches, and every later call returns the reason. Graphs
 *  must be destroyed before the context.
 *  stream  of the context's device; kept alive by the caller until replaced; NULL (the default): the calling thread
 *  Returns DC_OK; DC_E_INVALID (a stream of another device), DC_E_STATE (also: the stream set before is being captured),
 *  DC_E_UNSUPPORTED (the stream is being captured, and the context's ranks meet otherwise). [handle] Since 0.1. */
DC_API dc_status dc_context_set_stream(dc_context *context, dc_stream *stream);

/** The first failure of the context's asynchronous work, which every later call returns too; its text is in
 *  dc_last_error(). A failed context can only be cleaned up and destroyed.
 *  Returns DC_OK; DC_E_STATE (before dc_init and after dc_cleanup), and the errors of dc_comm_all_gather.
 *  [any] Since 0.1. */
DC_API dc_status dc_context_check(dc_context *context);

/** Kinds of memory for dc_context_alloc(). */
enum dc_memory_kind {
  DC_MEMORY_DEVICE = 1, /**< the device's own */
  DC_MEMORY_SHARED = 2, /**< peers on this machine can read it in place: for shards under symmetric_memory */
  DC_MEMORY_HOST = 3    /**< host memory that copies fast (pinned, on devices that know the word) */
};

/** Allocates zeroed memory that lives until its last reference is released, also past the context.
 *  bytes   may be 0
 *  kind    enum dc_memory_kind
 *  buffer  one reference, the caller's to release; dc_buffer_data() has the address
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_context_alloc(dc_context *context, int64_t bytes, int32_t kind, dc_buffer **buffer);

/* ==== 7. Parameters ============================================================================================
 *
 * A parameter is known by an id of the caller's choice, any int64_t. Its tensors stay the caller's: they must
 * live, at the same address, until the parameter is unregistered or the context cleaned up.
 * Gradient buffers are flat, contiguous, in the type in which the optimizer wants the gradient; they are set to
 * zero at registration. numel 0 (or NULL): no gradient is wanted, the parameter is frozen.
 * Source: the split of parameters and gradients is that of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). */

/** Registers a parameter of a stage 0, 1 or 2 graph: its weights are whole on every rank.
 *  shape   ndim lengths of the full parameter, copied
 *  ndim    0 to 64
 *  tensor  [in] the full weights [shape], read only; may be NULL
 *  grad_buffer  [in,out] this rank's part of the gradient: elements [offset, offset + numel) of the flattened gradient.
 *          Stage 0: all of it, offset 0. Stages 1 and 2: any split, ranks may own nothing
 *  offset  elements
 *  Returns DC_OK; DC_E_EXISTS (id is registered; nothing changes), DC_E_SHAPE (not contiguous, tensor disagrees with
 *  shape, or the part reaches past the end), DC_E_DTYPE, DC_E_INVALID, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_register_param(dc_context *context, int64_t id, const int64_t *shape, int32_t ndim,
                                   const dc_tensor *tensor, dc_tensor *grad_buffer, int64_t offset);

/** The part of a parameter that a rank has under ZeRO-3: of N elements, with P = ceil(N / ws), the range of offset
 *  min(rank * P, N) and of min(P, N - offset) elements. The last ranks may have fewer than P, or none.
 *  numel       N, >= 0
 *  rank        0 to world_size - 1
 *  world_size  ws, >= 1
 *  offset      set to the first element
 *  count       set to the number of elements; a shard of dc_register_z3_param() has P, the rest of it padding, or count
 *  Returns DC_OK; DC_E_INVALID. [any] Since 0.1. */
DC_API dc_status dc_shard_range(int64_t numel, int32_t rank, int32_t world_size, int64_t *offset, int64_t *count);

/** Registers a sharded parameter of a stage 3 graph.
 *  shape    ndim lengths of the full parameter, copied
 *  ndim     0 to 64
 *  shard    [in] this rank's P = ceil(N / ws) elements of the flattened parameter, from element rank * P on, flat; what
 *           lies past N is padding, and is never read. Ranks past the end may also pass just their real elements
 *  grad_buffer  [in,out] this rank's part of the gradient, as many elements as shard; padding is set to zero
 *  persistent   1: stays gathered until the weights change; 0: not
 *  expected_grad_dtype  type in which gradients are reduced; DC_DTYPE_NONE = as they come
 *  Errors as dc_register_param; DC_E_SHAPE names the rank and the length that was expected. Does not
 *  communicate. [handle] Since 0.1. */
DC_API dc_status dc_register_z3_param(dc_context *context, int64_t id, const int64_t *shape, int32_t ndim,
                                      const dc_tensor *shard, dc_tensor *grad_buffer, int32_t persistent,
                                      int32_t expected_grad_dtype);

/** Gives a parameter a name for people: error texts, log lines and dumps have it behind the number, "parameter 7
 *  (encoder.layer.0.weight)". Every rank may, or may not, give its own.
 *  name  copied; of a long one texts have the last 96 bytes; NULL or "" takes the name away
 *  Returns DC_OK; DC_E_NOT_FOUND, DC_E_INVALID (a control byte in it), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_context_set_param_name(dc_context *context, int64_t id, const char *name);

/** Points a parameter's gradient at another buffer, which is set to zero. Graphs that contain the parameter keep their
 *  split: the length and the offset on every rank must be those of the registration, or the buffer empty on all ranks.
 *  Until there is one again, a dc_reduce_grad that would communicate is DC_E_STATE. Where some rank owns nothing of the
 *  gradient, and so cannot know, the reduction itself fails with it, on every rank, and with it the context. A local
 *  sum of stage 1 stays, and is added to the new buffer; what other stages have added to the old one stays there.
 *  On return nothing of the context's writes the old buffer any more, which is the caller's again.
 *  grad_buffer  [in,out] as in dc_register_param
 *  offset       as in dc_register_param; 0 for stage 3
 *  Returns DC_OK; DC_E_NOT_FOUND, DC_E_BUSY (a reduction into the old buffer is pending), DC_E_SHAPE (not the
 *  registration's; the graph must be registered again for another one), DC_E_DTYPE, DC_E_INVALID (also: an offset of
 *  stage 3).
 *  [handle] Since 0.1. */
DC_API dc_status dc_context_update_param_grad_buffer(dc_context *context, int64_t id, dc_tensor *grad_buffer,
                                             int64_t offset);

/** Forgets a parameter. Returns DC_OK; DC_E_NOT_FOUND, DC_E_BUSY (a graph contains it, or it is gathered and in use:
 *  waited for, and not released by all of its users). [handle] Since 0.1. */
DC_API dc_status dc_unregister_param(dc_context *context, int64_t id);

/** Keeps a stage-3 parameter gathered from now on, and gathers it now in its own type. Collective.
 *  Returns DC_OK; DC_E_NOT_FOUND, DC_E_STAGE (not a stage-3 parameter), DC_E_STATE (the parameter has copies in four
 *  other types), DC_E_NO_MEMORY, and the errors of dc_comm_all_gather. [handle, collective] Since 0.1. */
DC_API dc_status dc_set_persistent(dc_context *context, int64_t id);
/** Undoes dc_set_persistent: the memory goes back at the last release, or now if the parameter is not in use, which it is
 *  from dc_wait_allgather on.
 *  Returns DC_OK; DC_E_NOT_FOUND, DC_E_STAGE (not a stage-3 parameter). [handle] Since 0.1. */
DC_API dc_status dc_clear_persistent(dc_context *context, int64_t id);

/** Forgets a parameter's gathered weights, so that the next gather communicates; persistent parameters keep
 *  theirs. Returns DC_OK; DC_E_NOT_FOUND, DC_E_STAGE. [handle] Since 0.1. */
DC_API dc_status dc_invalidate_gathered_param(dc_context *context, int64_t id);
/** Does dc_invalidate_gathered_param for all parameters that are not persistent; their memory goes back.
 *  Returns DC_OK; DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_clear_all_gathered_params(dc_context *context);

/** Says that weights changed (optimizer step, load, edit): gathered copies of them are stale, and the next gather
 *  communicates. Every rank must say it at the same point.
 *  ids, count  count numbers of parameters; NULL with count 0 = all parameters
 *  Returns DC_OK; DC_E_NOT_FOUND. [handle] Since 0.1. */
DC_API dc_status dc_context_params_updated(dc_context *context, const int64_t *ids, int64_t count);

/** Says that the gradient buffers of these parameters hold gradients to keep: their next reduction adds to them
 *  instead of replacing them. An empty list has no effect. Returns DC_OK; DC_E_NOT_FOUND. [handle] Since 0.1. */
DC_API dc_status dc_context_accumulate_grads(dc_context *context, const int64_t *ids, int64_t count);

/* ==== 8. Graphs ================================================================================================
 *
 * A graph is a set of parameters under an id of the caller's choice and a ZeRO stage; operators name it. Every
 * rank registers the same graphs in the same order. Registering compares number, sizes and split over the ranks
 * (one small collective a graph). Registering an id again replaces the graph, unless reductions or local sums of its
 * parameters are pending (DC_E_BUSY). A parameter of several graphs has one split in all of them: that of the first,
 * also while its buffer is taken away; another one is DC_E_MISMATCH.
 *
 *   stage 0  gradients are averaged over ranks, whole, in every backward: plain data parallelism
 *   stage 1  gradients are summed locally; only a backward with update = 1 averages the sums, each rank its own part.
 *            Its dc_end_backward also averages the sums of parameters that got no gradient in it
 *   stage 2  every backward averages, each rank receives its own part
 *   stage 3  as 2, and the weights are sharded too: gather, wait, release
 *
 * Source: the stages are those of ZeRO (arXiv 1910.02054), stage 0 is plain data parallelism. */

/** Registers a graph for stage 0. Returns DC_OK; DC_E_NOT_FOUND (names the id), DC_E_STAGE (a parameter was
 *  registered for another stage), DC_E_INVALID (an id twice), DC_E_BUSY, DC_E_SHAPE (a grad buffer does not cover
 *  the parameter), DC_E_MISMATCH (also: at stage 0, a gradient that some ranks want and others do not), DC_E_NO_MEMORY,
 *  and the errors of dc_comm_all_gather. [handle, collective] Since 0.1. */
DC_API dc_status dc_register_graph_z0(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count);
/** Registers a graph for stage 1. Errors as dc_register_graph_z0. [handle, collective] Since 0.1. */
DC_API dc_status dc_register_graph_z1(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count);
/** Registers a graph for stage 2. Errors as dc_register_graph_z0. [handle, collective] Since 0.1. */
DC_API dc_status dc_register_graph_z2(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count);
/** Registers a graph for stage 3. Errors as dc_register_graph_z0. [handle, collective] Since 0.1. */
DC_API dc_status dc_register_graph_z3(dc_context *context, int64_t graph_id, const int64_t *ids, int64_t count);
/** Forgets one graph. Returns DC_OK; DC_E_NOT_FOUND, DC_E_BUSY (reductions or local sums of its parameters are pending,
 *  as in dc_reset). [handle] Since 0.1. */
DC_API dc_status dc_unregister_graph(dc_context *context, int64_t graph_id);

/* ==== 9. The operators =========================================================================================
 *
 * Each is enqueued and returns; none blocks the host, except where it says so. Errors that all share: DC_E_STATE
 * (no dc_init yet, or cleaned up), DC_E_NOT_FOUND (unknown graph; unknown parameter; parameter not in the graph:
 * three texts), DC_E_STAGE (a gather, wait, release or offload of a parameter on a graph that is not stage 3),
 * and the context's first asynchronous failure.
 * Source: the operators' contract is that of DeepSpeed's DeepCompile (arXiv 2504.09983); what is done differently is
 * in docs/differences.md. */

/** Starts to gather a parameter's full weights, or does nothing if they are there and current.
 *  dtype   element type of the result; DC_DTYPE_NONE = the shard's. The shard is cast, then gathered; or, where a current
 *          copy in the shard's type or a larger one of its kind (float or integer) is there, that is cast. Both give the
 *          same bits, whatever was gathered before
 *  out     [view] the full parameter in its registered shape, contiguous, memory of the library: readable after
 *          dc_wait_allgather, until dc_release_param; shape stays valid as long as the registration
 *  Also DC_E_DTYPE, DC_E_STATE (the parameter has copies in four other types: release it first), DC_E_NO_MEMORY.
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_allgather_param(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id,
                                    int32_t dtype, dc_tensor *out);

/** Starts to gather several parameters in one handshake; those that are there already are skipped.
 *  ids     count numbers of parameters; all are checked before any is started
 *  dtypes  count element types as in dc_allgather_param; NULL = each its own
 *  count   0 does nothing
 *  Errors as dc_allgather_param. [handle, collective] Since 0.1. */
DC_API dc_status dc_prefetch_params_fused(dc_context *context, int64_t graph_id, const int64_t *ids,
                                          const int32_t *dtypes, int64_t count);

/** Lets the caller's stream wait until the parameter is gathered (stream NULL: blocks, at most the deadline). After
 *  dc_context_params_updated without a new gather the copy from before is there, and no error says so.
 *  token  [none] of dc_allgather_param, or NULL; in a compiler's graph the result is the token itself
 *  Also DC_E_STATE (it is not being gathered). [handle] Since 0.1. */
DC_API dc_status dc_wait_allgather(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id);

/** One of n_users says that it no longer reads the parameter on the caller's stream. The last one gives the memory
 *  back: every view of it is invalid from then on. Persistent parameters stay.
 *  n_users  >= 1 and the same in each call of one cycle
 *  Also DC_E_INVALID (n_users), DC_E_STATE (not gathered, or released more often than n_users).
 *  [handle] Since 0.1. */
DC_API dc_status dc_release_param(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id,
                                  int64_t n_users);

/** Releases a parameter as its only user, but hands the memory to the caller. It waits like dc_wait_allgather; then
 *  *buffer is the caller's to release when done reading, and the library forgets it. For languages whose values own
 *  their memory. A persistent parameter stays the library's: *buffer is then another reference, whose contents change
 *  with the next gather after dc_context_params_updated. Once the parameter is no longer persistent it is the caller's
 *  alone. After dc_context_params_updated without a new gather *buffer is the copy from before. It also waits for
 *  dc_reload_parameter, so the shard can be changed then.
 *  dtype   as in dc_allgather_param: which of its copies
 *  buffer  N elements; one reference, the caller's to release
 *  Errors as dc_release_param; DC_E_DTYPE. [handle] Since 0.1. */
DC_API dc_status dc_take_param(dc_context *context, int64_t graph_id, int64_t id, int32_t dtype, dc_buffer **buffer);

/** Takes a parameter's gradient for averaging over ranks.
 *  grad    [in] the full gradient: contiguous, as many elements as the parameter; read before the caller's stream
 *          goes on, so it may be overwritten or freed after (stream NULL: when the call returns)
 *  The result arrives in the registered gradient buffer, complete after dc_end_backward; see chapter 8 for the
 *  stages. Several gradients of a parameter are added in the order of the calls, also if their types differ. Each mean
 *  is rounded to the buffer's type before it is added to what lies there, and the sum is rounded again. A local sum of
 *  stage 1 has the gradients' type, to which every addition rounds; of gradients that differ in type it has float32,
 *  or float64 if one of them has. Every rank calls this for the same parameters in the same order and types, in the
 *  micro-batches of stage 1 too. Reductions start when a bucket is full, or when a parameter's gradient waits in a
 *  bucket of another type than its next one. So they do where one of the two is of a stage-0 graph and the other is
 *  not. While profiling, and for frozen parameters, nothing happens. May block while both buckets are being reduced.
 *  Also DC_E_SHAPE, DC_E_DTYPE (not a floating-point type), DC_E_STATE (its gradient buffer was taken away),
 *  DC_E_NO_MEMORY. [handle, collective] Since 0.1. */
DC_API dc_status dc_reduce_grad(dc_context *context, const dc_tensor *grad, int64_t graph_id, int64_t id);

/** Says which tensors the caller may free early: those with more elements than free_activation_threshold.
 *  tensors  [none] count views of any shapes, contiguous; reloaded tensors (buffer set) are given back here
 *  tensor_size  bytes from one view to the next: sizeof(dc_tensor)
 *  count    of tensors and flags, >= 0
 *  freed    count flags, set to 1 for each that is, or is to be, freed. 0 for gathered parameters, which
 *           dc_release_param gives back, and host copies of offloaded tensors; all 0 while profiling
 *  Also DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE (a tensor that cannot be read: then none is freed). [handle]
 *  Since 0.1. */
DC_API dc_status dc_free_tensors(dc_context *context, const dc_tensor *tensors, size_t tensor_size, int64_t count,
                                 int32_t *freed);

/** Copies a tensor to host memory that the context keeps under id, over steps, in place of what it kept there.
 *  tensor  [in] of any shape, contiguous; with stream NULL it may be freed when the call returns, else after
 *          dc_wait_offload
 *  id      any number of a tensor
 *  out     [view] the host copy, of the tensor's shape, the context's, readable on the host after dc_wait_offload and
 *          its stream
 *  Also DC_E_SHAPE (shape or type are not those of the id's first use), DC_E_NO_MEMORY.
 *  [handle] Since 0.1. */
DC_API dc_status dc_offload_tensor(dc_context *context, const dc_tensor *tensor, int64_t graph_id, int64_t id,
                                   dc_tensor *out);
/** Lets the caller's stream wait for the copy of dc_offload_tensor.
 *  id   as given to dc_offload_tensor
 *  out  [view] the host copy, as in dc_offload_tensor, the context's
 *  Also DC_E_NOT_FOUND (id was never offloaded in this graph). [handle] Since 0.1. */
DC_API dc_status dc_wait_offload(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id,
                                 dc_tensor *out);
/** Starts to bring an offloaded tensor back to the device, or does nothing if what was offloaded last is there. A copy of
 *  what was offloaded before that is freed as dc_end_backward would; that may block until its reload is done.
 *  id   as given to dc_offload_tensor
 *  out  [view] the device copy in its former shape, freed by dc_end_backward unless the caller retains its buffer
 *  Also DC_E_STATE (id was not offloaded in this graph), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_reload_tensor(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id,
                                  dc_tensor *out);
/** Lets the caller's stream wait for dc_reload_tensor.
 *  tensor  [none] of any shape: returned as out while profiling without a reload; otherwise a token, and may be NULL
 *  id      as given to dc_offload_tensor
 *  out     [view] the device copy, as in dc_reload_tensor
 *  Also DC_E_NOT_FOUND (never offloaded), DC_E_STATE (no reload was started). [handle] Since 0.1. */
DC_API dc_status dc_wait_reload(dc_context *context, const dc_tensor *tensor, int64_t graph_id, int64_t id,
                                dc_tensor *out);

/** Drops the device copy of a shard that lives in host memory (dc_reload_parameter); nothing is copied, since the
 *  host's is the master. Nothing to drop: no effect. [handle] Since 0.1. */
DC_API dc_status dc_offload_parameter(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id);
/** Starts to copy a shard that lives in host memory to the device; gathers use the copy until dc_offload_parameter.
 *  A gather without it reads the host's shard itself. On a device whose memory is the host's, the copy is made all
 *  the same. Reloaded already and unchanged: no effect. Also DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_reload_parameter(dc_context *context, const dc_tensor *token, int64_t graph_id, int64_t id);

/** Reduces what the buckets still hold, of every graph, and blocks until all gradients of the context have arrived in
 *  their buffers. In a backward with update = 1 that includes all local sums of stage 1; a gradient that comes after this
 *  call is averaged by itself and added. May be called more than once in a backward, and with nothing pending.
 *  graph_id         a registered graph of the context; all graphs' gradients are reduced
 *  release_buckets  1 gives the buckets' memory back too, 0 keeps it, as it must be within a capture
 *  (dc_context_set_stream) Also DC_E_STATE (the gradient buffer of a parameter with a local sum was taken away by
 *  dc_context_update_param_grad_buffer), DC_E_MISMATCH, DC_E_TIMEOUT, DC_E_PEER_DEAD, DC_E_ABORTED, DC_E_CALLBACK.
 *  [handle, collective] Since 0.1. */
DC_API dc_status dc_end_backward(dc_context *context, int64_t graph_id, int32_t release_buckets);

/* ==== 10. The step: forward, backward, update =======================================================================
 *
 * When gradients replace what was there and when they are added to it. Source: ZeRO (arXiv 1910.02054), and for
 * accumulation over micro-batches DeepCompile (arXiv 2504.09983). */

/** Begins a forward pass. Returns DC_OK; DC_E_STATE (a forward has begun and not ended). [handle] Since 0.1. */
DC_API dc_status dc_start_forward(dc_context *context);
/** Ends a forward pass and checks it: parameters that some of their users have released and others have not are logged
 *  as a warning, unless they are persistent. Returns DC_OK; DC_E_STATE (none has begun). [handle] Since 0.1. */
DC_API dc_status dc_end_forward(dc_context *context);
/** Begins a backward pass. After a backward with update = 1 the next one replaces the gradient buffers instead of
 *  adding to them. Without this call update is 0.
 *  update  1 if the optimizer steps after it (the last micro-batch), 0 if gradients go on accumulating: then stage 1
 *          only sums locally
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_start_backward(dc_context *context, int32_t update);
/** Whether the gradients that the optimizer is about to use are finite, on all ranks: for loss scaling, which leaves a
 *  step out otherwise. May be called after dc_end_backward of a backward with update = 1, until the next
 *  dc_start_backward, dc_context_step_abort or dc_reset. On a device it may also follow each launch of a graph into
 *  which such a step was captured. Needs config.check_finite. Collective, with one answer for all: every rank calls it,
 *  at the same point. Waits for the caller's stream; gradients are not read again.
 *  It covers every gradient given to dc_reduce_grad since the last such step, of all micro-batches. Each is checked as
 *  it is stored on the way, in the gradient's expected type, so that a float32 gradient beyond float16 counts. In stage
 *  1 it is checked with the local sum to which it is added. The sums over ranks and the additions to a gradient buffer,
 *  which follow, are not checked. Of finite numbers they can only overflow where the buffer's type is near its end:
 *  give float16 gradients that accumulate a float32 buffer. Gradients that are dropped, while profiling and of frozen
 *  parameters, do not count.
 *  finite  1: all are, on every rank; 0: some rank has an infinity or NaN
 *  id      the lowest parameter whose gradient is not finite, over all ranks; left alone where *finite is 1; may be NULL
 *  Returns DC_OK; DC_E_INVALID (finite is NULL), DC_E_STATE (check_finite is 0, no such step has ended, or the stream is
 *  being captured), and the errors of dc_comm_all_gather. [handle, collective] Since 0.1. */
DC_API dc_status dc_context_grads_finite(dc_context *context, int32_t *finite, int64_t *id);
/** Turns profiling on or off: while on, reductions and dc_free_tensors do nothing, and gathers are real; so that
 *  operators can be run one by one, waits and releases of a parameter that is not gathered do nothing either.
 *  enable  1 or 0
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_enable_profiling(dc_context *context, int32_t enable);
/** 1 while profiling, else 0. [any] Since 0.1. */
DC_API int32_t dc_is_profiling(const dc_context *context);

/* ==== 11. Memory, wire bytes, dry runs, traces ======================================================================
 *
 * Computes nothing. */

/** A context's memory and traffic. Bytes are of this rank; "wire" means read from other ranks' memory or received from
 *  them, without padding. */
typedef struct dc_memory_stats {
  size_t struct_size;            /**< sizeof(dc_memory_stats) */
  int64_t gathered_bytes;        /**< gathered parameters now */
  int64_t gathered_peak_bytes;   /**< most since dc_context_reset_stats */
  int64_t bucket_bytes;          /**< gradient buckets, in all */
  int64_t offload_bytes;         /**< host copies of offloaded tensors */
  int64_t reload_bytes;          /**< device copies of reloaded tensors and shards now */
  int64_t arena_bytes;           /**< device memory taken from the allocator for gathered and reloaded blocks */
  int64_t allocations;           /**< memory allocations of libdc since dc_context_reset_stats; 0 in a steady step */
  int64_t gathers;               /**< parameters gathered over the wire since dc_context_reset_stats */
  int64_t gather_hits;           /**< gathers that found current weights and did not communicate */
  int64_t gather_wire_bytes;     /**< wire bytes of gathers */
  int64_t reductions;            /**< parameter gradients reduced over the wire */
  int64_t reduce_wire_bytes;     /**< wire bytes of reductions */
  int64_t flushes;               /**< bucket reductions started */
  int64_t copied_d2h_bytes;      /**< offload copies */
  int64_t copied_h2d_bytes;      /**< reload copies */
  int64_t registered_params;     /**< parameters now */
  int64_t registered_graphs;     /**< graphs now */
} dc_memory_stats;

/** A dc_memory_stats to be filled in. */
#define DC_MEMORY_STATS_INIT {sizeof(dc_memory_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_MEMORY_STATS_INIT as a function.
 *  stats  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_memory_stats_init(dc_memory_stats *stats, size_t struct_size);

/** Counts what a context holds and moved.
 *  stats  filled in; struct_size is set by the caller
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_context_get_memory_stats(dc_context *context, dc_memory_stats *stats);
/** Sets the counters to zero and the peak to the present.
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_context_reset_stats(dc_context *context);

/** The operators, for dc_context_dry_run() and traces. */
enum dc_op {
  DC_OP_NONE = 0,                  /**< no operator */
  DC_OP_ALLGATHER_PARAM = 1,       /**< dc_allgather_param */
  DC_OP_PREFETCH_PARAMS_FUSED = 2, /**< dc_prefetch_params_fused */
  DC_OP_WAIT_ALLGATHER = 3,        /**< dc_wait_allgather */
  DC_OP_RELEASE_PARAM = 4,         /**< dc_release_param */
  DC_OP_REDUCE_GRAD = 5,           /**< dc_reduce_grad */
  DC_OP_FREE_TENSORS = 6,          /**< dc_free_tensors */
  DC_OP_OFFLOAD_TENSOR = 7,        /**< dc_offload_tensor */
  DC_OP_RELOAD_TENSOR = 8,         /**< dc_reload_tensor */
  DC_OP_WAIT_OFFLOAD = 9,          /**< dc_wait_offload */
  DC_OP_WAIT_RELOAD = 10,          /**< dc_wait_reload */
  DC_OP_OFFLOAD_PARAMETER = 11,    /**< dc_offload_parameter */
  DC_OP_RELOAD_PARAMETER = 12,     /**< dc_reload_parameter */
  DC_OP_END_BACKWARD = 13,         /**< dc_end_backward */
  DC_OP_TAKE_PARAM = 14,           /**< dc_take_param */
  DC_OP_SET_PERSISTENT = 15,       /**< dc_set_persistent */
  DC_OP_REGISTER_GRAPH = 16,       /**< dc_register_graph_z0 to _z3 */
  DC_OP_INIT = 17,                 /**< dc_init */
  DC_OP_GRADS_FINITE = 18,         /**< dc_context_grads_finite */
  DC_OP_COMM_ALL_GATHER = 32,      /**< dc_comm_all_gather */
  DC_OP_COMM_REDUCE_SCATTER = 33,  /**< dc_comm_reduce_scatter */
  DC_OP_COMM_ALL_REDUCE = 34,      /**< dc_comm_all_reduce */
  DC_OP_COMM_BROADCAST = 35,       /**< dc_comm_broadcast */
  DC_OP_COMM_BARRIER = 36,         /**< dc_comm_barrier */
  DC_OP_COMM_SPLIT = 37,           /**< dc_comm_split */
  DC_OP_COMM_ALL_TO_ALL = 38,      /**< dc_comm_all_to_all */
  DC_OP_COMM_GATHER = 39,          /**< dc_comm_gather */
  DC_OP_COMM_SCATTER = 40          /**< dc_comm_scatter */
};

/** An operator's name, "allgather_param".
 *  op  enum dc_op; "unknown" for a number that is none
 *  Static, never NULL. [any] Since 0.1. */
DC_API const char *dc_op_name(int32_t op);

/** Result and memory of a call that is not made. */
typedef struct dc_op_info {
  size_t struct_size;   /**< sizeof(dc_op_info) */
  const int64_t *shape; /**< result's shape, ndim lengths; valid as long as the registration; NULL when ndim is 0 */
  int32_t ndim;         /**< result's dimensions; -1: the operator returns no tensor, or its argument's shape */
  int32_t dtype;        /**< result's type; DC_DTYPE_NONE where ndim is -1 */
  int32_t host;         /**< 1: the result lies in host memory */
  int32_t reserved0;    /**< 0 */
  int64_t device_bytes; /**< device memory the call would take from the arena now */
  int64_t wire_bytes;   /**< bytes it would receive; those of a reduction count at its dc_reduce_grad */
} dc_op_info;

/** A dc_op_info to be filled in. */
#define DC_OP_INFO_INIT {sizeof(dc_op_info), NULL, 0, 0, 0, 0, 0, 0}

/** DC_OP_INFO_INIT as a function.
 *  info  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_op_info_init(dc_op_info *info, size_t struct_size);

/** Dry run of an operator: no communication, no allocation, no change of state. Meta kernels rest on it. It checks op,
 *  ids, registrations, stages and types. It does not check the state of the step: whether a parameter is gathered, taken
 *  or has copies in four types. Nor does it check offloaded values and gradient buffers. It is not given
 *  tensors and n_users, and does not check them.
 *  op     DC_OP_ALLGATHER_PARAM to DC_OP_TAKE_PARAM; the others of enum dc_op have no dry run, and are DC_E_INVALID
 *  id     as the operator's
 *  dtype  as the operator's
 *  info   filled in; struct_size is set by the caller
 *  Returns DC_OK; of these checks what the operator would: DC_E_STATE (no dc_init yet), DC_E_NOT_FOUND, DC_E_STAGE,
 *  DC_E_DTYPE, and the context's first asynchronous failure; DC_E_INVALID. [handle] Since 0.1. */
DC_API dc_status dc_context_dry_run(dc_context *context, int32_t op, int64_t graph_id, int64_t id, int32_t dtype,
                            dc_op_info *info);

/** One piece of work that ran on a stream of the context. */
typedef struct dc_trace_event {
  int64_t begin_ns; /**< monotonic clock */
  int64_t end_ns;   /**< monotonic clock */
  int64_t graph_id; /**< the graph's number in the order of registration, as on every rank; -1: none */
  int64_t id;       /**< parameter or tensor; the first of a group; -1: none */
  int64_t bytes;    /**< moved */
  int32_t op;       /**< enum dc_op */
  int32_t lane;     /**< 0 the caller, 1 gather, 2 reduce, 3 offload, 4 reload stream */
} dc_trace_event;

/** Keeps a trace of the last events from now on.
 *  capacity  events to keep, 0 to 16777216; 0 stops and forgets
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_context_trace_start(dc_context *context, int64_t capacity);
/** Moves the kept events, oldest first, into an array; what does not fit stays for the next call.
 *  events      cap entries
 *  event_size  bytes from one entry to the next: sizeof(dc_trace_event)
 *  cap         entries, >= 0
 *  count       set to how many were moved
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE. [handle] Since 0.1. */
DC_API dc_status dc_context_trace_read(dc_context *context, dc_trace_event *events, size_t event_size, int64_t cap,
                               int64_t *count);

/** Writes the context's last operations (4096, or more after dc_context_trace_start) to folder/rank-R.json: the whole
 *  file, or none. The flight recorder keeps them at all times, and the context's first failure. It has each one's
 *  operator, graph, parameter, bytes, number of the collective, times of the call, begin and end of its work, stream
 *  and state. `libdc trace` and `libdc doctor --dump` read the files of all ranks. Another call on the context may be blocked
 *  meanwhile.
 *  folder  a path; made if the folder above it is there; a file of the same rank is replaced
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (no rank before dc_init), DC_E_SYSTEM. [any] Since 0.1. */
DC_API dc_status dc_context_trace_dump(dc_context *context, const char *folder);
/** Does so by itself at the context's first communication error, before the call that found it returns it. That
 *  waits until the collectives that run have ended, for 2 s at most. May be called before dc_init, whose errors then
 *  are dumped too. A file that can't be written is logged as a warning.
 *  folder  as in dc_context_trace_dump, copied; NULL: not any more
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_context_trace_dump_on_error(dc_context *context, const char *folder);

/* ==== 12. The transformer layer =====================================================================================
 *
 * The encoder layer of BERT with its backward pass, after DeepSpeed's transformer kernel: its parameters, its twelve
 * weights in its order, row-major [out, in]. There are N tokens of H features, A heads of d = H / A and I intermediate
 * features. y = x W' + b; LN is layer normalisation with its statistics in float32. drop is dropout, and m the additive
 * mask of keys:
 *
 *   Pre-LN    a = LN(x; norm)                        Post-LN   a = x
 *   q, k, v = a Wqkv' + bqkv;  P = softmax(q k' / sqrt d + m);  c = drop1(P) v        for each sample and head
 *   z = x + drop2(c Wo' + bo);  y = LN(z; attn_n);  f = GELU(y Wi' + bi)
 *   Pre-LN    out = z + drop3(f Wout' + bout)        Post-LN   out = LN(y + drop3(f Wout' + bout); norm)
 *
 * Source: Vaswani et al. 2017 (arXiv 1706.03762), BERT (arXiv 1810.04805), and DeepSpeed's transformer kernel for the
 * parameters, the weights and the two placements of LN; docs/transformer.md has the backward's equations.
 *
 * Attention is computed in tiles and keeps the maximum and the sum of each row's softmax, never an S x S matrix (Dao et
 * al. 2022, arXiv 2205.14135). Dropout is stateless, by Philox4x32-10 (Salmon et al. 2011). Whether an element is kept
 * is a function of the layer's seed and id, the call's offset, the site and the element's place in its sample; see
 * docs/transformer.md. Nothing depends on the number of threads, and two runs give the same bits.
 *
 * Calls take all memory from the caller, allocate nothing (but a queued packed call a copy of its cu_seqlens), keep
 * nothing, and run in the order of call->stream. */

/** A layer's shape and switches, and threads; it owns no weights. */
typedef struct dc_layer dc_layer;

/** The two forms of GELU. */
enum dc_gelu {
  DC_GELU_TANH = 1, /**< x/2 (1 + tanh(0.7978845608 (x + 0.044715 x^3))); the default */
  DC_GELU_ERF = 2   /**< x/2 (1 + erf(x / sqrt 2)) */
};

/** The twelve weights, in the order in which they are passed. */
enum dc_layer_weight {
  DC_LAYER_ATTN_QKVW = 0, /**< [3H, H]: rows of Q, then K, then V; head h has features h d to h d + d - 1 */
  DC_LAYER_ATTN_QKVB = 1, /**< [3H] */
  DC_LAYER_ATTN_OW = 2,   /**< [H, H] */
  DC_LAYER_ATTN_OB = 3,   /**< [H] */
  DC_LAYER_ATTN_NW = 4,   /**< [H]: scale of the normalisation after attention */
  DC_LAYER_ATTN_NB = 5,   /**< [H]: its shift */
  DC_LAYER_INTER_W = 6,   /**< [I, H] */
  DC_LAYER_INTER_B = 7,   /**< [I] */
  DC_LAYER_OUTPUT_W = 8,  /**< [H, I] */
  DC_LAYER_OUTPUT_B = 9,  /**< [H] */
  DC_LAYER_NORM_W = 10,   /**< [H]: scale of the other normalisation: of the input (Pre-LN), of the output (Post-LN) */
  DC_LAYER_NORM_B = 11,   /**< [H]: its shift */
  DC_LAYER_WEIGHTS = 12   /**< how many there are */
};

/** Where dropout is applied. */
enum dc_dropout_site {
  DC_DROPOUT_ATTENTION = 1, /**< the attention's probabilities, [B, A, S, S] */
  DC_DROPOUT_PROJECTION = 2,/**< the attention's projection, [B, S, H] */
  DC_DROPOUT_OUTPUT = 3     /**< the layer's output before the residual sum, [B, S, H] */
};

/** A layer's parameters, by DeepSpeed's names. */
typedef struct dc_layer_config {
  size_t struct_size;           /**< sizeof(dc_layer_config) */
  int64_t batch_size;           /**< most samples of a call, up to 2^31 - 1; 0 = as many */
  int64_t max_seq_length;       /**< most tokens of a sample, up to 2^31 - 1; 0 = as many */
  int64_t hidden_size;          /**< H, 1 to 131072 */
  int64_t intermediate_size;    /**< I, up to 2^31 - 1, on CUDA and "count" 67107840; 0 = 4 H */
  int64_t heads;                /**< A, divides H; H / A <= 8192 */
  double attn_dropout_ratio;    /**< of site 1; 0 <= p < 1, taken to the nearest 1/65536 */
  double hidden_dropout_ratio;  /**< of sites 2 and 3; the same range */
  int64_t num_hidden_layers;    /**< layers of the model, for adjust_init_range, up to 2^31 - 1; 0 = 1 */
  double initializer_range;     /**< standard deviation of the initial weights, below 1e30; 0 = 0.02 */
  double layer_norm_eps;        /**< added to the variance; at least 1.2e-38 and below 1e30; 0 = 1e-12 */
  int64_t seed;                 /**< of dropout and of the initial weights; any value */
  int64_t layer_id;             /**< this layer's place in the model, so that layers differ; 0 to 2^32 - 1 */
  int32_t local_rank;           /**< >= -1; no effect: the device of dc_layer_create() says where a layer lives. In the
                                     original it picks the rank's card, which its first layer makes the current one */
  int32_t fp16;                 /**< 1: dtype DC_FLOAT16 unless dtype is given */
  int32_t dtype;                /**< of activations and weights: DC_FLOAT32 (default), DC_FLOAT16, DC_BFLOAT16; sums
                                     are in float32 */
  int32_t grad_dtype;           /**< of the weights' gradients: DC_DTYPE_NONE = dtype, or DC_FLOAT32 */
  int32_t gelu;                 /**< enum dc_gelu; 0 = DC_GELU_TANH */
  int32_t pre_layer_norm;       /**< 0 = default = 1: Pre-LN; -1: Post-LN */
  int32_t normalize_invertible; /**< 1: keep two activations of [N, H] less (what they were is computed again) */
  int32_t gelu_checkpoint;      /**< 1: keep GELU's input alone, an activation of [N, I] less */
  int32_t attn_dropout_checkpoint; /**< 0 or 1; no effect: nothing of the attention's dropout is kept anyway. In the
                                     original 1 keeps the mask alone, and the backward computes the dropped
                                     probabilities again */
  int32_t adjust_init_range;    /**< 0 = default = 1: attn_ow and output_w start with initializer_range /
                                     sqrt(2 num_hidden_layers), on every rank; -1: with initializer_range */
  int32_t stochastic_mode;      /**< 1: permits sums in an order that varies from run to run. The CPU has no faster
                                     order and gives the same bits either way */
  int32_t training;             /**< 0 = default = 1; -1: for inference: dc_layer_forward runs as dc_layer_inference
                                     does, reserve 0 bytes, and there is no backward */
  int32_t threads;              /**< threads that compute, up to 1024; 0 = as many as the process may run on */
  int32_t reserved0;            /**< 0 */
} dc_layer_config;

/** A dc_layer_config with every default; hidden_size and heads must be set. */
#define DC_LAYER_CONFIG_INIT {sizeof(dc_layer_config),0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}

/** DC_LAYER_CONFIG_INIT as a function.
 *  config       written; NULL does nothing
 *  struct_size  the caller's sizeof(dc_layer_config)
 *  [any] Since 0.1. */
DC_API void dc_layer_config_init(dc_layer_config *config, size_t struct_size);

/** The arguments that change from call to call. A sample's tokens are its first dimension: dense, [B, S, H]; or packed,
 *  [N, H] with N = cu_seqlens[B], without padding. */
typedef struct dc_layer_call {
  size_t struct_size;        /**< sizeof(dc_layer_call) */
  int64_t batch;             /**< B, 0 to config.batch_size. Without tokens only gradients of weights are written: zeros */
  int64_t seq_length;        /**< S, 0 to config.max_seq_length; packed: the longest sample's, or more */
  const int32_t *cu_seqlens; /**< NULL: dense; else B + 1 ascending offsets in tokens, the first 0; host memory */
  const dc_tensor *mask;     /**< [in] added to the scores of key j of sample b: [B, S] with any 1s between, in dtype or
                                  float32; 0 keeps, -10000 drops. -inf drops too, and a row without any key gives
                                  zeros. NULL: zeros; must be NULL when packed. No gradient */
  int64_t offset;            /**< of dropout: another value, another mask; a backward needs its forward's */
  int32_t accumulate;        /**< dc_layer_backward: 1 adds to the weights' gradients, 0 replaces them */
  int32_t reserved0;         /**< 0 */
  void *workspace;           /**< [in,out] 64-byte aligned; contents are lost from one call to the next */
  int64_t workspace_bytes;   /**< at least what dc_layer_get_cost() says */
  void *reserve;             /**< [in,out] what a forward keeps for its backward, 64-byte aligned; NULL for inference */
  int64_t reserve_bytes;     /**< at least what dc_layer_get_cost() says */
  dc_stream *stream;         /**< where the work runs; NULL: the calling thread. cu_seqlens is read by the call, all
                                  other memory until the work is done */
} dc_layer_call;

/** A dc_layer_call to be filled in. */
#define DC_LAYER_CALL_INIT {sizeof(dc_layer_call), 0, 0, NULL, NULL, 0, 0, 0, NULL, 0, NULL, 0, NULL}

/** DC_LAYER_CALL_INIT as a function.
 *  call         written; NULL does nothing
 *  struct_size  the caller's sizeof(dc_layer_call)
 *  [any] Since 0.1. */
DC_API void dc_layer_call_init(dc_layer_call *call, size_t struct_size);

/** The needs and work of a call. With e = bytes of dtype, inv and gelu = 1 where the flag is set, N tokens:
 *    reserve_bytes = e (N H (7 - 2 inv) + N I (2 - gelu)) + 8 N A + 16 N, each of its parts rounded up to 64 bytes
 *    kept_bytes    = reserve_bytes + e N H: the input must stay too (Post-LN with inv: also the output, which is
 *                    the next layer's input)
 *    flops         = 8 N H^2 + 4 N H I + 4 H (the sum over samples of S^2) forward, twice that backward; what the
 *                    flags compute again is not counted */
typedef struct dc_layer_cost {
  size_t struct_size;               /**< sizeof(dc_layer_cost) */
  int64_t forward_workspace_bytes;  /**< of dc_layer_forward */
  int64_t backward_workspace_bytes; /**< of dc_layer_backward */
  int64_t inference_workspace_bytes;/**< of dc_layer_inference */
  int64_t reserve_bytes;            /**< 0 with config.training = -1 */
  int64_t kept_bytes;               /**< between forward and backward, input included */
  int64_t forward_flops;            /**< additions and multiplications of the matrix products */
  int64_t backward_flops;           /**< the same of the backward pass */
  int64_t forward_bytes;            /**< read and written by the kernels of a forward, each operand once a kernel */
  int64_t backward_bytes;           /**< the same of the backward pass */
} dc_layer_cost;

/** A dc_layer_cost to be filled in. */
#define DC_LAYER_COST_INIT {sizeof(dc_layer_cost), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_LAYER_COST_INIT as a function.
 *  cost         written; NULL does nothing
 *  struct_size  the caller's sizeof(dc_layer_cost)
 *  [any] Since 0.1. */
DC_API void dc_layer_cost_init(dc_layer_cost *cost, size_t struct_size);

/** Makes a layer.
 *  device  kept alive by the layer
 *  config  copied; not NULL
 *  layer   the handle, for dc_layer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (a parameter is out of range; the text names it), DC_E_DTYPE, DC_E_UNSUPPORTED,
 *  DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_layer_create(dc_device *device, const dc_layer_config *config, dc_layer **layer);

/** Gives the handle back; work that is queued is done all the same.
 *  layer  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_layer_destroy(dc_layer *layer);

/** The needs and work of a call.
 *  layer  the layer
 *  call   batch, seq_length and cu_seqlens count
 *  cost   written
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE. [any] Since 0.1. */
DC_API dc_status dc_layer_get_cost(const dc_layer *layer, const dc_layer_call *call, dc_layer_cost *cost);

/** The shape of a weight.
 *  layer  the layer
 *  index  enum dc_layer_weight
 *  shape  two lengths; the second is 1 when ndim is 1
 *  ndim   set to 1 or 2
 *  Returns DC_OK; DC_E_INVALID. [any] Since 0.1. */
DC_API dc_status dc_layer_get_weight_shape(const dc_layer *layer, int32_t index, int64_t *shape, int32_t *ndim);

/** Writes initial weights: matrices are normal with mean 0, biases 0, scales 1. The numbers are a function of the
 *  layer's seed and id and of the weight and element alone.
 *  layer    the layer
 *  weights  [out] the 12 tensors, shapes as in enum dc_layer_weight, of the layer's dtype or float32, the caller's
 *           memory
 *  tensor_size  bytes from one tensor to the next: sizeof(dc_tensor)
 *  count    of tensors: DC_LAYER_WEIGHTS
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE, on CUDA DC_E_NO_MEMORY (behind which the first of them may have
 *  been written), DC_E_DEVICE. [any] Since 0.1. */
DC_API dc_status dc_layer_init_weights(const dc_layer *layer, dc_tensor *weights, size_t tensor_size, int64_t count);

/** Computes the layer and keeps in call->reserve what dc_layer_backward() needs.
 *  layer    the layer
 *  call     the call; workspace and reserve of at least the cost's forward bytes
 *  weights  [in] the 12 tensors, shapes as in enum dc_layer_weight, of the layer's dtype
 *  tensor_size, count  as in dc_layer_init_weights
 *  input    [in] x, [B, S, H] or [N, H], of the layer's dtype
 *  output   [out] as input, the caller's memory; overlaps nothing else of the call
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE, DC_E_BUFFER_TOO_SMALL (workspace or reserve; the text has the
 *  bytes), DC_E_NO_MEMORY, DC_E_DEVICE. [any] Since 0.1. */
DC_API dc_status dc_layer_forward(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size, int64_t count,
                                  const dc_tensor *input, dc_tensor *output);

/** Computes the layer without dropout, and keeps nothing; the same bits as a forward with both ratios 0.
 *  layer    the layer
 *  call     the call; workspace of at least the cost's inference bytes. The reserve is not used
 *  weights  [in] as in dc_layer_forward
 *  tensor_size, count  as in dc_layer_init_weights
 *  input    [in] as in dc_layer_forward
 *  output   [out] as in dc_layer_forward
 *  Returns as dc_layer_forward. [any] Since 0.1. */
DC_API dc_status dc_layer_inference(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size, int64_t count,
                                    const dc_tensor *input, dc_tensor *output);

/** Computes the gradients. The reserve is read, so a second backward gives the same; batch, seq_length, cu_seqlens,
 *  mask and offset must be those of the forward.
 *  layer         the layer
 *  call          the call; workspace of at least the cost's backward bytes
 *  weights       [in] as in dc_layer_forward
 *  tensor_size, count  of weights and of grad_weights, as in dc_layer_init_weights
 *  input         [in] as in dc_layer_forward
 *  output        [in] the forward's, as in dc_layer_forward; needed by Post-LN with normalize_invertible, else it may
 *                be NULL
 *  grad_output   [in] gradient by the output, of its shape and the layer's dtype
 *  grad_input    [out] gradient by the input, of its shape; NULL: not wanted
 *  grad_weights  [in,out] 12 tensors, shapes as in enum dc_layer_weight, of grad_dtype, written or added to. One
 *                without a type (DC_TENSOR_INIT) is not wanted
 *  Returns as dc_layer_forward; DC_E_STATE (config.training is -1). [any] Since 0.1. */
DC_API dc_status dc_layer_backward(dc_layer *layer, const dc_layer_call *call, const dc_tensor *weights, size_t tensor_size, int64_t count,
                                   const dc_tensor *input, const dc_tensor *output, const dc_tensor *grad_output,
                                   dc_tensor *grad_input, dc_tensor *grad_weights);

/** The dropout mask that a forward with this call's offset applies, for tests: 1 kept, 0 dropped. Kept values are
 *  multiplied by *scale = 65536 / (65536 - round(65536 p)), so the mean stays exactly. With config.training = -1 all
 *  are kept, and *scale is 1.
 *  layer  the layer
 *  call   batch, seq_length and offset count; cu_seqlens must be NULL: a packed sample has the dense one's mask
 *  site   enum dc_dropout_site
 *  mask   [out] of the site's shape, DC_UINT8 or DC_BOOL, the caller's memory
 *  scale  set; may be NULL
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE, on CUDA DC_E_NO_MEMORY, DC_E_DEVICE. [any] Since 0.1. */
DC_API dc_status dc_layer_get_dropout_mask(const dc_layer *layer, const dc_layer_call *call, int32_t site,
                                       dc_tensor *mask, double *scale);

/** Whose activations a plan counts. */
enum dc_layer_inventory {
  DC_LAYER_INVENTORY_LIBDC = 0,    /**< what dc_layer_get_cost() says of this layer */
  DC_LAYER_INVENTORY_DEEPSPEED = 1 /**< what DeepSpeed's kernel keeps by its sources; see dc_layer_plan */
};

/** The question to a plan. */
typedef struct dc_layer_plan_options {
  size_t struct_size;       /**< sizeof(dc_layer_plan_options) */
  int64_t seq_length;       /**< S, 1 to config.max_seq_length */
  int64_t micro_batch;      /**< samples of a rank in one pass, 1 to config.batch_size; 0 = as many as fit */
  int64_t memory_bytes;     /**< of a rank's device, >= 1 */
  int64_t other_bytes;      /**< taken by what a plan does not count, >= 0: the head's activations, reduction buckets,
                                 the allocator's gaps, the driver */
  int64_t other_parameters; /**< of the model outside its layers, >= 0: embeddings, head */
  int64_t ranks;            /**< among which ZeRO shards, up to 2^31 - 1; 0 = 1 */
  int32_t stage;            /**< of ZeRO, 0 to 3 */
  int32_t moments;          /**< float32 numbers that the optimizer keeps for a parameter, 0 to 8: 2 of Adam and LAMB,
                                 1 of momentum, 0 of plain descent */
  int32_t inventory;        /**< enum dc_layer_inventory */
  int32_t reserved0;        /**< 0 */
} dc_layer_plan_options;

/** A dc_layer_plan_options to be filled in. */
#define DC_LAYER_PLAN_OPTIONS_INIT {sizeof(dc_layer_plan_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_LAYER_PLAN_OPTIONS_INIT as a function.
 *  options      written; NULL does nothing
 *  struct_size  the caller's sizeof(dc_layer_plan_options)
 *  [any] Since 0.1. */
DC_API void dc_layer_plan_options_init(dc_layer_plan_options *options, size_t struct_size);

/** The memory of a rank that trains a stack of config.num_hidden_layers layers. With P parameters in all, e bytes of
 *  dtype, R ranks, and x / R rounded up:
 *    weights     e P;                         stage 3: e P / R
 *    gradients   bytes of grad_dtype times P; stages 2 and 3: that / R
 *    optimizer   4 P (moments + 1 where dtype has 16 bits: the weights in float32); stages 1 to 3: that / R
 *    working     stages 2 and 3: one layer's gradients; stage 3: also the weights of two layers, at work and next
 *    kept        libdc: each layer's dc_layer_cost.kept_bytes, and the last one's output. DeepSpeed, with S rounded up
 *                to 16: layers (N H (e (8 - 2 inv) + 2) + N I e (2 - gelu) + B A S^2 (2 e + 1 - e attn) + 4 e N)
 *    workspace   libdc: the larger of forward and backward; DeepSpeed: e (6 N H + max(N I, 2 B A S^2) + 2 N I gelu);
 *                and the gradients that enter and leave a layer
 *  Source: Rajbhandari et al. 2020 (arXiv 1910.02054) for the states, DeepSpeed's csrc/transformer for its layer. */
typedef struct dc_layer_plan {
  size_t struct_size;      /**< sizeof(dc_layer_plan) */
  int64_t micro_batch;     /**< the options', or the most samples that fit; 0: not one does */
  int64_t parameters;      /**< P */
  int64_t weight_bytes;    /**< of a rank, as the following */
  int64_t grad_bytes;      /**< gradients */
  int64_t optimizer_bytes; /**< the optimizer's states */
  int64_t working_bytes;   /**< what is whole for a while */
  int64_t kept_bytes;      /**< activations of micro_batch samples between forward and backward */
  int64_t workspace_bytes; /**< of the layer at work */
  int64_t total_bytes;     /**< the sum, other_bytes included */
} dc_layer_plan;

/** A dc_layer_plan to be filled in. */
#define DC_LAYER_PLAN_INIT {sizeof(dc_layer_plan), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_LAYER_PLAN_INIT as a function.
 *  plan         written; NULL does nothing
 *  struct_size  the caller's sizeof(dc_layer_plan)
 *  [any] Since 0.1. */
DC_API void dc_layer_plan_init(dc_layer_plan *plan, size_t struct_size);

/** Counts the memory of training a stack of layers, or finds the largest micro-batch that a device can hold. Nothing is
 *  made or allocated.
 *  config   of each layer, as in dc_layer_create; training must not be -1
 *  options  what is asked; not NULL
 *  plan     written
 *  Returns DC_OK, also when micro_batch does not fit or none does; DC_E_INVALID, DC_E_DTYPE, DC_E_UNSUPPORTED as
 *  dc_layer_create; DC_E_SHAPE (a sum passes 2^63). [any] Since 0.1. */
DC_API dc_status dc_layer_get_plan(const dc_layer_config *config, const dc_layer_plan_options *options,
                                   dc_layer_plan *plan);

/* ==== 13. Second-order operators ====================================================================================
 *
 * The operators behind Shampoo, K-FAC and differential privacy: powers and roots of symmetric matrices, Kronecker
 * products, batched and bounded matrix products, gradients and norms per sample. float32 and float64; all matrices
 * row-major, `[b, n, n]` a batch of b, `[n, n]` one. Calls block until done and spread their work over the handle's
 * threads, batches by matrix; the bits do not depend on the number of threads. To run one beside other work, put it on
 * a stream with dc_stream_call().
 *
 * Inputs are read through their strides, so a transposed view, a slice of rows or a batch that repeats one matrix
 * (stride 0) needs no copy where it says "any strides". Outputs are contiguous, and may not overlap inputs, nor each
 * other, unless it says so: DC_E_INVALID. Arguments are all checked before anything is written.
 *
 * Functions that say "CPU and CUDA" also compute on a handle's CUDA device, of tensors in its memory, whose elements
 * lie at multiples of their size (DC_E_INVALID). Products are cuBLASLt's, float32 not through TF32; the rest is
 * kernels. The call blocks all the same. Results agree with the CPU's within rounding, and the bits are those of every
 * run with the same shapes. Eigendecompositions are cuSOLVER's there: those of a batch together from CUDA 12.8 on, else
 * one after the other. There DC_E_UNSUPPORTED means that cuBLASLt or cuSOLVER is missing, and DC_E_DEVICE that the
 * device failed.
 * Source: Golub and Van Loan, Matrix Computations, 4th edition; single functions name theirs. */

/** The threads, the scratch memory and the LAPACK of second-order calls, which it serialises. */
typedef struct dc_linalg dc_linalg;

/** How a handle works. */
typedef struct dc_linalg_options {
  size_t struct_size; /**< sizeof(dc_linalg_options) */
  int32_t threads;    /**< the caller's included, up to 1024; 0 = as many as the process may run on */
  int32_t plain;      /**< 1: libdc's own eigensolver even where a LAPACK is found; 0 = default. CUDA: not read */
} dc_linalg_options;

/** A dc_linalg_options of zeros, but for its size. */
#define DC_LINALG_OPTIONS_INIT {sizeof(dc_linalg_options), 0, 0}

/** DC_LINALG_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_linalg_options_init(dc_linalg_options *options, size_t struct_size);

/** Makes a handle on a device, which it keeps alive.
 *  On a CUDA device it is for what says "CPU and CUDA" below, and for all optimizers.
 *  Returns DC_OK; DC_E_INVALID (threads negative or over 1024, plain not 0 or 1), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_linalg_create(dc_device *device, const dc_linalg_options *options, dc_linalg **linalg);
/** Frees a handle.
 *  linalg  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_linalg_destroy(dc_linalg *linalg);
/** Where eigendecompositions come from: the file name of the LAPACK library, "libdc", or on a CUDA device "cuSOLVER".
 *  linalg  a handle; NULL gives ""
 *  Lives as long as the handle. [any] Since 0.1. */
DC_API const char *dc_linalg_solver(const dc_linalg *linalg);

/** Asks for scratch sizes: until dc_linalg_end_query(), calls with this handle check their arguments, but compute and
 *  write nothing. Returns DC_OK; DC_E_STATE (a query has begun). [handle] Since 0.1. */
DC_API dc_status dc_linalg_begin_query(dc_linalg *linalg);
/** Ends a query.
 *  bytes  set to the most scratch memory that any of the calls would have used
 *  Returns DC_OK; DC_E_STATE (none has begun), DC_E_INVALID. [handle] Since 0.1. */
DC_API dc_status dc_linalg_end_query(dc_linalg *linalg, int64_t *bytes);
/** Gives the handle scratch memory of the caller's: calls allocate nothing on its device from then on, and one that needs
 *  more fails with DC_E_BUFFER_TOO_SMALL.
 *  memory  [in,out] 64-byte aligned, on the handle's device, the caller's until replaced or the handle is destroyed.
 *          NULL: the handle's own again, which grows to what the largest call needed and stays until the handle is
 *          destroyed
 *  bytes   of memory; 0 for NULL
 *  Returns DC_OK; DC_E_INVALID (one of the two is 0, or memory is not 64-byte aligned). [handle] Since 0.1. */
DC_API dc_status dc_linalg_set_workspace(dc_linalg *linalg, void *memory, int64_t bytes);

/* ---- symmetric matrices ---- */

/** How a symmetric matrix is read. */
enum dc_symmetry {
  DC_SYMMETRY_CHECK = 0, /**< both triangles must agree to 64 * n * epsilon of the largest entry; then their mean */
  DC_SYMMETRY_MEAN = 1,  /**< (A + A^T) / 2, whatever A is */
  DC_SYMMETRY_LOWER = 2, /**< the lower triangle; the upper one must be finite all the same */
  DC_SYMMETRY_UPPER = 3  /**< the upper triangle */
};

/** The treatment of negative eigenvalues in a power. Those above -64 * n * epsilon * (the largest) are rounding, and
 *  count as zero in every mode. */
enum dc_negative {
  DC_NEGATIVE_REFUSE = 0, /**< DC_E_NOT_POSITIVE */
  DC_NEGATIVE_CLAMP = 1,  /**< zero, before epsilon is added */
  DC_NEGATIVE_FLOOR = 2   /**< max(eigenvalue + eps_abs, eps_abs): a floor under what epsilon was added to already.
                               Torchium's matrix_sqrt_inv_eigen; eps_rel and rank_rtol must be 0 */
};

/** How symmetric matrices are read, computed and regularised. */
typedef struct dc_spectral_options {
  size_t struct_size; /**< sizeof(dc_spectral_options) */
  double eps_abs;     /**< >= 0; each eigenvalue is raised by max(eps_abs, eps_rel * the largest) */
  double eps_rel;     /**< >= 0 */
  double rank_rtol;   /**< pseudo-inverse: eigenvalues up to rank_rtol * the largest become 0, also under a negative
                           power. Below 1; -1 = n * epsilon of the type; 0 = default = off. Needs
                           eps_abs = eps_rel = 0 */
  double tolerance;   /**< dc_matrix_inverse_root: > 0 lets a basis be used again, see there; 0 = default = off */
  int32_t symmetry;   /**< enum dc_symmetry; 0 = default = DC_SYMMETRY_CHECK */
  int32_t negative;   /**< enum dc_negative; 0 = default = DC_NEGATIVE_REFUSE */
  int32_t precision;  /**< DC_FLOAT32 or DC_FLOAT64: the type of the decomposition. DC_DTYPE_NONE = default: float64,
                           but float32 for float32 matrices where epsilon is at least 64 * n * 2^-24 of the largest
                           eigenvalue's bound, so that the small eigenvalues' rounding hides under it; dc_eigh: the
                           matrix's own. For an inverse root that takes no decomposition, see there */
  int32_t descending; /**< dc_eigh: 1: the largest eigenvalue first; 0 = default: the smallest */
} dc_spectral_options;

/** A dc_spectral_options of zeros, but for its size. */
#define DC_SPECTRAL_OPTIONS_INIT {sizeof(dc_spectral_options), 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_SPECTRAL_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_spectral_options_init(dc_spectral_options *options, size_t struct_size);

/** How a result came about. */
enum dc_spectral_path {
  DC_PATH_NONE = 0,    /**< nothing was computed: see status */
  DC_PATH_FRESH = 1,   /**< a decomposition in the type asked for */
  DC_PATH_RETRIED = 2, /**< it failed in float32 and was repeated in float64 */
  DC_PATH_PLAIN = 3,   /**< libdc's own solver: asked for, or no LAPACK was found, or LAPACK failed in float64 too; CUDA:
                            never */
  DC_PATH_WARM = 4     /**< from the basis given, without a decomposition */
};

/** The result's details for one matrix of a batch. */
typedef struct dc_spectral_info {
  int32_t status;    /**< this matrix's dc_status; its outputs are untouched unless DC_OK */
  int32_t path;      /**< enum dc_spectral_path */
  double smallest;   /**< smallest eigenvalue, before epsilon */
  double largest;    /**< largest eigenvalue, before epsilon */
  double epsilon;    /**< what was added to each */
  double asymmetry;  /**< largest |a_ij - a_ji| over the largest |a_ij| */
  double change;     /**< warm: the estimate that was held against tolerance; 0 without a basis */
} dc_spectral_info;

/** Eigenvalues and eigenvectors of symmetric matrices, A = V diag(values) V^T.
 *  a        [in] symmetric matrices, [n, n] or [b, n, n], any strides; float32 or float64
 *  options  symmetry, precision, descending; NULL = defaults
 *  values   [out] [n] or [b, n], ascending unless descending = 1; a's type
 *  vectors  [out] a's shape, column j belongs to value j; NULL = values alone
 *  Returns DC_OK, or the status of the first matrix that failed; the others of the batch are computed all the same.
 *  A matrix fails with DC_E_NOT_FINITE (NaN or infinity in either triangle, or an eigenvalue beyond a's type),
 *  DC_E_NOT_SYMMETRIC, DC_E_NOT_CONVERGED.
 *  For the call: DC_E_SHAPE (not square, or shapes disagree), DC_E_DTYPE, DC_E_INVALID, DC_E_NO_MEMORY,
 *  DC_E_BUFFER_TOO_SMALL, DC_E_UNSUPPORTED (more than 32766 rows on the CPU, with a LAPACK: its integers have 32
 *  bits). n = 0 and b = 0 are fine. A float32 decomposition that fails is retried in float64. A
 *  is brought to tridiagonal form in float64; the solver of that is LAPACK's stedc. Golub and Van Loan, Matrix
 *  Computations, chapter 8. CPU and CUDA, where cuSOLVER does all of it in options.precision. [handle] Since 0.1. */
DC_API dc_status dc_eigh(dc_linalg *linalg, const dc_tensor *a, const dc_spectral_options *options, dc_tensor *values,
                         dc_tensor *vectors, dc_spectral_info *info, size_t info_size);

/** Powers of symmetric positive semidefinite matrices: out = V diag((values + epsilon)^power) V^T, exactly symmetric.
 *  a        [in] as in dc_eigh
 *  power    any real number; 0 gives the identity (with rank_rtol, the projection on the range)
 *  out      [out] a's shape and type
 *  Returns what dc_eigh does, for the same reasons. A matrix also fails with DC_E_NOT_POSITIVE (a negative eigenvalue
 *  beyond rounding, or a negative power of an eigenvalue that is zero with no epsilon). It fails with DC_E_NOT_FINITE
 *  if the result does not fit its type. DC_E_INVALID (power is NaN or infinite). DC_OK. CPU and CUDA.
 *  [handle] Since 0.1. */
DC_API dc_status dc_matrix_power(dc_linalg *linalg, const dc_tensor *a, double power,
                                 const dc_spectral_options *options, dc_tensor *out, dc_spectral_info *info,
                                 size_t info_size);

/** Inverse roots, out = (A + epsilon I)^(-1/root): a dc_matrix_power that is cheaper for a matrix that changed little.
 *  Roots 1 to 8 without a basis and without rank_rtol need no eigenvectors (nor does dc_matrix_power with power = -1/1
 *  to -1/8). T = Q^T A Q is tridiagonal, Q a product of reflections. (T + epsilon I)^(-1/root) is a sum of 64 inverses
 *  by Gauss and Jacobi's rule, and Q is multiplied back around it, all in float64. Only that last product is in float32
 *  for a float32 matrix whose root has eigenvalues at most 64 times apart. It loses 1e-6 of the root's norm, which
 *  options.precision = DC_FLOAT64 keeps. Matrices with regularised eigenvalues that are farther apart than 1e12 or
 *  negative are decomposed from T on. The plain solver and a CUDA device decompose all. Source: Hale, Higham and
 *  Trefethen 2008 (doi 10.1137/070700607) for sums of inverses after an elliptic substitution.
 *  a        [in] as in dc_eigh
 *  root     1 to 64; Shampoo's is 4 for a matrix
 *  basis    [in,out] a's shape, float32 or float64: eigenvectors of an earlier call in its columns; NULL =
 *           none. Set to the new ones by each decomposition. Computation is in basis' type, so float64 keeps the small
 *           eigenvalues of a float32 matrix accurate
 *  out      [out] a's shape and type
 *  With options.tolerance > 0 basis is read first: B = Q^T A Q is nearly diagonal when A changed little. The root of B
 *  is then that of its diagonal plus the first-order term of its off-diagonal part E (Daletskii and Krein; divided
 *  differences without cancellation). The relative error is of the second order, estimated by power iteration as
 *  |D^-1/2 E D^-1/2|^2, D the regularised diagonal. Where that exceeds tolerance, or basis is not orthonormal, the
 *  matrix is decomposed afresh; info.path tells which. It costs four products of matrices, three of them half, against
 *  about nine for a decomposition. The last two are in float32 for a float32 matrix, where tolerance is at least
 *  n * 2^-23. basis must be set (to zeros, say) before the first such call.
 *  rank_rtol and DC_NEGATIVE_FLOOR cannot be combined with tolerance. Source: Gupta, Koren and Singer 2018 (arXiv
 *  1802.09568) for the use; Higham, Functions of Matrices, theorem 3.11, for the expansion.
 *  Returns what dc_matrix_power does. DC_OK; DC_E_INVALID (root; tolerance without a basis), DC_E_DTYPE (basis is not
 *  of options.precision). CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_matrix_inverse_root(dc_linalg *linalg, const dc_tensor *a, int32_t root,
                                        const dc_spectral_options *options, dc_tensor *basis, dc_tensor *out,
                                        dc_spectral_info *info, size_t info_size);

/** How dc_matrix_inverse_root_newton() works. */
typedef struct dc_iteration_options {
  size_t struct_size;     /**< sizeof(dc_iteration_options) */
  double eps_abs;         /**< >= 0; each eigenvalue is raised by max(eps_abs, eps_rel * bound), bound the largest sum of
                               a row's magnitudes; that must be positive */
  double eps_rel;         /**< >= 0 */
  double residual;        /**< the largest entry of |X^root (A + epsilon I) - I| that is allowed; 0 = default = what
                               rounding makes of a right result, 16 * epsilon of the type * (bound + epsilon) / epsilon */
  int32_t iterations;     /**< the most; 0 = default = 100 */
  int32_t symmetry;       /**< enum dc_symmetry; 0 = default = DC_SYMMETRY_CHECK */
  int32_t precision;      /**< DC_FLOAT32 or DC_FLOAT64: the type of the products; DC_DTYPE_NONE = default: the matrix's */
  int32_t reserved0;      /**< 0 */
} dc_iteration_options;

/** A dc_iteration_options of zeros, but for its size. */
#define DC_ITERATION_OPTIONS_INIT {sizeof(dc_iteration_options), 0, 0, 0, 0, 0, 0, 0}

/** DC_ITERATION_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_iteration_options_init(dc_iteration_options *options, size_t struct_size);

/** The details of one matrix's iteration. */
typedef struct dc_iteration_info {
  int32_t status;     /**< this matrix's dc_status */
  int32_t iterations; /**< steps that were taken */
  double residual;    /**< largest entry of |X^root (A + epsilon I) - I| */
  double bound;       /**< on the largest eigenvalue */
  double epsilon;     /**< what was added to each */
  double asymmetry;   /**< largest |a_ij - a_ji| over the largest |a_ij| */
} dc_iteration_info;

/** Inverse roots by products of matrices alone, out = (A + epsilon I)^(-1/root): coupled Newton iteration, each step with
 *  the two numbers that lift the least eigenvalue most. No LAPACK; on CPUs an eigendecomposition takes less time.
 *  a     [in] as in dc_eigh
 *  root  1 to 64
 *  out   [out] a's shape and type
 *  info  NULL, or one entry a matrix; info_size: sizeof(dc_iteration_info)
 *  Returns what dc_eigh does, for the same reasons. A matrix also fails with DC_E_NOT_POSITIVE (epsilon is 0), or
 *  DC_E_NOT_FINITE (the result does not fit its type). DC_E_NOT_CONVERGED means that iterations ended too early, or
 *  that residual is too large. It also means that the distance of the product from I grew by more than a fifth: A has a
 *  negative eigenvalue beyond epsilon. Then out holds the best iterate. DC_OK; DC_E_INVALID (root, options). Source:
 *  Guo and Higham 2006; the step's numbers minimise the largest distance over an interval. CPU and CUDA.
 *  [handle] Since 0.1. */
DC_API dc_status dc_matrix_inverse_root_newton(dc_linalg *linalg, const dc_tensor *a, int32_t root,
                                               const dc_iteration_options *options, dc_tensor *out,
                                               dc_iteration_info *info, size_t info_size);

/** Polynomials of dc_orthogonalize(). Bands are those of the singular values of out, for those of a that are at least
 *  1e-3 (DC_ORTHOGONAL_MUON: 5e-3) of its Frobenius norm; smaller ones stay below the band. */
enum dc_orthogonal {
  DC_ORTHOGONAL_EXPRESS = 0, /**< Polar Express, 8 steps: 1, but for rounding; after 5 steps 0.84 to 1.13. Source: Amsel
                                  et al. 2025 (arXiv 2505.16932) */
  DC_ORTHOGONAL_MUON = 1     /**< (3.4445, -4.7750, 2.0315) in each of 5 steps, as Muon has it: 0.68 to 1.16 */
};

/** The nearest matrix with orthonormal rows or columns, U V^T of a's singular value decomposition, by products alone
 *  (Newton and Schulz): Muon's step. Zeros stay zeros.
 *  a           [in] matrices, [m, n] or [b, m, n], any strides; float32 or float64
 *  polynomial  enum dc_orthogonal
 *  steps       1 to 64; 0 = the polynomial's own number
 *  out         [out] a's shape and type; that of a transposed a has the same bits, unless a is square
 *  Returns DC_OK; DC_E_NOT_FINITE (a NaN or an infinity: its place), DC_E_INVALID (polynomial, steps), DC_E_SHAPE,
 *  DC_E_DTYPE, DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_orthogonalize(dc_linalg *linalg, const dc_tensor *a, int32_t polynomial, int32_t steps,
                                  dc_tensor *out);

/* ---- Kronecker products ----
 *
 * kron(A, B)[i * p + k, j * q + l] = A[i, j] * B[k, l] for A [m, n] and B [p, q]. With vec taken row by row,
 * kron(A, B) vec(X) = vec(A X B^T); with vec taken column by column, kron(A, B) vec(X) = vec(B X A^T): swap A and B. */

/** The Kronecker product, written out.
 *  a, b   [in] [m, n] and [p, q], any strides; float32 or float64, one type
 *  out    [out] [m * p, n * q]
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_kron(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, dc_tensor *out);

/** A Kronecker product applied without being written out: out = A X B^T is kron(a, b) times x, taken row by row. The
 *  cheaper side first: at most 2 m n q + 2 m q p flops.
 *  a, b   [in] [m, n] and [p, q]; strides as in dc_batch_matmul; float32 or float64, one type
 *  x      [in] [n, q] or [b, n, q], strides as in dc_batch_matmul
 *  out    [out] [m, p] or [b, m, p]; may be x where the shapes agree
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_kron_apply(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, const dc_tensor *x,
                               dc_tensor *out);

/** Solves with a damped Kronecker product, out = (kron(A, B) + damping I)^-1 x, from the eigendecompositions of A and
 *  B: four products of matrices. Source: Grosse and Martens 2016 (arXiv 1602.01407), K-FAC's step.
 *  a_vectors, b_vectors  [in] [m, m] and [p, p], as dc_eigh gives them
 *  a_values, b_values    [in] [m] and [p], as dc_eigh gives them
 *  damping  >= 0; with 0, all products of eigenvalues must be positive
 *  x        [in] [m, p]; float32 or float64, the type of all
 *  out      [out] [m, p]; may be x
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID, DC_E_NOT_POSITIVE (a product plus damping is not positive),
 *  DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_kron_solve(dc_linalg *linalg, const dc_tensor *a_vectors, const dc_tensor *a_values,
                               const dc_tensor *b_vectors, const dc_tensor *b_values, double damping,
                               const dc_tensor *x, dc_tensor *out);

/** The Kronecker product nearest to x in the Frobenius norm. Symmetric positive semidefinite x gives such factors.
 *  Source: Van Loan and Pitsianis 1993; power iteration on the rearranged matrix.
 *  x      [in] [m * p, n * q], any strides; float32 or float64
 *  a, b   [out] [m, n] and [p, q]: their shapes say how x is cut; both get the same norm, but for rounding
 *  residual  |x - kron(a, b)| / |x|; 0 for x = 0; may be NULL
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_NOT_FINITE, DC_E_NOT_CONVERGED, DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL.
 *  CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_kron_nearest(dc_linalg *linalg, const dc_tensor *x, dc_tensor *a, dc_tensor *b, double *residual);

/* ---- products of matrices ---- */

/** Products of batches of matrices: out = alpha A B + beta out.
 *  a, b     [in] [b, m, k] and [b, k, n]; any strides in which rows or columns are dense (transposed views, slices).
 *           One without the batch, or with stride 0 there, serves all. float32, float64, float16 or bfloat16, one type;
 *           16-bit types are summed in float32
 *  alpha, beta  finite; beta 0: out is not read
 *  out      [in,out] [b, m, n] of the inputs' type, or float32 for 16-bit ones. k = 0: beta out
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID (alpha or beta not finite), on CUDA DC_E_NO_MEMORY and
 *  DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_batch_matmul(dc_linalg *linalg, const dc_tensor *a, const dc_tensor *b, double alpha, double beta,
                                 dc_tensor *out);

/** A matrix that may lie in a file. */
typedef struct dc_matrix_source {
  size_t struct_size;      /**< sizeof(dc_matrix_source) */
  dc_tensor *tensor;       /**< [in,out] [rows, cols], read or, of an out, written. With in_file data is NULL, and the
                                file has the matrix, row-major without gaps */
  int64_t offset;          /**< in_file: of its first element, in bytes. Else 0 */
  int32_t fd;              /**< in_file: an open file, read by pread() and written by pwrite(), not for appending;
                                it stays open. Else 0 */
  int32_t in_file;         /**< 1: the matrix is in the file fd, from offset on; 0: in memory */
} dc_matrix_source;

/** A dc_matrix_source of zeros, but for its size. */
#define DC_MATRIX_SOURCE_INIT {sizeof(dc_matrix_source), NULL, 0, 0, 0}

/** DC_MATRIX_SOURCE_INIT as a function.
 *  source  [view] the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_matrix_source_init(dc_matrix_source *source, size_t struct_size);

/** A product of matrices, out = a b, with at most budget_bytes of memory beside the operands' own. Operands in files go
 *  through it in tiles, chosen so that calls, copies and packing cost least. Source: Hong and Kung 1981, the bound
 *  on the bytes that must be read.
 *  a, b     [in] [m, k] and [k, n], each in memory (strides as in dc_batch_matmul) or in a file; types as there
 *  out      [out] [m, n], contiguous in memory or in a file; float64 for float64 inputs, else float32. A file that is
 *           open for reading as well takes fewer and longer writes
 *  budget_bytes  >= 1; nothing of it is needed where all three are in memory. The threads' scratch of 7 MiB each, which
 *           all products share, is not counted. CUDA: of the device's memory; files go through 8 MiB of pinned memory
 *           beside it, which the handle keeps
 *  needed   set to the least budget that does, when the budget is too small; may be NULL
 *  k is summed in pieces where whole rows do not fit. A file is written only where the product goes; after
 *  DC_E_SYSTEM (a read or write failed) or DC_E_DEVICE out's contents are undefined.
 *  Returns DC_OK; DC_E_INVALID (budget_bytes < 1, a bad file), DC_E_BUFFER_TOO_SMALL (needed is set), DC_E_SHAPE,
 *  DC_E_DTYPE, DC_E_SYSTEM, DC_E_NO_MEMORY. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_matmul_bounded(dc_linalg *linalg, const dc_matrix_source *a, const dc_matrix_source *b,
                                   dc_matrix_source *out, int64_t budget_bytes, int64_t *needed);

/* ---- gradients per sample ----
 *
 * They are of a layer's input x and the gradient delta of its output, both with the batch of N samples in front. delta
 * is that of each sample's own loss (for a mean over the batch, times N). Gradients never go through a loop over the
 * model, and norms never through gradients. */

/** Kinds of layers. T stands for any number of positions, also none. */
enum dc_sample_kind {
  DC_SAMPLE_LINEAR = 1,     /**< x [N, T, i], delta [N, T, o]; weight [o, i], bias [o] */
  DC_SAMPLE_CONV = 2,       /**< x [N, c, spatial], delta [N, o, spatial'], 1 to 3 spatial dimensions; weight
                                 [o, c / groups, kernel], bias [o] */
  DC_SAMPLE_EMBEDDING = 3,  /**< x [N, T] int64 or int32, delta [N, T, d]; weight [rows, d]; no bias */
  DC_SAMPLE_LAYER_NORM = 4, /**< x and delta [N, T, d]; weight [d] (gamma), bias [d] (beta) */
  DC_SAMPLE_RMS_NORM = 5,   /**< as DC_SAMPLE_LAYER_NORM, without the mean and without a bias */
  DC_SAMPLE_BAG_SUM = 6,    /**< x [N, T] int64 or int32, delta [N, d]: the sum of T rows of an embedding, without the
                                 padding row; weight [rows, d]; no bias */
  DC_SAMPLE_BAG_MEAN = 7,   /**< their mean: over those that are not the padding row */
  DC_SAMPLE_GROUP_NORM = 8  /**< x and delta [N, c, T], normalised by groups of channels; weight and bias [c]. As many
                                 groups as channels: instance norm */
};

/** A layer's constants. */
typedef struct dc_sample_layer {
  size_t struct_size;  /**< sizeof(dc_sample_layer) */
  int32_t kind;        /**< enum dc_sample_kind */
  int32_t groups;      /**< convolution, group norm; 0 = default = 1 */
  int64_t kernel[3];   /**< convolution: one length a spatial dimension, the first first; 1 to 2^20 */
  int64_t stride[3];   /**< up to 2^20; 0 = default = 1 */
  int64_t padding[3];  /**< zeros in front, 0 to 2^20; what lies past the end counts as zero too */
  int64_t dilation[3]; /**< up to 2^20; 0 = default = 1 */
  int64_t rows;        /**< embedding: rows of the weight */
  int64_t padding_row; /**< has_padding_row: 0 to rows - 1, the row without a gradient. Else 0 */
  int64_t features;    /**< norms: d, the number of last elements that are normalised; 0 = default = the last length */
  double eps;          /**< norms: added to the variance; >= 0 */
  int32_t has_padding_row; /**< embedding: 1: padding_row has no gradient; 0 = default: all rows have one */
  int32_t reserved0;   /**< 0 */
} dc_sample_layer;

/** A dc_sample_layer of zeros, but for its size. */
#define DC_SAMPLE_LAYER_INIT {sizeof(dc_sample_layer),0,0,{0,0,0},{0,0,0},{0,0,0},{0,0,0},0,0,0,0,0,0}

/** DC_SAMPLE_LAYER_INIT as a function.
 *  layer  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_sample_layer_init(dc_sample_layer *layer, size_t struct_size);

/** Each sample's gradients, into the caller's memory.
 *  layer    its constants
 *  x, delta  [in] the layer's input and the gradient of its output, shapes as in enum dc_sample_kind; contiguous, one
 *           type, float32 or float64
 *  weight, bias  [out] [N, and the weight's or bias' own shape]; NULL = not wanted. Old contents are not read
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID (a number out of its range; an embedding's index outside rows:
 *  names its place), DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_per_sample_grads(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                                     const dc_tensor *delta, dc_tensor *weight, dc_tensor *bias);

/** Parts of a layer, for dc_per_sample_norms(). */
enum dc_sample_part {
  DC_PART_WEIGHT = 1, /**< the weight's gradient */
  DC_PART_BIAS = 2    /**< the bias' gradient */
};

/** Squares of the norms of the samples' gradients, without the gradients. They come from the products of positions, or,
 *  where that is more work (2 T T >= i o), from a few rows of one sample's gradient at a time. Source: Bu et al. 2022
 *  (arXiv 2205.10683).
 *  layer     as in dc_per_sample_grads
 *  x, delta  [in] as in dc_per_sample_grads
 *  parts       sum of enum dc_sample_part: which parts count
 *  accumulate  1: adds to squares, so that many layers make one norm; 0: replaces them
 *  squares     [in,out] [N] of delta's type; never negative, and NaN for a sample that has one, without touching others
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID, DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle]
 *  Since 0.1. */
DC_API dc_status dc_per_sample_norms(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                                     const dc_tensor *delta, int32_t parts, int32_t accumulate, dc_tensor *squares);

/** How much of each sample's gradient a bound on its norm lets through: factors[n] = min(1, max_norm /
 *  (sqrt(squares[n]) + 1e-6)), and 0 where squares[n] is NaN or infinite. Source: Abadi et al. 2016 (arXiv 1607.00133).
 *  squares  [in] [N], float32 or float64
 *  factors  [out] [N], the type of squares, whose memory it may be
 *  max_norm  > 0; infinity is allowed, and clips nothing
 *  Returns DC_OK; DC_E_INVALID, DC_E_SHAPE, DC_E_DTYPE. CPU and CUDA. [handle] Since 0.1. */
DC_API dc_status dc_clip_factors(dc_linalg *linalg, const dc_tensor *squares, double max_norm, dc_tensor *factors);

/** The sum over samples of factors[n] times the sample's gradient, without the gradients. Source: Bu et al. 2022 (arXiv
 *  2210.00038).
 *  layer     as in dc_per_sample_grads
 *  x, delta  [in] as in dc_per_sample_grads
 *  factors  [in] [N] of delta's type; NULL = all 1, and the result is the batch's gradient. A sample whose factor is 0
 *           is not read at all, so what is not finite there does no harm
 *  accumulate  1: adds to weight and bias; 0: replaces them
 *  weight, bias  [in,out] in their own shapes; NULL = not wanted
 *  Returns DC_OK; DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID, DC_E_NO_MEMORY, DC_E_BUFFER_TOO_SMALL. CPU and CUDA. [handle]
 *  Since 0.1. */
DC_API dc_status dc_clipped_grad_sum(dc_linalg *linalg, const dc_sample_layer *layer, const dc_tensor *x,
                                     const dc_tensor *delta, const dc_tensor *factors, int32_t accumulate,
                                     dc_tensor *weight, dc_tensor *bias);

/* ---- which devices there are, and their memory ---- */

/** 1 if a CUDA device can be opened, else 0. [any] Since 0.1. */
DC_API int32_t dc_is_cuda_available(void);
/** How many devices of a kind can be opened.
 *  kind  "cpu" or "cuda"; 0 for NULL and for others
 *  [any] Since 0.1. */
DC_API int32_t dc_device_count(const char *kind);
/** The device with most free memory among those that compute fast, "cpu" where there is no other: a name for
 *  dc_device_open().
 *  reason  set to why, in words; may be NULL
 *  Static, and so is the reason. [any] Since 0.1. */
DC_API const char *dc_get_optimal_device(const char **reason);

/** A device's memory, in bytes. */
typedef struct dc_device_memory {
  size_t struct_size;     /**< sizeof(dc_device_memory) */
  int64_t total_bytes;    /**< of the device; of the machine on the CPU, or of the control group where that is less */
  int64_t free_bytes;     /**< what can still be had, as the driver or the system says */
  int64_t reserved_bytes; /**< taken by libdc through this handle now */
  int64_t peak_bytes;     /**< most of that so far */
} dc_device_memory;

/** A dc_device_memory of zeros, but for its size. */
#define DC_DEVICE_MEMORY_INIT {sizeof(dc_device_memory), 0, 0, 0, 0}

/** DC_DEVICE_MEMORY_INIT as a function.
 *  memory  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_device_memory_init(dc_device_memory *memory, size_t struct_size);

/** The present use of a device's memory.
 *  memory  filled in; struct_size set by the caller
 *  Returns DC_OK; DC_E_INVALID, DC_E_SYSTEM (the system does not say).
 *  [any] Since 0.1. */
DC_API dc_status dc_device_get_memory(dc_device *device, dc_device_memory *memory);

/** Memory for a tensor: zeros, 256-byte aligned.
 *  shape, ndim  ndim lengths, 0 to 64; copied
 *  out     [view] of [shape]; struct_size set by the caller. Its data and its shape live until
 *          dc_buffer_release(out->buffer) gives them back
 *  Returns DC_OK; DC_E_SHAPE (a negative length, more than 2^56 elements), DC_E_DTYPE, DC_E_NO_MEMORY.
 *  [any] Since 0.1. */
DC_API dc_status dc_tensor_create(dc_device *device, const int64_t *shape, int32_t ndim, int32_t dtype,
                                  dc_tensor *out);

/* ==== 14. Optimizers ================================================================================================
 *
 * AdamW and SGD, Muon, Shampoo, SOAP and K-FAC, as one kind of handle: create, add the parameters, step. A parameter is
 * known by the order it was added in, its index; weights and gradients stay the caller's, the state is the handle's.
 * Weights and gradients may be parts of parameters, as ZeRO leaves them on a rank: the elements [offset, offset +
 * count) of the flattened tensor. An element's result does not depend on how the parameter is cut or on the number of
 * threads. So all stages give the same bits from the same gradients; AdamW's and SGD's do not depend on the instruction
 * set either.
 *
 * Muon, Shampoo, SOAP and K-FAC take a communicator where parameters are cut. They need whole gradients, share the work
 * of the blocks or layers out over the ranks, and communicate in steps, on a private copy. Calls are then collective:
 * the same on all ranks, but for offsets, counts and data. AdamW and SGD never communicate.
 *
 * Parameters belong to groups, which have their own options and learning rate; group 0 is there from the beginning.
 * 16-bit weights have a float32 copy in the state, which steps change; a weight that was changed since the last
 * step counts as it is. The optimizer knows no context: after a step on its shards call dc_context_params_updated().
 *
 * A step is done when the call returns, unless dc_optimizer_set_stream() has named a stream for it. The caller must
 * wait for work on weights and gradients that its own streams still do.
 *
 * On a CUDA device weights, gradients and state are memory of the device. Counts of the host are the exception: "step"
 * of all but AdamW, SGD and Muon without a communicator, "failures.B.D", "rooted.B" and "counts". AdamW's and SGD's
 * steps have the bits of the CPU's. Those of the others are the CPU's within rounding, and the same bits for any number
 * of ranks, whose comm must be able to move the device's memory. There SOAP's first bases are the host's work, and
 * without cuSOLVER so are the later ones. DC_E_UNSUPPORTED: cuBLASLt is missing; in the first step of Shampoo or of
 * K-FAC's layers cuSOLVER is. A CPU's saved state can be loaded there, and the other way round.
 *
 * Source: each kind names its own. */

/** An optimizer: options, parameters and state. */
typedef struct dc_optimizer dc_optimizer;

/** AdamW's options. Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); amsgrad: Reddi et al. 2018 (arXiv
 *  1904.09237). With gradient g and step t of the parameter, the lr of its group:
 *    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
 *    w = (1 - lr weight_decay) w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *  State: "exp_avg" m, "exp_avg_sq" v, with amsgrad "max_exp_avg_sq", the largest v so far, which takes its place. */
typedef struct dc_adamw_options {
  size_t struct_size;   /**< sizeof(dc_adamw_options) */
  double beta1;         /**< 0 < beta1 < 1; 0 = 0.9; -1 = none: m = g */
  double beta2;         /**< 0 < beta2 < 1; 0 = 0.999; -1 = none: v = g^2 */
  double eps;           /**< > 0; 0 = 1e-8; -1 = none */
  double weight_decay;  /**< >= 0 */
  int32_t amsgrad;      /**< 1: v never falls */
  int32_t maximize;     /**< 1: steps go up the gradient */
  int32_t check_finite; /**< 1: a step looks at all gradients first, and changes nothing when one is not finite */
  int32_t reserved0;    /**< 0 */
} dc_adamw_options;

/** A dc_adamw_options with all defaults. */
#define DC_ADAMW_OPTIONS_INIT {sizeof(dc_adamw_options), 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_ADAMW_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_adamw_options_init(dc_adamw_options *options, size_t struct_size);

/** Makes an AdamW, for parameters of any kind: it looks at single elements only.
 *  linalg     gives threads and device; may be destroyed before the optimizer
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_adamw_create(dc_linalg *linalg, const dc_adamw_options *options, dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_adamw_create; amsgrad must stay once the group has a state
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_adamw_set_group(dc_optimizer *optimizer, int32_t group, const dc_adamw_options *options);

/** SGD's options. Source: Sutskever et al. 2013 (ICML) for momentum and Nesterov's form, as PyTorch has them:
 *    g = g + weight_decay w;  b = g in the first step, then momentum b + (1 - dampening) g
 *    w = w - lr b;  nesterov: w = w - lr (g + momentum b);  momentum 0: w = w - lr g
 *  State: "momentum_buffer" b where momentum is not 0. */
typedef struct dc_sgd_options {
  size_t struct_size;   /**< sizeof(dc_sgd_options) */
  double momentum;      /**< 0 <= momentum < 1 */
  double dampening;     /**< 0 <= dampening <= 1 */
  double weight_decay;  /**< >= 0 */
  int32_t nesterov;     /**< 1: needs momentum > 0 and dampening = 0 */
  int32_t maximize;     /**< 1: steps go up the gradient */
  int32_t check_finite; /**< 1: as in dc_adamw_options */
  int32_t reserved0;    /**< 0 */
} dc_sgd_options;

/** A dc_sgd_options with all defaults. */
#define DC_SGD_OPTIONS_INIT {sizeof(dc_sgd_options), 0, 0, 0, 0, 0, 0, 0}

/** DC_SGD_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_sgd_options_init(dc_sgd_options *options, size_t struct_size);

/** Makes an SGD, for parameters of any kind.
 *  linalg     gives threads and device; may be destroyed before the optimizer
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_sgd_create(dc_linalg *linalg, const dc_sgd_options *options, dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_sgd_create; momentum must not appear or vanish once the group has a state
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_sgd_set_group(dc_optimizer *optimizer, int32_t group, const dc_sgd_options *options);

/** How a step of Shampoo gets its length. */
enum dc_graft {
  DC_GRAFT_ADAM = 0,    /**< g / (sqrt(v / (1 - graft_beta2^t)) + graft_eps), v the mean of g^2; the default */
  DC_GRAFT_NONE = 1,    /**< Shampoo's own */
  DC_GRAFT_SGD = 2,     /**< g */
  DC_GRAFT_ADAGRAD = 3, /**< g / (sqrt(sum of g^2) + graft_eps) */
  DC_GRAFT_RMSPROP = 4  /**< as DC_GRAFT_ADAM, without the division by 1 - graft_beta2^t */
};

/** Where weight decay is applied. */
enum dc_weight_decay {
  DC_DECAY_DECOUPLED = 0, /**< w = (1 - lr weight_decay) w, beside the step; the default */
  DC_DECAY_L2 = 1         /**< g = g + weight_decay w, before everything else */
};

/** Shampoo's options. Source: Gupta, Koren and Singer 2018 (arXiv 1802.09568); blocks, grafting and refreshing: Anil et
 *  al. 2020 (arXiv 2002.09018), Shi et al. 2023 (arXiv 2309.06497).
 *  A parameter's dimensions of 1 are dropped, small ones merged, and the rest is cut into blocks; a number counts as a
 *  vector of one. A block has a factor L_d = beta2 L_d + (1 - beta2) G_d G_d^T (beta2 = 1: the sum) for each of its k
 *  dimensions, G_d the block's gradient unfolded along d. The direction is the filtered gradient times each
 *  (L_d / (1 - beta2^t) + epsilon I)^(-1 / (2 k)), scaled to the length of the graft's. Until
 *  start_preconditioning_step it is the graft's, unless the block's roots were computed before. With graft
 *  DC_GRAFT_NONE these are Shampoo's own length, and the filtered gradient. Then w = (1 - lr weight_decay) w -
 *  lr direction.
 *  State, where a rank owns block B of a parameter: "exp_avg.B", "graft.B", "momentum.B" as far as the options need
 *  them, and "rooted.B", an int64, 1 once a root was computed. For dimension D "factor.B.D", "root.B.D",
 *  "failures.B.D", an int64, and with a tolerance "basis.B.D". */
typedef struct dc_shampoo_options {
  size_t struct_size;         /**< sizeof(dc_shampoo_options) */
  double beta1;               /**< of the filtered gradient, bias-corrected; 0 < beta1 < 1; 0 = 0.9; -1 = none: g */
  double beta2;               /**< of the factors; 0 < beta2 <= 1; 0 = 1: the sum. Below 1 bias-corrected */
  double eps_abs;             /**< of the roots, as in dc_spectral_options; 0 = 1e-12; -1 = none */
  double eps_rel;             /**< of the roots; 0 = 1e-6; -1 = none */
  double tolerance;           /**< > 0: roots reuse a basis, as in dc_spectral_options, which is kept in float64;
                                   0 = default = none: each root is computed alone, which costs less unless
                                   factors change slowly */
  double graft_beta2;         /**< of the graft's v; 0 < graft_beta2 < 1; 0 = 0.999 */
  double graft_eps;           /**< > 0; 0 = 1e-8 */
  double weight_decay;        /**< >= 0 */
  double momentum;            /**< 0 <= momentum < 1: b = momentum b + direction, after the graft */
  int64_t max_block;          /**< longest side of a block, 1 to 16384; 0 = 1024 */
  int64_t merge_below;        /**< neighbouring dimensions are merged while their product is at most this and two are
                                   left, from the last one on; 0 = max_block; -1 = none */
  int64_t precondition_frequency;     /**< steps from one refresh of the roots to the next, >= 1; 0 = 1 */
  int64_t start_preconditioning_step; /**< roots are computed from this step on, >= 1; 0 = precondition_frequency */
  int32_t root;               /**< 1 to 64: instead of 2 k; 0 = default */
  int32_t graft;              /**< enum dc_graft */
  int32_t decay;              /**< enum dc_weight_decay */
  int32_t nesterov;           /**< 1: the step is direction + momentum b; needs momentum > 0 */
  int32_t tolerated_failures; /**< refreshes of one root that may fail in a row, its last good one (at first the
                                   identity) being used. After one more, steps fail with DC_E_NOT_CONVERGED and change
                                   nothing. 0 = 3; -1 = none */
  int32_t reserved0;          /**< 0 */
} dc_shampoo_options;

/** A dc_shampoo_options with all defaults. */
#define DC_SHAMPOO_OPTIONS_INIT {sizeof(dc_shampoo_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_SHAMPOO_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_shampoo_options_init(dc_shampoo_options *options, size_t struct_size);

/** Makes a Shampoo. Gradients are always checked first: one that is not finite is DC_E_NOT_FINITE, on every rank, and
 *  changes nothing on any. So is one of 2^50 and more, beyond which its squares would soon not fit float32.
 *  linalg     gives threads, device and solver; may be destroyed before the optimizer
 *  comm       the ranks that have parts of the parameters; NULL = one rank. Copied as by dc_comm_dup()
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_NO_MEMORY, DC_E_UNSUPPORTED (a CUDA device without
 *  cuBLASLt, or whose memory comm cannot move), and what dc_comm_dup returns. [any, collective] Since 0.1. */
DC_API dc_status dc_shampoo_create(dc_linalg *linalg, dc_comm *comm, const dc_shampoo_options *options,
                                   dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_shampoo_create. Where the group has parameters, what decides the shape of their state must stay:
 *           max_block, merge_below, and whether there are beta1, momentum, tolerance, and a graft with a v
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_shampoo_set_group(dc_optimizer *optimizer, int32_t group, const dc_shampoo_options *options);

/** SOAP's options. Source: Vyas et al. 2024 (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors.
 *  Blocks are Shampoo's. A side of at most max_precond_dim has a factor L_d = c L_d + (1 - c) G_d G_d^T,
 *  c = shampoo_beta; longer sides, and blocks of one dimension, have none. Q_d are the eigenvectors of L_d, the largest
 *  first. They are computed in the first step, which changes no weight. Then, every precondition_frequency steps,
 *  columns are sorted by the diagonal of Q_d^T L_d Q_d, and Q_d = the orthonormal factor of L_d Q_d. With t counting
 *  from the second step on, and g' the gradient times each Q_d^T, the Q_d being those of the step before:
 *    m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
 *    u = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps);  direction = u times each Q_d
 *    w = (1 - lr weight_decay) w - lr direction
 *  When Q_d changes, m is turned into the new basis, and v takes the new order of the columns. Where no side has a
 *  factor this is AdamW without its first step.
 *  State, where a rank owns block B of a parameter: "exp_avg.B" m and "exp_avg_sq.B" v, both in the basis. For
 *  dimension D with a factor "factor.B.D", "vectors.B.D" and "failures.B.D", an int64. */
typedef struct dc_soap_options {
  size_t struct_size;             /**< sizeof(dc_soap_options) */
  double beta1;                   /**< 0 < beta1 < 1; 0 = 0.95; -1 = none: m = g' */
  double beta2;                   /**< 0 < beta2 < 1; 0 = 0.95; -1 = none: v = g'^2 */
  double shampoo_beta;            /**< of the factors, 0 < shampoo_beta < 1; 0 = beta2; -1 = none: only the newest
                                       gradient counts */
  double eps;                     /**< > 0; 0 = 1e-8; -1 = none */
  double weight_decay;            /**< >= 0 */
  int64_t max_block;              /**< longest side of a block, >= 1; 0 = none: a parameter is one block */
  int64_t merge_below;            /**< as in dc_shampoo_options, >= 0; 0 = merge nothing */
  int64_t max_precond_dim;        /**< longest side with a factor, 1 to 16384; 0 = 10000; -1 = none has one */
  int64_t precondition_frequency; /**< steps from one refresh of the bases to the next, >= 1; 0 = 10 */
  int32_t tolerated_failures;     /**< as in dc_shampoo_options, of the bases; 0 = 3; -1 = none */
  int32_t reserved0;              /**< 0 */
} dc_soap_options;

/** A dc_soap_options with all defaults. */
#define DC_SOAP_OPTIONS_INIT {sizeof(dc_soap_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_SOAP_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_soap_options_init(dc_soap_options *options, size_t struct_size);

/** Makes a SOAP. Gradients are always looked at first, as Shampoo does.
 *  linalg     gives threads, device and solver; may be destroyed before the optimizer
 *  comm       the ranks that have parts of the parameters; NULL = one rank. Copied as by dc_comm_dup()
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_NO_MEMORY, DC_E_UNSUPPORTED as in
 *  dc_shampoo_create, and what dc_comm_dup returns. [any, collective] Since 0.1. */
DC_API dc_status dc_soap_create(dc_linalg *linalg, dc_comm *comm, const dc_soap_options *options,
                                dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_soap_create; max_block, merge_below and max_precond_dim must stay where the group has parameters
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_soap_set_group(dc_optimizer *optimizer, int32_t group, const dc_soap_options *options);

/** The scale of a step of Muon, for a matrix of r rows and c columns. */
enum dc_muon_adjust {
  DC_MUON_ORIGINAL = 0,  /**< sqrt(max(1, r / c)); the default */
  DC_MUON_MATCH_RMS = 1, /**< 0.2 sqrt(max(r, c)): as long as AdamW's steps, whose lr and weight decay then serve. Source:
                              Liu et al. 2025 (arXiv 2502.16982) */
  DC_MUON_PLAIN = 2      /**< 1 */
};

/** Muon's options. Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). For the matrices of a
 *  network's hidden layers. A parameter is one matrix, [d0, rest] where it has more than two dimensions, or num_splits
 *  of them one below the other. Each is a block with a step of its own. With gradient g:
 *    b = momentum b + g;  u = g + momentum b, without nesterov u = b
 *    w = (1 - lr weight_decay) w - lr adjust P(u / max(|u|, eps))
 *  P as in dc_orthogonalize(), |u| the Frobenius norm; a zero u moves nothing.
 *  State, where a rank owns block B of a parameter: "momentum.B" b, unless momentum is -1. torch.optim.Muon's is
 *  (1 - momentum) times that. */
typedef struct dc_muon_options {
  size_t struct_size;  /**< sizeof(dc_muon_options) */
  double momentum;     /**< 0 < momentum < 1; 0 = 0.95; -1 = none: u = g */
  double eps;          /**< > 0; 0 = 1e-7 */
  double weight_decay; /**< >= 0 */
  int64_t num_splits;  /**< matrices of a parameter, such as 3 for query, key and value in one, >= 1; 0 = 1. Divides
                            the first dimension */
  int32_t polynomial;  /**< enum dc_orthogonal */
  int32_t steps;       /**< of the polynomial, 1 to 64; 0 = 5 */
  int32_t precision;   /**< of P's products: DC_BFLOAT16 with float32 sums, or DC_FLOAT32; 0 = DC_BFLOAT16 */
  int32_t adjust;      /**< enum dc_muon_adjust */
  int32_t nesterov;    /**< 1; -1 = without; 0 = 1 */
  int32_t reserved0;   /**< 0 */
} dc_muon_options;

/** A dc_muon_options with all defaults. */
#define DC_MUON_OPTIONS_INIT {sizeof(dc_muon_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_MUON_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_muon_options_init(dc_muon_options *options, size_t struct_size);

/** Makes a Muon. Gradients are always looked at first, as Shampoo does. dc_optimizer_add_param() refuses parameters of
 *  less than two dimensions with DC_E_SHAPE: they, embeddings and the last layer are AdamW's.
 *  linalg     gives threads and device; may be destroyed before the optimizer
 *  comm       the ranks that have parts of the parameters; NULL = one rank. Copied as by dc_comm_dup()
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_NO_MEMORY, DC_E_UNSUPPORTED as in
 *  dc_shampoo_create, and what dc_comm_dup returns. [any, collective] Since 0.1. */
DC_API dc_status dc_muon_create(dc_linalg *linalg, dc_comm *comm, const dc_muon_options *options,
                                dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_muon_create; num_splits, and whether there is momentum, must stay where the group has parameters
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_muon_set_group(dc_optimizer *optimizer, int32_t group, const dc_muon_options *options);

/** How K-FAC inverts a layer's damped curvature. */
enum dc_kfac_inverse {
  DC_KFAC_EIGEN = 0,   /**< (A x G + damping I)^-1 exactly, from eigendecompositions; the default */
  DC_KFAC_FACTORED = 1 /**< (A + pi sqrt(damping) I)^-1 x (G + sqrt(damping) / pi I)^-1, pi the square root of the
                            ratio of the factors' mean eigenvalues */
};

/** How K-FAC treats a layer that is used at many positions of a sample. */
enum dc_kfac_approximation {
  DC_KFAC_EXPAND = 0, /**< each position's outer products count; the default */
  DC_KFAC_REDUCE = 1  /**< inputs are averaged and gradients summed over a sample's positions first */
};

/** K-FAC's options. Source: Martens and Grosse 2015 (arXiv 1503.05671), section 5 for the running average; Grosse and
 *  Martens 2016 (arXiv 1602.01407) for convolutions and the eigenvalues' damping; Eschenhagen et al. 2023 (arXiv
 *  2311.00636) for expand and reduce; Ba et al. 2017 (ICLR) for kl_clip.
 *  Over N samples of T positions, a[n, t] are the inputs of a layer for sample n at position t, with a 1 appended where
 *  it has a bias. A convolution's are its patches. g[n, t] are the gradients of its outputs by the sample's own loss:
 *    expand: A' = sum a a^T / (N T), G' = sum g g^T / N;  reduce: the same of the mean of a and the sum of g over t
 *    A = c A + (1 - c) A', with c = min(decay, 1 - 1 / k) in the k-th update; G likewise
 *    direction = nu (G x A + damping I)^-1 gradient;  nu = min(1, sqrt(kl_clip / |lr^2 sum of direction gradient|))
 *  The groups of a convolution have factors of their own. The step is SGD's along the direction, with momentum and
 *  weight decay; parameters without a layer take plain SGD's. Positions that have a loss of their own each, as a
 *  language model's have, are samples: x and delta are then [N T, features].
 *  State: "momentum_buffer" of each part; of a layer, beside its weight, on the rank that owns it: "factor_a" A and
 *  "factor_g" G, one group's matrix below the other; "vectors_a", "values_a", "vectors_g" and "values_g" of their latest
 *  decomposition; "counts", of updates of the factors, decompositions of A and failures since the last of them, and the
 *  same two of G. The sums of dc_kfac_accumulate() since the last step are not part of the state: dc_optimizer_load()
 *  drops them. */
typedef struct dc_kfac_options {
  size_t struct_size;        /**< sizeof(dc_kfac_options) */
  double decay;              /**< of the factors, 0 < decay < 1; 0 = 0.95; -1 = none: only the newest count */
  double damping;            /**< > 0; 0 = 1e-3 */
  double kl_clip;            /**< > 0; 0 = 1e-3; -1 = none: nu = 1. The sum goes over the layers of the group */
  double momentum;           /**< 0 < momentum < 1; 0 = 0.9; -1 = none */
  double weight_decay;       /**< >= 0; times the weight added to the direction */
  int64_t factor_frequency;  /**< steps from one update of the factors to the next, >= 1; 0 = 1 */
  int64_t refresh_frequency; /**< steps from one decomposition to the next, >= 1; 0 = 10 */
  int32_t inverse;           /**< enum dc_kfac_inverse */
  int32_t nesterov;          /**< 1: as in dc_sgd_options */
  int32_t tolerated_failures;/**< decompositions of one factor that may fail in a row, the last good one being used; the
                                  next failure is DC_E_NOT_CONVERGED. 0 = 3; -1 = none */
  int32_t reserved0;         /**< 0 */
} dc_kfac_options;

/** A dc_kfac_options with all defaults. */
#define DC_KFAC_OPTIONS_INIT {sizeof(dc_kfac_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_KFAC_OPTIONS_INIT as a function. [any] Since 0.1. */
DC_API void dc_kfac_options_init(dc_kfac_options *options, size_t struct_size);

/** Makes a K-FAC. Gradients are always looked at first: one that is not finite is DC_E_NOT_FINITE, on every rank, and
 *  changes nothing on any. A layer's factors are means over the ranks' samples, and are kept by one rank, which finds
 *  the layer's directions; the costliest layers are shared out first.
 *  linalg     gives threads, device and solver; may be destroyed before the optimizer
 *  comm       the ranks that have parts of the parameters; NULL = one rank. Copied as by dc_comm_dup()
 *  options    of group 0
 *  optimizer  the handle, for dc_optimizer_destroy(); NULL on failure
 *  Returns DC_OK; DC_E_INVALID (an option is out of its range), DC_E_UNSUPPORTED, DC_E_NO_MEMORY, and what dc_comm_dup
 *  returns. [any, collective] Since 0.1. */
DC_API dc_status dc_kfac_create(dc_linalg *linalg, dc_comm *comm, const dc_kfac_options *options,
                                dc_optimizer **optimizer);
/** Sets the options of a group.
 *  group    a group, or the number of groups: then this adds one
 *  options  as in dc_kfac_create; momentum may not appear or vanish once the group has a state
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_kfac_set_group(dc_optimizer *optimizer, int32_t group, const dc_kfac_options *options);
/** Says which parameters are a layer's. With a communicator, on all ranks alike.
 *  layer          kind DC_SAMPLE_LINEAR or DC_SAMPLE_CONV, with its constants; read during the call
 *  approximation  enum dc_kfac_approximation
 *  weight, bias   indices of its parameters, of one group: [o, i] or [o, c / groups, kernel], and [o]; bias -1: none
 *  index          set to the layer's: 0, 1, … in the order of the calls; may be NULL
 *  Returns DC_OK; DC_E_NOT_FOUND (no such parameter), DC_E_EXISTS (it has a layer already), DC_E_SHAPE, DC_E_INVALID,
 *  DC_E_STATE (optimizer is of another kind, or it has a state: it was stepped, saved, loaded or looked at),
 *  DC_E_UNSUPPORTED (a factor would have more than 32766 rows), DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_kfac_add_layer(dc_optimizer *optimizer, const dc_sample_layer *layer, int32_t approximation,
                                   int64_t weight, int64_t bias, int64_t *index);
/** Adds a batch to what a layer's factors are updated with in the next step. It does not communicate, so ranks may call
 *  it as often as each needs to. Gradients for labels drawn from the model's own distribution make the factors those of
 *  the Fisher matrix, which K-FAC approximates. Those for the true labels make the empirical one.
 *  index       of the layer
 *  x, delta    [in] its input and the gradient of its output by the loss, shaped as in dc_per_sample_grads; each
 *              float32, float16 or bfloat16. Products are summed in float32. On a CUDA device memory of it, which is
 *              the caller's again when the call returns
 *  loss_scale  not 0, and finite as is its square: delta times this is that of each sample's own loss. It is the
 *              number of samples for the mean of their losses, and one over a scale that the loss was multiplied by
 *  A step whose group's factor_frequency is not due forgets it, so this only checks then. Nothing is added on an error.
 *  A step that fails or is left out, for gradients that are not finite, say, keeps it for the next one. The weights
 *  have not changed, so the batch is as good a sample of the same factors as the next.
 *  Returns DC_OK; DC_E_NOT_FOUND, DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID, DC_E_NOT_FINITE (x or delta has a NaN or an
 *  infinity, or a product of theirs might), DC_E_STATE (optimizer is of another kind), DC_E_NO_MEMORY.
 *  [handle] Since 0.1. */
DC_API dc_status dc_kfac_accumulate(dc_optimizer *optimizer, int64_t index, const dc_tensor *x, const dc_tensor *delta,
                                    double loss_scale);

/* ---- all kinds ---- */

/** Frees an optimizer with its state.
 *  optimizer  NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_optimizer_destroy(dc_optimizer *optimizer);
/** Sets a group's learning rate, which begins as 1e-3.
 *  group  0 to the number of groups - 1
 *  lr     >= 0 and finite; 0: steps change the state alone
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (another than before, and the optimizer's stream is being captured).
 *  [handle] Since 0.1. */
DC_API dc_status dc_optimizer_set_lr(dc_optimizer *optimizer, int32_t group, double lr);
/** Adds a parameter, of which this rank has the elements [offset, offset + count). At any time: its own steps count from
 *  the first one with a gradient.
 *  group   that it belongs to
 *  shape, ndim  the whole parameter's; its number of elements is N
 *  offset, count  0 <= offset, 0 <= count, offset + count <= N; with a communicator the ranks' parts, in their order,
 *          make up the whole, or are all of it on every rank. ZeRO-3: what dc_shard_range() gives
 *  dtype   of the weights: DC_FLOAT32, DC_FLOAT16 or DC_BFLOAT16; DC_DTYPE_NONE = DC_FLOAT32
 *  index   set to 0, 1, … in the order of the calls; may be NULL
 *  Returns DC_OK; DC_E_INVALID (group; offset or count are outside), DC_E_SHAPE (also: one that the kind does not
 *  take), DC_E_DTYPE, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_add_param(dc_optimizer *optimizer, int32_t group, const int64_t *shape, int32_t ndim,
                                        int64_t offset, int64_t count, int32_t dtype, int64_t *index);
/** Makes a step: changes weights and state, in one pass over all parameters.
 *  weights      [in,out] one tensor a parameter, this rank's part of it in any shape of its count and dtype; changed
 *               in place. No two overlap
 *  grads        [in] the gradients, as weights; float32, float16 or bfloat16, each its own choice. None overlaps its
 *               weights. A tensor without a type (DC_TENSOR_INIT) leaves its parameter and its state alone; on every
 *               rank, if there is a communicator
 *  tensor_size  bytes from one tensor to the next in both: sizeof(dc_tensor)
 *  count        of tensors in each: the number of parameters
 *  grad_scale   finite; gradients are multiplied by it on the way (1 = as they are): for loss scales and clipping
 *  On an error nothing has changed, on any rank; but after one of communication or memory under way, the step's result
 *  is undefined. Allocates nothing from the second step on, unless weights have moved.
 *  Returns DC_OK; DC_E_NOT_FINITE (a gradient, times grad_scale, or with Muon, Shampoo and SOAP one of 2^50 and more:
 *  names the parameter, and the rank; AdamW and SGD only with check_finite), DC_E_SHAPE, DC_E_DTYPE, DC_E_INVALID,
 *  DC_E_NOT_CONVERGED (a root, see tolerated_failures), DC_E_MISMATCH (a rank added other parameters, gave other
 *  gradients, or refused its own arguments), DC_E_NO_MEMORY, and the communicator's. [handle, collective] Since 0.1. */
DC_API dc_status dc_optimizer_step(dc_optimizer *optimizer, dc_tensor *weights, const dc_tensor *grads,
                                   size_t tensor_size, int64_t count, double grad_scale);
/** Names numbers of the caller's that each later step reads when it runs, not when it is called, until others are
 *  named. So a step uses what a loss scaler has computed by then, and no host waits for it.
 *  loss_scale  [in] [1] or [], float32, finite and not 0: what the loss was multiplied by; gradients are multiplied by
 *              grad_scale / loss_scale, rounded to float32. NULL: 1
 *  found_inf   [in] [1] or [], float32: if it is not 0, the step changes nothing, is not counted, and is no error but
 *              one more of dc_optimizer_stats.skipped_steps. AdamW and SGD go by this rank's: name one that is the same
 *              on all ranks. The others skip it on all ranks if it is not 0 on any. NULL: 0
 *  Both are memory of the optimizer's device, as weights are, at a multiple of 4, and must stay until the steps that read
 *  them are done. Of a step that is captured into a CUDA graph each launch reads them, where they were when it was
 *  captured.
 *  Returns DC_OK; DC_E_DTYPE, DC_E_SHAPE, DC_E_INVALID. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_set_loss_scale(dc_optimizer *optimizer, const dc_tensor *loss_scale,
                                             const dc_tensor *found_inf);
/** Sets the stream in whose order steps run: after the work that computes the gradients, before the work that reads the
 *  weights. AdamW's and SGD's are work of the stream then, and on a CUDA device Muon's without a communicator, as if
 *  check_finite were set. dc_optimizer_step() returns when it is queued, and grads and weights must stay until it is
 *  done. check_finite decides on the stream: a step whose gradients are not finite changes nothing and is not counted.
 *  It is no error but one more of dc_optimizer_stats.skipped_steps. Each rank decides by its own part of the gradients.
 *  The bits are those of steps without a stream. Calls that read the handle wait for the stream, so that the caller
 *  need not: dc_optimizer_get_steps(), _get_state(), _save(), _load(), _get_stats(). On a CUDA device no other call
 *  waits, and learning rates are set on the stream, for the steps behind it. On the CPU a step is a task of the stream,
 *  which every later call on the handle waits for first.
 *  All other steps wait for the stream, and run within the call as ever. They are Shampoo's, SOAP's and K-FAC's, and
 *  Muon's with a communicator or on the CPU. K-FAC takes its batches in the same way. Muon's first step after
 *  parameters were added waits too.
 *
 *  Steps that are work of a CUDA stream of dc_stream_wrap() may be captured into a CUDA graph, after one step before
 *  the capture, which makes the state. A launch is a step: it counts, decides, and takes the learning rate that
 *  dc_optimizer_set_lr() set on the stream before it, and the numbers of dc_optimizer_set_loss_scale(). Tensors, their
 *  addresses, which have gradients, grad_scale and options are as they were at the capture. After a step of Muon's with
 *  parameters that were added since, the graph must not be launched any more. Launches and calls on the handle must
 *  follow each other, on one stream; the handle must outlive the graph. Calls that a capture cannot hold are
 *  DC_E_STATE: a first step, a learning rate, calls that wait, steps of the other kinds.
 *  stream  of the optimizer's device; kept alive by the caller until replaced, or until the optimizer is destroyed,
 *          which waits for queued work. Work on it waits for the stream set before. NULL (the default): the calling
 *          thread
 *  Returns DC_OK; DC_E_INVALID (a stream of another device), DC_E_STATE (the stream set before is being captured),
 *  DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_set_stream(dc_optimizer *optimizer, dc_stream *stream);
/** How many steps the parameters have made.
 *  steps  set to the most of any
 *  Returns DC_OK; DC_E_INVALID, DC_E_STATE (the stream is being captured), DC_E_DEVICE. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_get_steps(dc_optimizer *optimizer, int64_t *steps);

/** The name of a piece of a parameter's state on this rank. "step" (int64, no dimension) is the first one of all; 16-bit
 *  weights have "master".
 *  index  of the parameter
 *  piece  0, 1, …
 *  name   set to the name, which lives as long as the handle, or to NULL past the last piece
 *  Returns DC_OK; DC_E_NOT_FOUND (no such parameter), DC_E_INVALID, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_get_state_name(dc_optimizer *optimizer, int64_t index, int64_t piece, const char **name);
/** A view of a piece of a parameter's state, which may be read and written between steps.
 *  index  of the parameter
 *  name   as dc_optimizer_get_state_name gives it
 *  view   [view] struct_size set by the caller; filled in. Its memory and shape live as long as the handle
 *  Returns DC_OK; DC_E_NOT_FOUND (no such parameter, or no such piece), DC_E_INVALID, DC_E_NO_MEMORY.
 *  [handle] Since 0.1. */
DC_API dc_status dc_optimizer_get_state(dc_optimizer *optimizer, int64_t index, const char *name, dc_tensor *view);

/** How many bytes dc_optimizer_save() writes.
 *  bytes  set
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_get_save_bytes(dc_optimizer *optimizer, int64_t *bytes);
/** Writes this rank's state as bytes: a version, the kind, each parameter's shape and part, each piece, a checksum.
 *  Options and learning rates are not in it.
 *  memory  [out] written
 *  bytes   of memory, at least dc_optimizer_get_save_bytes()
 *  Returns DC_OK; DC_E_INVALID, DC_E_BUFFER_TOO_SMALL (the text has the bytes), DC_E_NO_MEMORY.
 *  [handle] Since 0.1. */
DC_API dc_status dc_optimizer_save(dc_optimizer *optimizer, void *memory, int64_t bytes);
/** Reads a state that an optimizer with the same parameters, on the same rank of as many, has saved. All of it is
 *  checked before anything changes.
 *  memory  [in] what dc_optimizer_save() wrote
 *  bytes   of it
 *  Returns DC_OK; DC_E_CORRUPT (no saved state, cut off, or damaged), DC_E_UNSUPPORTED (a later version's), DC_E_STATE
 *  (another kind's), DC_E_SHAPE (other parameters, parts or pieces: names the first), DC_E_INVALID, DC_E_NO_MEMORY.
 *  [handle] Since 0.1. */
DC_API dc_status dc_optimizer_load(dc_optimizer *optimizer, const void *memory, int64_t bytes);

/** An optimizer's memory and counts, on this rank. */
typedef struct dc_optimizer_stats {
  size_t struct_size;         /**< sizeof(dc_optimizer_stats) */
  int64_t steps;              /**< that were made with this handle */
  int64_t params;             /**< parameters */
  int64_t blocks;             /**< Muon's, Shampoo's and SOAP's blocks, and K-FAC's layers */
  int64_t owned_blocks;       /**< those of this rank */
  int64_t refreshes;          /**< roots, bases and inverses that were computed */
  int64_t warm_refreshes;     /**< those without a decomposition */
  int64_t failed_refreshes;   /**< those that failed, the last good one staying in use */
  int64_t state_bytes;        /**< memory of the state */
  int64_t scratch_bytes;      /**< memory between and during steps beside it */
  int64_t wire_bytes;         /**< read from other ranks' memory or received from them */
  int64_t refresh_ns;         /**< time in roots, bases and inverses */
  int64_t skipped_steps;      /**< that a gradient which is not finite kept from being made */
} dc_optimizer_stats;

/** A dc_optimizer_stats to be filled in. */
#define DC_OPTIMIZER_STATS_INIT {sizeof(dc_optimizer_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** DC_OPTIMIZER_STATS_INIT as a function.
 *  stats  the struct to fill in; NULL does nothing
 *  [any] Since 0.1. */
DC_API void dc_optimizer_stats_init(dc_optimizer_stats *stats, size_t struct_size);
/** Counts what an optimizer holds and did.
 *  stats  filled in; struct_size is set by the caller
 *  Returns DC_OK; DC_E_INVALID, DC_E_NO_MEMORY. [handle] Since 0.1. */
DC_API dc_status dc_optimizer_get_stats(dc_optimizer *optimizer, dc_optimizer_stats *stats);

/* ==== 15. The counting device =======================================================================================
 *
 * Computes nothing: dc_device_open("count") gives a device whose memory has addresses but no bytes, and whose work takes
 * virtual time alone. A context, an optimizer or a layer on it makes the calls of a real one, so it takes the memory and
 * receives the bytes of a real one. One process stands for one rank of a group that is not there. A touch of the
 * device's memory by the program is a fault; what the device copies into the program's memory is zeros.
 *
 * Memory, bytes and numbers of calls are exact. Times are a model. A stream's work begins when its earlier work has
 * ended, collectives of a rank follow each other, and the host takes no time except where it waits. Matrix products
 * take their floating-point operations, copies their bytes, other kernels a launch. Traces have these times. Matrix
 * decompositions are not counted, so plans of Shampoo, SOAP and K-FAC lack them: where a library would compute one, as in
 * a step of Shampoo, it is DC_E_UNSUPPORTED. dc_device_get_memory() has the device's memory.
 *
 * Figures that are set, each 0 at first, which takes no time or has no limit:
 *   memory_bytes              an allocation beyond them fails
 *   flops_per_second          of matrix products
 *   memory_bytes_per_second   a copy in the device takes two bytes for each of its own
 *   host_bytes_per_second     of copies between device and host
 *   launch_ns                 of a kernel
 *   ranks_per_node            0: all. A communicator takes it when it is made
 *   node_bytes_per_second     what a rank receives within its node; and node_latency_ns of a collective
 *   network_bytes_per_second  what it receives from other nodes; and network_latency_ns of a collective
 *
 * Figures that are counted:
 *   time_ns                   the host's clock
 *   product_flops, launches   of matrix products, and kernels
 *   copied_bytes              in the device
 *   host_copied_bytes         between device and host
 *   host_bytes                host memory that copies fast; and host_peak_bytes
 *   node_received_bytes       from ranks of the node; and network_received_bytes
 *   collectives
 *   link_busy_ns              time in collectives; and link_free_ns, when the latest one ends */

/** Sets a figure of the device.
 *  device  one opened as "count"
 *  name    one of those that are set
 *  value   >= 0
 *  Returns DC_OK; DC_E_INVALID, DC_E_UNSUPPORTED (another device). [any] Since 0.1. */
DC_API dc_status dc_count_set(dc_device *device, const char *name, int64_t value);
/** Reads a figure of the device.
 *  name   any of them
 *  value  set
 *  Returns DC_OK; DC_E_INVALID, DC_E_UNSUPPORTED (another device). [any] Since 0.1. */
DC_API dc_status dc_count_get(dc_device *device, const char *name, int64_t *value);
/** Queues work of the caller's own, which takes time.
 *  stream       of a counting device
 *  duration_ns  >= 0
 *  Returns DC_OK; DC_E_INVALID, DC_E_UNSUPPORTED (another device's stream). [any] Since 0.1. */
DC_API dc_status dc_count_work(dc_stream *stream, int64_t duration_ns);
/** One rank of a group. Collectives are counted and done at once. Values that the host exchanges are this rank's for all
 *  ranks, so ranks must have alike parts. The communicator is for contexts on this device, and for its streams
 *  (DC_E_INVALID). config.replicas is counted; dc_comm_split is DC_E_UNSUPPORTED, since the colors of other ranks are not
 *  known.
 *  device      one opened as "count"
 *  rank        0 to world_size - 1
 *  world_size  1 to 1024
 *  heap        1: ranks read each other's memory, as in shared memory and through NCCL, and a shard is staged for them;
 *              0: as over TCP and MPI, which have two levels on nodes of several ranks: each byte comes to a node once,
 *              and a collective takes the time of both levels
 *  Returns DC_OK; DC_E_INVALID, DC_E_UNSUPPORTED (another device), DC_E_NO_MEMORY. [any] Since 0.1. */
DC_API dc_status dc_comm_create_count(dc_device *device, int32_t rank, int32_t world_size, int32_t heap,
                                      dc_comm **comm);

#ifdef __cplusplus
}
#endif
#endif /* DC_API_H */
