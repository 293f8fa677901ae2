/* The CUDA device's own structs, shared by its files.
 *
 * A call issues its work to the driver at once, from the calling thread. The driver's host functions must not block or
 * use the device, as a collective between threads does. So a stream that is given such a function gets a worker, which
 * is a stream of the CPU device. While the worker has tasks, every later call of the stream queues behind them, in
 * order, and the worker issues it. So work of the device waits only for work that the driver knows, and cannot block
 * itself.
 *
 * An event holds a point: a separate object, since work that waits for it may be issued after the next record. A point
 * is queued until its record has been issued to the driver, and passes after that.
 *
 * The device's first failure changes what calls return, not what they wait for. Earlier work goes on, and its memory
 * must not be reused meanwhile. So a point still passes when the driver says so. A point that the driver did not record
 * is lost: it passes when the device has finished all its work. Memory of a failed device is returned after that. On a
 * lost device nothing runs any more. */
#ifndef DC_DEVICE_CUDA_H
#define DC_DEVICE_CUDA_H

#include "device/cuda/cublaslt.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "device/plugin.h"

enum { DC__EVENT_QUEUED, DC__EVENT_ISSUED, DC__EVENT_LOST, DC__EVENT_PASSED };

typedef struct dc__cuda_pool_event {
  struct dc__cuda_pool_event *next; /* the next free one */
  dc__cu_event native;              /* NULL if the driver gave none; the point is lost then */
  atomic_int refs;
  atomic_int state;
  uint64_t stream; /* serial of the stream in which it was recorded */
  bool captured;   /* recorded in a capture: the host cannot see it pass */
} dc__cuda_pool_event;

typedef struct dc__cuda_timestamp {
  struct dc__timestamp head;
  struct dc__cuda_timestamp *next; /* the next free one */
  dc__cu_event native;             /* with timing */
  atomic_int refs;                 /* the holder's and the record's */
  atomic_int state;                /* DC__EVENT_QUEUED, _ISSUED or _PASSED */
  int64_t ns;                      /* the host's time when it was issued */
  uint64_t epoch;                  /* number of the epoch from which it is counted */
} dc__cuda_timestamp;

/* The driver gives the time between two events as a float of milliseconds. So times are counted from a recent event, on
 * a stream that is otherwise idle. */
enum { DC__CUDA_EPOCHS = 16 };
typedef struct dc__cuda_epoch {
  dc__cu_event native; /* NULL until it is created */
  int64_t ns;          /* the host's time when it was recorded */
  bool passed;         /* it was seen to have passed */
} dc__cuda_epoch;

typedef struct dc__cuda_device {
  struct dc_device head;
  dc__cuda_driver driver;
  dc_device *cpu; /* workers are its streams */
  int32_t number;
  int major; /* of its compute capability */
  char model[64];
  struct dc__cuda_device *next; /* the next open device (peer_access.c) */
  atomic_ullong peer_mask;      /* a bit per device whose memory this one reads */
  dc__cu_context context;       /* the primary one, so that other users of the process see the same memory */
  dc__cu_pool pool;
  dc__cu_stream alloc_stream;     /* for allocation and release of memory alone */
  dc_stream *foreign_sync_stream; /* only waits for the remaining work of wrapped streams that are destroyed */
  dc__cu_module *modules;         /* of dc__kernel_images */
  dc__cu_function *kernels;
  struct dc__cuda_cublaslt *_Atomic cublaslt; /* NULL until it is first used */
  struct dc__cuda_cusolver *_Atomic cusolver; /* the same */
  atomic_llong pinned;                        /* bytes of pinned host memory */
  int64_t max_pinned;                         /* dc_device_options.max_pinned_bytes */
  pthread_mutex_t mutex;                      /* protects all below */
  dc__cuda_pool_event *free_events;
  dc__cuda_timestamp *free_timestamps;
  uint64_t epoch; /* the latest epoch's number, from 1; 0 if none */
  dc__cuda_epoch epochs[DC__CUDA_EPOCHS];
  dc__failure failure;
  atomic_int failed; /* failure.status != DC_OK, for a check without the mutex */
} dc__cuda_device;

typedef struct dc__cuda_stream {
  struct dc_stream head;
  dc__cu_stream native;
  uint64_t serial;       /* unique in the process, and never reused, unlike an address */
  bool is_foreign;       /* the caller's stream: no worker, since its owner may queue work itself */
  bool joined_capture;   /* it has waited for a captured point */
  bool is_internal;      /* one of the device's own streams, which do not keep it alive */
  atomic_int refs;       /* one for the handle, and one per task of the worker */
  pthread_mutex_t mutex; /* gives issued and queued work one order */
  dc_stream *worker;     /* created when first needed; NULL before */
  atomic_int num_queued; /* tasks that the worker has not finished */
} dc__cuda_stream;

