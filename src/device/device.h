/* A device behind one table: memory, streams, events, copies. Other modules include only this header. cpu/ is built in,
 * and so is count/, which computes nothing. cuda/ fills the table from a library of its own (plugin.h), and the tests'
 * simulated device does too (tests/sim).
 *
 * A NULL stream is the calling thread: its earlier work is done, and waiting blocks it. The dc__stream_* and
 * dc__event_* functions below handle NULL; the table's functions get real streams only. The calling thread cannot touch
 * the memory of every device. Where such memory may meet a NULL stream, dc__stream_or_internal() gives the stream that
 * does the work, and dc__device_sync_internal() waits for it. */
#ifndef DC_DEVICE_H
#define DC_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

enum {
  DC__TASK_BYTES = 2304, /* a task's inline arguments: enough for a sum of 256 sources; a stream queues 256 tasks */
  DC__TASK_HEAD = 32     /* what a device may put before the arguments, if it runs its host tasks on a CPU stream */
};

/* A host function on a stream, given a copy of its arguments. Errors are reported through the arguments. */
typedef void (*dc__task_fn)(void *args);
/* Work of a library that takes the driver's own streams (a cudaStream_t), given a copy of its arguments. */
typedef void (*dc__native_fn)(void *native, void *args);

/* A point in a stream, whose time can be read once the stream has reached it. */
typedef struct dc__timestamp {
  dc_device *device;
} dc__timestamp;

/* The kernels of a device with memory of its own (src/kernels/cuda): images of machine code, one for each family of
 * kernels. An image without kernels ends the list. Kernels are numbered through all images. */
typedef struct dc__kernel_name {
  const char *name;
  uint32_t shared_bytes; /* maximum of a launch; every card has 99 KiB */
} dc__kernel_name;
enum {
  DC__CODE_SM8,
  DC__CODE_SM9,
  DC__CODE_PTX,
  DC__CODE_COUNT
}; /* for cards of compute capability 8 and 9, and PTX for any */
typedef struct dc__kernel_image {
  const void *code[DC__CODE_COUNT];
  const dc__kernel_name *kernels;
  int32_t count;
} dc__kernel_image;

/* A grid of blocks of threads, and the kernel's one argument, a struct of at most DC__LAUNCH_BYTES. */
enum { DC__LAUNCH_BYTES = DC__TASK_BYTES - 128 };
typedef struct dc__launch {
  int32_t kernel;
  uint32_t blocks, blocks_y, blocks_z; /* 0 in y or z means 1 */
  uint32_t threads;
  uint32_t shared_bytes; /* dynamic, in addition to what the kernel declares */
  const void *args;
  size_t bytes;
} dc__launch;

/* The epilogue of t = alpha op(A) op(B) + beta D, element (i, j), before t is stored in D. */
enum dc__matmul_epilogue {
  DC__MATMUL_NONE,  /* t */
  DC__MATMUL_BIAS,  /* t + epilogue_ptr[i] */
  DC__MATMUL_DGELU, /* t * gelu'(epilogue_ptr(i, j)), the tanh form; epilogue_ptr has D's layout */
  DC__MATMUL_BGRADB /* t; and epilogue_ptr[j], of D's type, becomes the sum over k of op(B)(k, j) */
};

/* A matrix product on a device, column-major as in BLAS: op(A) is m by k, op(B) k by n, D m by n. */
typedef struct dc__matmul {
  int32_t dtype;     /* of A and B: float32, float64, float16, bfloat16 */
  int32_t out_dtype; /* of D: dtype, or float32 */
  int32_t trans_a, trans_b;
  int64_t m, n, k;
  int64_t lda, ldb, ldd;   /* elements from one column to the next */
  int64_t heuristic_batch; /* the algorithm is the best for this batch if it can run `batch`; 0: for `batch` */
  int64_t batch;           /* 0 means 1; more than 1 excludes an epilogue. Elements from one matrix to the next: */
  int64_t stride_a, stride_b, stride_d;
  const void *a, *b;
  void *d;
  double alpha, beta;       /* used in float32 unless dtype is float64 */
  int32_t epilogue;         /* enum dc__matmul_epilogue */
  const void *epilogue_ptr; /* written by DC__MATMUL_BGRADB */
  void *workspace;          /* of the device, for this product alone until it is done; aligned (see below), or NULL */
  size_t workspace_bytes;
} dc__matmul;

/* The alignment of workspaces in bytes. cuBLASLt refuses less. */
enum { DC__MATMUL_ALIGNMENT = 256 };