/* Machine code and PTX, or the simulated driver's images. */
extern const dc__kernel_image dc__kernel_images[];

/* driver.c */
dc_status dc__cuda_driver_open(dc__cuda_driver *driver);
/* The first tells whether every later call of the process fails too. The second returns a driver's error as a status,
 * with a text; `call` is the function's name. */
bool dc__cuda_is_lost(dc__cu_result error);
dc_status dc__cuda_error(const dc__cuda_driver *driver, const char *name, const char *call, dc__cu_result error);

/* context_guard.c: brackets calls of the driver. Leaving restores the thread's current device, and captures on other
 * threads are not disturbed. Entering a device that the thread has entered already costs nothing. */
typedef struct dc__cuda_context_guard {
  dc__cuda_device *device; /* to be left; NULL if none */
  dc__cuda_device *outer;  /* current before */
  int mode;                /* the capture mode before */
} dc__cuda_context_guard;
dc__cuda_context_guard dc__cuda_context_enter(dc__cuda_device *device);
void dc__cuda_context_leave(dc__cuda_context_guard entry);
/* Begin and end an operator of the device. The device stays entered from the operator's first entry to its end. */
void dc__cuda_device_begin(dc_device *device);
void dc__cuda_device_end(dc_device *device);
void dc__cuda_device_pause(dc_device *device); /* leaves the device until its next use */
/* Whether work on the stream becomes part of a graph. The device must be entered. */
bool dc__cuda_is_capturing(dc__cuda_stream *stream);
void dc__cuda_join_capture(dc__cuda_stream *stream); /* for a wait for a captured point */
/* Whether a call has spoiled the capture that the stream is part of. If so, its work is refused until the capture
 * ends. */
bool dc__cuda_is_capture_spoiled(dc__cuda_stream *stream);

/* device.c */
/* For a call whose failure no caller can receive: keeps the device's first failure. Returns DC_OK if there is no
 * error. */
dc_status dc__cuda_keep_error(dc__cuda_device *device, const char *call, dc__cu_result error);
/* The same for work of a stream. A refusal by the stream's spoiled capture is no failure of the device: the capture's
 * owner gets the error when it ends the capture. A stream outside of the capture has no such owner. */
dc_status dc__cuda_keep_stream_error(dc__cuda_stream *stream, const char *call, dc__cu_result error);
/* For a call whose caller gets the status: the device fails only if it is lost. Returns DC_OK if there is no error. */
dc_status dc__cuda_return_error(dc__cuda_device *device, const char *call, dc__cu_result error);
void dc__cuda_keep_failure(dc_device *device, dc_status status); /* with this thread's last error */
/* Waits until the device has finished all its work. Returns false if that cannot be known. */
bool dc__cuda_synchronize(dc__cuda_device *device);
dc_status dc__cuda_check(dc_device *device);

#define DC__CUDA_KEEP(device, function, ...) \
  dc__cuda_keep_error((device), #function, (device)->driver.function(__VA_ARGS__))
#define DC__CUDA_KEEP_ON(stream, function, ...)   \
  dc__cuda_keep_stream_error((stream), #function, \
                             ((dc__cuda_device *)(stream)->head.device)->driver.function(__VA_ARGS__))

/* For a call while the device opens: the caller gets the failure, and none is kept. Returns DC_OK if there is no
 * error. */
dc_status dc__cuda_open_error(const dc__cuda_device *device, const char *call, dc__cu_result error);

#define DC__CUDA_OPEN(device, function, ...) \
  dc__cuda_open_error((device), #function, (device)->driver.function(__VA_ARGS__))

/* modules.c: with the device entered */
dc_status dc__cuda_kernels_load(dc__cuda_device *device);
void dc__cuda_kernels_unload(dc__cuda_device *device);

/* memory.c */
/* Whether memory may be released. A failed device must finish its work first. If it cannot be known to have done so,
 * the result is false, and the memory stays allocated until the process ends. */
bool dc__cuda_can_free(dc_device *device);
dc_status dc__cuda_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr);
void dc__cuda_free(dc_device *device, void *ptr, size_t bytes, int32_t kind);
dc_status dc__cuda_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes);
dc_status dc__cuda_pool_open(dc__cuda_device *device);