/* Symmetric matrices to be decomposed on a device: [count, n, n], dense. Only the diagonal and the triangle above it
 * are read. With `vectors` each matrix is replaced by its eigenvectors, one per row; else its contents are lost. */
typedef struct dc__eigh {
  int32_t dtype;        /* float32 or float64 */
  int32_t vectors;      /* 0 or 1 */
  bool batch_invariant; /* the algorithm does not depend on count, unless memory is short */
  int64_t n, count;
  void *a, *values; /* values [count, n], ascending */
  int32_t *info;    /* [count]: not 0 if a matrix did not converge */
  void *workspace;  /* of the device; and `host`: both for this call alone until it is done, 256-byte aligned */
  void *host;
  size_t workspace_bytes, host_bytes;
  dc__failure *failure; /* receives the failure of work that could not begin; must live until the work is done */
} dc__eigh;

/* Square float32 matrices on a device, [count, n, n] and dense, with one vector per row. Householder's QR makes each
 * row orthonormal to those before it; the signs are LAPACK's. */
typedef struct dc__qr {
  int64_t n, count;
  float *a;
  float *tau;      /* [n] */
  int32_t *info;   /* [count, 2], not 0 before: both become 0 for a matrix that was done */
  void *workspace; /* of the device, used by this call alone until it is done; 256-byte aligned */
  size_t workspace_bytes;
} dc__qr;