/* peer_access.c: several cards in one process */
dc_status dc__cuda_peers_join(dc__cuda_device *device); /* with the device entered, after its pool is created */
void dc__cuda_peers_leave(dc__cuda_device *device);     /* also if it has not joined */
dc_status dc__cuda_enable_peer_access(dc_device *device, int32_t memory_space, const void *ptr);

/* stream.c */
dc_status dc__cuda_stream_create(dc_device *device, dc_stream **stream);
dc_status dc__cuda_stream_wrap(dc_device *device, void *native, dc_stream **stream);
/* Creates one of the device's own streams, which do not keep it alive. */
dc_status dc__cuda_internal_stream_create(dc__cuda_device *device, dc_stream **stream);
void dc__cuda_stream_destroy(dc_stream *stream);
bool dc__cuda_stream_captures(dc_stream *stream);
dc_status dc__cuda_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
/* Calls issue(stream, args) with the device entered, at once or on the worker after its tasks. With `later` it is not
 * called on this thread, unless the stream is wrapped or this thread is issuing to it. */
typedef void (*dc__cuda_issue_fn)(dc__cuda_stream *stream, void *args);
dc_status dc__cuda_submit(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes, bool later);
/* The same without `later`. The device keeps a failure. */
void dc__cuda_submit_kept(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes);
/* Waits for all work of the stream, without a point. Fails as dc__cuda_submit() does. */
dc_status dc__cuda_stream_drain(dc__cuda_stream *stream);
/* Whether this thread is the stream's worker and runs a task, so that it must not wait for the stream's queue. */
bool dc__cuda_is_own_worker(uint64_t serial);

/* stream_ops.c */
void dc__cuda_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__cuda_stream_zero(dc_stream *stream, void *dst, size_t bytes);
void dc__cuda_stream_launch(dc_stream *stream, const dc__launch *launch);
dc_status dc__cuda_stream_issue(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks);

/* gemm_cublaslt.c */
dc_status dc__cuda_matmul_init(dc_device *device);
bool dc__cuda_stream_matmul(dc_stream *stream, const dc__matmul *product);
void dc__cuda_cublaslt_close(dc__cuda_device *device);

/* eigh_cusolver.c */
dc_status dc__cuda_eigh_workspace_size(dc_device *device, dc__eigh *eigen);
dc_status dc__cuda_stream_eigh(dc_stream *stream, const dc__eigh *eigen);
dc_status dc__cuda_qr_workspace_size(dc_device *device, dc__qr *qr);
dc_status dc__cuda_stream_qr(dc_stream *stream, const dc__qr *qr);
void dc__cuda_cusolver_close(dc__cuda_device *device);

/* event_pool.c */
dc_status dc__cuda_pool_event_record(dc__cuda_stream *stream,
                                     dc__cuda_pool_event **point); /* one reference for the caller */
dc_status dc__cuda_pool_event_wait(dc__cuda_pool_event *point, dc__cuda_stream *stream); /* takes the reference */
dc_status dc__cuda_pool_event_sync(dc__cuda_device *device, dc__cuda_pool_event *point, int64_t timeout_ns);
bool dc__cuda_pool_event_query(dc__cuda_device *device, dc__cuda_pool_event *point);
void dc__cuda_pool_event_release(dc__cuda_device *device, dc__cuda_pool_event *point); /* NULL does nothing */
void dc__cuda_event_pool_init(void); /* before the process's first point */
void dc__cuda_event_pool_destroy(dc__cuda_device *device);
dc_status dc__cuda_stream_sync(dc_stream *stream, int64_t timeout_ns);

/* timestamp.c */
dc__timestamp *dc__cuda_stream_timestamp(dc_stream *stream);
int64_t dc__cuda_timestamp_ns(dc__timestamp *stamp);
void dc__cuda_timestamp_release(dc__timestamp *stamp);
void dc__cuda_timestamps_free(dc__cuda_device *device);

/* event.c */
dc_status dc__cuda_event_create(dc_device *device, dc_event **event);
void dc__cuda_event_destroy(dc_event *event);
void dc__cuda_event_record(dc_event *event, dc_stream *stream);
dc_status dc__cuda_event_wait(dc_event *event, dc_stream *stream);
bool dc__cuda_event_passed(dc_event *event);
dc_status dc__cuda_event_sync(dc_event *event, int64_t timeout_ns);
void dc__cuda_event_set(dc_event *event);

/* plugin_host.c */
void dc__cuda_set_host(const dc__plugin_host *host);
/* Opens a CPU device, whose streams are the workers. Returns NULL, with the last error set, if memory is short. */
dc_device *dc__cuda_cpu_device(void);

#endif