typedef struct dc__device_ops {
  /* `begin` and `end` bracket an operator on this thread, which makes the device current once and not at each call.
   * They nest, also for two devices. `pause` restores the caller's current device until the next use of this one. If
   * the functions are NULL, no device has to be current. */
  void (*begin)(dc_device *device);
  void (*end)(dc_device *device);
  void (*pause)(dc_device *device);
  /* Memory of a kind (DC_MEMORY_DEVICE, DC_MEMORY_HOST), 256-byte aligned, not zeroed. */
  dc_status (*alloc)(dc_device *device, size_t bytes, int32_t kind, void **ptr);
  void (*free)(dc_device *device, void *ptr, size_t bytes, int32_t kind);
  dc_status (*stream_create)(dc_device *device, dc_stream **stream);
  void (*stream_destroy)(dc_stream *stream); /* drains first */
  dc_status (*stream_sync)(dc_stream *stream, int64_t timeout_ns);
  /* fn(args) in stream order on the host; args (<= DC__TASK_BYTES) are copied. Blocks while the queue is full, unless
   * the caller is a task of that very stream, which would wait for itself. Such a call takes memory instead, and fails
   * with DC_E_NO_MEMORY if there is none. */
  dc_status (*stream_call)(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
  void (*stream_copy)(dc_stream *stream, void *dst, const void *src, size_t bytes);
  void (*stream_zero)(dc_stream *stream, void *dst, size_t bytes);
  /* Marks the present end of the stream's queue; returns NULL on failure. If the functions are NULL, a host function
   * takes the time. */
  dc__timestamp *(*stream_timestamp)(dc_stream *stream);
  /* When the stream reached it, in dc__now_ns(); 0 if it has not yet. From any thread. */
  int64_t (*timestamp_ns)(dc__timestamp *stamp);
  void (*timestamp_release)(dc__timestamp *stamp); /* also before the stream reached it */
  /* If NULL, the host computes on the device's memory, in tasks. */
  void (*stream_launch)(dc_stream *stream, const dc__launch *launch);
  /* Calls fn(native stream, args) when the stream's turn to issue work comes, with the device current. Work that fn
   * queues on the stream is in order; fn must not wait for work of the device. `blocks`: fn may wait for other hosts,
   * so the calling thread runs it only for a wrapped stream. Fails as stream_call does. If NULL, the device has no
   * wrapped streams. */
  dc_status (*stream_issue)(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks);
  /* Loads the library of matrix products, before the first product. DC_E_UNSUPPORTED if it is missing. */
  dc_status (*matmul_init)(dc_device *device);
  /* Returns false, and does nothing, if no product has this epilogue. */
  bool (*stream_matmul)(dc_stream *stream, const dc__matmul *product);
  /* Loads the library of eigendecompositions (DC_E_UNSUPPORTED if it is missing), and sets the bytes for `count`
   * matrices. */
  dc_status (*eigh_workspace_size)(dc_device *device, dc__eigh *eigen);
  /* Runs in stream order, after eigh_workspace_size(); may also wait for the stream. Fails as stream_call does. */
  dc_status (*stream_eigh)(dc_stream *stream, const dc__eigh *eigen);
  /* The same for a QR: the first loads the library and sets workspace_bytes, the second runs in stream order. `info`
   * shows the matrices that were not done. */
  dc_status (*qr_workspace_size)(dc_device *device, dc__qr *qr);
  dc_status (*stream_qr)(dc_stream *stream, const dc__qr *qr);
  /* Wraps a native stream of the device, which the caller made and still owns. If NULL, there are none. */
  dc_status (*stream_wrap)(dc_device *device, void *native, dc_stream **stream);
  /* Whether the stream is captured into a graph: then no host function can be queued, and the host cannot wait. NULL:
   * there are no graphs. */
  bool (*stream_captures)(dc_stream *stream);
  dc_status (*event_create)(dc_device *device, dc_event **event);
  void (*event_destroy)(dc_event *event);
  void (*event_record)(dc_event *event, dc_stream *stream);
  dc_status (*event_wait)(dc_event *event, dc_stream *stream); /* fails as stream_call does */
  bool (*event_passed)(dc_event *event);
  dc_status (*event_sync)(dc_event *event, int64_t timeout_ns);
  void (*event_set)(dc_event *event); /* as if recorded on an empty stream: passed */
  /* The sizes in bytes that the driver or system reports. */
  dc_status (*memory_info)(dc_device *device, int64_t *total, int64_t *free_bytes);
  /* Enables this device to read `ptr` of that memory space, whose device is open in this process. DC_E_UNSUPPORTED says
   * why it cannot. If NULL, there is one memory space. */
  dc_status (*enable_peer_access)(dc_device *device, int32_t memory_space, const void *ptr);
  /* Keeps this thread's last error as the device's failure, unless there is one. It is for work that could not be
   * queued, in a call that returns no status. If NULL, work can always be queued. */
  void (*keep_failure)(dc_device *device, dc_status status);
  /* The first failure that no call could return. Waits still wait for queued work, since its memory must not be freed
   * earlier. If NULL, there are none. */
  dc_status (*check)(dc_device *device);
  /* Whether device memory that did not come from alloc() may be freed now; on a failed device, waits for queued work
   * first. If NULL, it may. */
  bool (*can_free)(dc_device *device);
  void (*destroy)(dc_device *device);
} dc__device_ops;

enum { DC__DEVICE_NAME = 16 };

/* The head of every device's struct. */
struct dc_device {
  int32_t handle; /* DC__HANDLE_DEVICE */
  const dc__device_ops *ops;
  char name[DC__DEVICE_NAME]; /* the name by which it was opened */
  int32_t memory_space;       /* 0 if the host can access its memory; else a number, the same for the same memory */
  dc_stream *internal_stream; /* does the work of NULL streams; only if memory_space is not 0 */
  atomic_int refs;
  dc_allocator allocator;   /* if alloc is NULL, the device's own */
  atomic_llong allocations; /* calls of ops->alloc, for "zero allocations in a steady step" */
  dc__owner owner;          /* of its streams, events, arenas and contexts too */
  atomic_llong bytes;       /* allocated now, by ops->alloc */
  atomic_llong peak_bytes;  /* maximum of `bytes` so far */
};

/* The heads of streams and events. */
struct dc_stream {
  int32_t handle; /* DC__HANDLE_STREAM */
  dc_device *device;
};
struct dc_event {
  int32_t handle; /* DC__HANDLE_EVENT */
  dc_device *device;
};

/* Set up the head of a new stream or event of a device; the caller takes the reference to that. */
static inline void dc__stream_head_init(dc_stream *head, dc_device *of) {
  head->handle = DC__HANDLE_STREAM;
  head->device = of;
}
static inline void dc__event_head_init(dc_event *head, dc_device *of) {
  head->handle = DC__HANDLE_EVENT;
  head->device = of;
}

/* For devices: set up and tear down the head. */
void dc__device_head_init(dc_device *device, const dc__device_ops *ops, const char *name,
                          const dc_allocator *allocator);
void dc__device_head_destroy(dc_device *device);
/* A block of the caller's allocator, DC__ALIGNMENT-aligned. */
enum { DC__ALIGNMENT = 256 };
dc_status dc__device_alloc_user(dc_device *device, size_t bytes, void **ptr);
/* Adds `change` to the bytes allocated; negative when memory is freed. */
void dc__device_count_bytes(dc_device *device, int64_t change);

/* cpu/: the device that always exists. */
dc_status dc__cpu_device_open(const dc_allocator *allocator, dc_device **device);
/* plugin.c: "cuda" or "cuda:N", from libdc_cuda.so beside this library. Errors say why there is none. The options have
 * been checked and have an allocator; NULL stands for the defaults. */
bool dc__cuda_is_name(const char *name);
dc_status dc__cuda_device_open(const char *name, const dc_device_options *options, dc_device **device);
dc_status dc__cuda_device_count(int32_t *count);
/* Opens one of NVIDIA's libraries (see plugin.h). */
dc_status dc__cuda_library_open(const char *name, const char *folder, void **library);

/* count/: the device that computes nothing, and its figures. The user sets those up to DC__COUNT_NETWORK_NS; 0 means no
 * time or no limit. The device counts the others. */
enum dc__count_value {
  DC__COUNT_MEMORY_BYTES,
  DC__COUNT_FLOPS,
  DC__COUNT_MEMORY_RATE,
  DC__COUNT_HOST_RATE,
  DC__COUNT_LAUNCH_NS,
  DC__COUNT_NODE_RANKS,
  DC__COUNT_NODE_RATE,
  DC__COUNT_NODE_NS,
  DC__COUNT_NETWORK_RATE,
  DC__COUNT_NETWORK_NS,
  DC__COUNT_TIME_NS, /* the host's clock */
  DC__COUNT_PRODUCT_FLOPS,
  DC__COUNT_LAUNCHES,
  DC__COUNT_COPIED_BYTES,
  DC__COUNT_HOST_COPIED_BYTES,
  DC__COUNT_HOST_BYTES,
  DC__COUNT_HOST_PEAK_BYTES,
  DC__COUNT_NODE_BYTES, /* received from ranks of this node; the next one: over the network */
  DC__COUNT_NETWORK_BYTES,
  DC__COUNT_COLLECTIVES,
  DC__COUNT_LINK_BUSY_NS, /* time in collectives; the next one: when the latest ends */
  DC__COUNT_LINK_FREE_NS,
  DC__COUNT_VALUES
};
enum { DC__COUNT_MEMORY_SPACE = INT32_MAX };
typedef struct dc__count_entry {
  const char *name; /* its name in the public functions */
  bool is_set;
} dc__count_entry;
dc_status dc__count_device_open(dc_device **device);
bool dc__device_is_counting(const dc_device *device);
const dc__count_entry *dc__count_entry_of(int32_t which);
int32_t dc__count_find(const char *name); /* -1: there is none */
int64_t dc__count_get(dc_device *device, int32_t which);
void dc__count_set(dc_device *device, int32_t which, int64_t value);
void dc__count_add(dc_device *device, int32_t which, int64_t value);
/* The nanoseconds that an amount takes at one of the rates. */
int64_t dc__count_duration(dc_device *device, int32_t rate, int64_t amount);
void dc__count_work(dc_stream *stream, int64_t duration_ns);
/* Collectives run one after the other, since they share the rank's links. With a NULL stream the host waits. */
void dc__count_work_on_link(dc_device *device, dc_stream *stream, int64_t duration_ns);

/* Whether two handles stand for one device, so that each accepts the other's streams and events. Counting devices have
 * clocks of their own. */
bool dc__device_is_same(const dc_device *a, const dc_device *b);
/* DC_E_INVALID if the stream belongs to another device than `device`, that of `owner` (a noun for the error text).
 * DC_E_STATE in a child made by fork() if the stream is the parent's, which has no thread there. */
dc_status dc__stream_check_device(const char *fn, const dc_stream *stream, const char *owner, const dc_device *device);

dc_device *dc__device_retain(dc_device *device);
void dc__device_release(dc_device *device);
/* Bracket an operator of this thread on the device. Of the caller's functions only the allocator runs in between,
 * unless the operator is paused. */
void dc__device_begin(dc_device *device);
void dc__device_end(dc_device *device);
/* Pauses the operator that this thread is in, until it issues work. Call before functions of the caller run. */
void dc__device_pause(void);

/* A number of the calling thread that no other thread of the process ever gets; not 0. */
uint64_t dc__thread_id(void);
/* Whether a thread depends on the calling one: it is this thread, or it waits without a limit for the task of a stream
 * that this thread runs. */
bool dc__thread_is_blocked(uint64_t thread);

/* Run now if stream is NULL, else in stream order. If queueing fails, the device keeps the failure
 * (dc__device_check). */
void dc__stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
void dc__stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__stream_zero(dc_stream *stream, void *dst, size_t bytes);
/* As dc__stream_call, for callers that handle a failure themselves. */
dc_status dc__stream_try_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
dc_status dc__stream_sync(dc_stream *stream, int64_t timeout_ns); /* NULL: does not wait */
bool dc__stream_captures(dc_stream *stream);                      /* NULL: no */
/* Returns `stream`, or the device's internal stream if it is NULL; then wait with dc__device_sync_internal(). */
dc_stream *dc__stream_or_internal(dc_device *device, dc_stream *stream);
void dc__device_sync_internal(dc_device *device, dc_stream *stream);
/* DC_E_UNSUPPORTED if the host cannot compute on the device's memory: for operators that have only host code. */
dc_status dc__device_require_host(const char *fn, const dc_device *device);
/* DC_E_INVALID if the device has its own memory and data is not aligned to its element size: a kernel that read it
 * would lose the device. A tensor without elements may lie anywhere: a rank that refused it would fail alone. */
dc_status dc__device_check_alignment(const char *fn, const char *arg, const dc_device *device, const void *data,
                                     int64_t count, size_t size);
/* DC_OK, or the device's first failure as this thread's last error. */
dc_status dc__device_check(dc_device *device);
void dc__event_record(dc_event *event, dc_stream *stream);
/* NULL stream: blocks the caller until passed (every task that can block has its own deadline). If the wait cannot be
 * queued, the stream's device keeps the failure. */
void dc__event_wait(dc_event *event, dc_stream *stream);
bool dc__event_passed(dc_event *event);

/* ---- arena (arena.c): blocks of device memory that are used again and again ----
 *
 * Chunks come from the device and stay until the arena dies; blocks are cut best-fit and merge again when freed, so a
 * steady step allocates nothing. A block may be freed while work that reads it is still queued: pass the events, and
 * the memory is reused only after them. A caller that runs ahead of the device takes no more memory: before the arena
 * grows, a stream gets such a block and waits for the events itself. Arenas are reference-counted, because buffers
 * outlive contexts. Thread-safe. */
typedef struct dc__arena dc__arena;

/* Where an arena's chunks come from. If the functions are NULL: the device, kind DC_MEMORY_DEVICE. */
typedef struct dc__arena_source {
  dc_status (*alloc)(void *user, size_t bytes, void **ptr);
  void (*free)(void *user, void *ptr, size_t bytes);
  void (*done)(void *user); /* after the last free */
  void *user;
  /* All work with the memory runs in the order in which blocks are allocated and freed. So blocks are reused at once,
   * at addresses that depend on that order alone. Chunks are returned only when the caller has waited and trims the
   * arena. */
  bool stream_ordered;
} dc__arena_source;

dc_status dc__arena_create(dc_device *device, const dc__arena_source *source, dc__arena **arena);
dc__arena *dc__arena_retain(dc__arena *arena);
void dc__arena_release(dc__arena *arena); /* the last reference frees the chunks */
/* bytes 0 gives a valid, empty block. 256-byte aligned. Only `stream` may use the memory, until others wait for an
 * event that it records. Freeing must wait for it even if the block was not used. NULL: any user may use it at once. */
dc_status dc__arena_alloc(dc__arena *arena, dc_stream *stream, size_t bytes, void **ptr);
/* after: up to two events (NULL allowed) that must pass before the memory is used again. They must live until
 * dc__arena_alloc has found them passed or made a stream wait, or until dc__arena_forget_event. */
void dc__arena_free(dc__arena *arena, void *ptr, dc_event *after_a, dc_event *after_b);
/* Returns once no block waits for the event: call before destroying an event given to dc__arena_free. arena may be
 * NULL. */
void dc__arena_forget_event(dc__arena *arena, dc_event *event);
/* Returns chunks without used blocks to the source. */
void dc__arena_trim(dc__arena *arena);

typedef struct dc__arena_stats {
  int64_t chunk_bytes; /* taken from the source */
  int64_t used_bytes;  /* in blocks, and in freed ones whose events have not passed */
  int64_t peak_bytes;  /* maximum of used_bytes, taken at each allocation */
  int64_t chunk_allocations;
} dc__arena_stats;
void dc__arena_get_stats(dc__arena *arena, dc__arena_stats *stats);
void dc__arena_reset_peak(dc__arena *arena);

/* ---- buffers (buffer.c): counted handles on arena blocks, public as dc_buffer ---- */

/* Wraps a block that `arena` gave; one reference for the caller. On failure the block is freed. */
dc_status dc__buffer_create(dc__arena *arena, void *ptr, size_t bytes, dc_buffer **buffer);
/* Copies a tensor's shape, at most once per buffer. The copy lives as long as the buffer. */
dc_status dc__buffer_keep_shape(dc_buffer *buffer, const int64_t *shape, int32_t ndim, const int64_t **kept);
/* Takes the memory back from all holders, whose handles are empty from then on. */
void dc__buffer_revoke(dc_buffer *buffer, dc_event *after_a, dc_event *after_b);
/* dc_buffer_release(); memory that it frees is used again only after the event. */
void dc__buffer_release_after(dc_buffer *buffer, dc_event *after);

#endif
