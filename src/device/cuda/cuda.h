/* The CUDA device's own structs, shared by its files.
 *
 * Work goes to the driver at once, from the thread that asks for it. What the driver has no words for is a host
 * function that may block and may use the device (a collective between threads, say; the driver's own host functions
 * may do neither): a stream that is given one gets a worker, a stream of the CPU device. As long as the worker has
 * something to do, all that is asked of the stream queues behind it, in order, and is issued by the worker. So work
 * of the device waits for nothing but work that the driver knows, and cannot be in its own way.
 *
 * An event's mark is an object, because work that waits for it may be issued later than the next record: a mark is
 * queued until its record has been issued to the driver, and passes after that.
 *
 * The device's first failure changes what calls return, not what they wait for: work that was issued before goes on,
 * and nothing of its memory may go to somebody else under it. So a mark passes when the driver says so, also then; one
 * that the driver would not record is lost, and passes when the card has done all that it was given; and memory of a
 * device that failed goes back after that. On a device that is lost nothing runs any more. */
#ifndef DC_DEVICE_CUDA_H
#define DC_DEVICE_CUDA_H

#include "device/cuda/cublaslt.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "device/plugin.h"

enum { DC__EVENT_QUEUED, DC__EVENT_ISSUED, DC__EVENT_LOST, DC__EVENT_PASSED };

typedef struct dc__cuda_pool_event {
  struct dc__cuda_pool_event *next; /* spare ones */
  dc__cu_event native;              /* NULL: the driver gave none, and the mark will be lost */
  atomic_int refs;
  atomic_int state;
  uint64_t stream; /* its serial */
  bool captured;   /* into a graph: the host cannot see it pass */
} dc__cuda_pool_event;

typedef struct dc__cuda_timestamp {
  struct dc__timestamp head;
  struct dc__cuda_timestamp *next; /* spare ones */
  dc__cu_event native;             /* which takes times */
  atomic_int refs;                 /* the holder's and the record's */
  atomic_int state;                /* DC__EVENT_QUEUED, _ISSUED or _PASSED */
  int64_t ns;                      /* when it was issued; of one that has passed, its time */
  uint64_t epoch;                  /* that it is counted from */
} dc__cuda_timestamp;

/* The driver tells how long one event was before another, in a float of milliseconds: they are counted from an event
 * that is not long ago, on a stream that has nothing to do. */
enum { DC__CUDA_EPOCHS = 16 };
typedef struct dc__cuda_epoch {
  dc__cu_event native; /* NULL: not made yet */
  int64_t ns;
} dc__cuda_epoch;

typedef struct dc__cuda_device {
  struct dc_device head;
  dc__cuda_driver driver;
  dc_device *cpu; /* workers are its streams */
  int32_t number;
  int major; /* of its compute capability */
  char model[64];
  struct dc__cuda_device *next; /* peer_access.c: those that are open */
  atomic_ullong peer_mask;      /* the cards whose memory this device reads, a bit each */
  dc__cu_context context;       /* the primary one, so that other users of the process see the same memory */
  dc__cu_pool pool;
  dc__cu_stream alloc_stream;     /* on which memory is taken and given back; nothing else */
  dc_stream *foreign_sync_stream; /* waits for what somebody else's streams had to do when they were given back; nothing
                                     else */
  dc__cu_module *modules;         /* of dc__kernel_images */
  dc__cu_function *kernels;
  struct dc__cuda_cublaslt *_Atomic cublaslt; /* NULL: none was asked for yet */
  struct dc__cuda_cusolver *_Atomic cusolver; /* the same */
  atomic_llong pinned;                        /* bytes of host memory */
  int64_t pinned_max;
  atomic_ullong last_serial;
  pthread_mutex_t mutex; /* all below */
  pthread_cond_t issued; /* a mark's record was issued */
  dc__cuda_pool_event *free_events;
  dc__cuda_timestamp *free_timestamps;
  uint64_t epoch; /* the latest one's number, from 1 */
  dc__cuda_epoch epochs[DC__CUDA_EPOCHS];
  dc__failure failure;
  atomic_int failed; /* failure.status != DC_OK, for a fast look */
} dc__cuda_device;

typedef struct dc__cuda_stream {
  struct dc_stream head;
  dc__cu_stream native;
  uint64_t serial;       /* never used again, as an address is */
  bool is_foreign;       /* somebody else's: no worker, since he may queue work himself */
  bool joined_capture;   /* has waited for a mark that was captured */
  bool is_internal;      /* the device's own, which does not keep it alive */
  atomic_int refs;       /* the handle, and every task of the worker */
  pthread_mutex_t mutex; /* what is issued at once and what is queued have one order */
  dc_stream *worker;     /* made with the first host function */
  atomic_int num_queued; /* tasks that the worker has not done */
} dc__cuda_stream;

/* Machine code and PTX, or what the simulated driver takes. */
extern const dc__kernel_image dc__kernel_images[];

/* driver.c */
dc_status dc__cuda_driver_open(dc__cuda_driver *driver);
/* A driver's error as a status and a sentence; `call` is the function's name. */
bool dc__cuda_is_lost(dc__cu_result error); /* every later call of the process fails too */
dc_status dc__cuda_error(const dc__cuda_driver *driver, const char *name, const char *call, dc__cu_result error);

/* context_guard.c: around calls of the driver. The thread's current device is then what it was, and a graph that some
 * thread captures meanwhile is not disturbed. On a thread that has entered the device, entering it again costs nothing.
 */
typedef struct dc__cuda_context_guard {
  dc__cuda_device *device; /* to be left; NULL: none */
  dc__cuda_device *outer;  /* current before */
  int mode;                /* of capture before */
} dc__cuda_context_guard;
dc__cuda_context_guard dc__cuda_context_enter(dc__cuda_device *device);
void dc__cuda_context_leave(dc__cuda_context_guard entry);
/* An operator of the device's, whose first entry is left when it ends. */
void dc__cuda_device_begin(dc_device *device);
void dc__cuda_device_end(dc_device *device);
void dc__cuda_device_pause(dc_device *device); /* left now, and entered again when it is needed */
/* Whether what is put on the stream becomes part of a graph; with the device entered. */
bool dc__cuda_is_capturing(dc__cuda_stream *stream);
void dc__cuda_join_capture(dc__cuda_stream *stream); /* it waits for a mark that was captured */

/* device.c */
/* Of a call that no caller can be told of: keeps the device's first failure. DC_OK if there is none. */
dc_status dc__cuda_keep_error(dc__cuda_device *device, const char *call, dc__cu_result error);
/* Of a call whose caller is told; the device has failed only if it is lost. DC_OK if there is no error. */
dc_status dc__cuda_return_error(dc__cuda_device *device, const char *call, dc__cu_result error);
void dc__cuda_keep_status(dc__cuda_device *device, dc_status status); /* with this thread's last error */
/* Until the card has done all that it was given. False: that cannot be known. */
bool dc__cuda_synchronize(dc__cuda_device *device);
dc_status dc__cuda_check(dc_device *device);

#define DC__CUDA_KEEP(device, function, ...) \
  dc__cuda_keep_error((device), #function, (device)->driver.function(__VA_ARGS__))

/* What opening calls of the driver; the caller is told of its failures, and nothing is kept. */
#define DC__CUDA_CALL(self, function, ...)                                                                          \
  do {                                                                                                              \
    dc__cu_result error_ = (self)->driver.function(__VA_ARGS__);                                                    \
    if (error_ != 0) {                                                                                              \
      return dc__cuda_error(&(self)->driver, (self)->model[0] != '\0' ? (self)->model : "CUDA", #function, error_); \
    }                                                                                                               \
  } while (0)

/* kernels.c: after the context */
dc_status dc__cuda_kernels_load(dc__cuda_device *device);
void dc__cuda_kernels_unload(dc__cuda_device *device);

/* memory.c */
/* Whether memory may go back: on a device that failed the card must do first what it was given. False: nobody can tell,
 * and the memory stays where it is until the process ends. */
bool dc__cuda_can_free(dc_device *device);
dc_status dc__cuda_alloc(dc_device *device, size_t bytes, int32_t kind, void **ptr);
void dc__cuda_free(dc_device *device, void *ptr, size_t bytes, int32_t kind);
dc_status dc__cuda_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes);
dc_status dc__cuda_pool_open(dc__cuda_device *device);

/* peer_access.c: several cards in one process */
dc_status dc__cuda_peers_join(dc__cuda_device *device); /* with the device entered, after its pool is there */
void dc__cuda_peers_leave(dc__cuda_device *device);     /* also if it has not joined */
dc_status dc__cuda_enable_peer_access(dc_device *device, int32_t memory_space, const void *ptr);

/* stream.c */
dc_status dc__cuda_stream_create(dc_device *device, dc_stream **stream);
dc_status dc__cuda_stream_wrap(dc_device *device, void *native, dc_stream **stream);
dc_status dc__cuda_internal_stream_create(dc__cuda_device *device, dc_stream **stream); /* the device's own */
void dc__cuda_stream_destroy(dc_stream *stream);
bool dc__cuda_stream_captures(dc_stream *stream);
dc_status dc__cuda_stream_call(dc_stream *stream, dc__task_fn fn, const void *args, size_t bytes);
/* Issues now, or when the worker comes to it; issue(args) is called with the device entered. `later`: not by this
 * thread in any case, unless the stream is wrapped. */
typedef void (*dc__cuda_issue_fn)(dc__cuda_stream *stream, void *args);
dc_status dc__cuda_submit(dc__cuda_stream *stream, dc__cuda_issue_fn issue, const void *args, size_t bytes, bool later);
/* Until what the stream was asked for is done, without a mark. Fails as dc__cuda_submit does. */
dc_status dc__cuda_stream_drain(dc__cuda_stream *stream);
/* Whether this thread is the stream's worker, in a task: it must not wait for what the stream has queued. */
bool dc__cuda_is_own_worker(uint64_t serial);

/* stream_ops.c */
void dc__cuda_stream_copy(dc_stream *stream, void *dst, const void *src, size_t bytes);
void dc__cuda_stream_zero(dc_stream *stream, void *dst, size_t bytes);
void dc__cuda_stream_launch(dc_stream *stream, const dc__launch *given);
dc_status dc__cuda_stream_issue(dc_stream *stream, dc__native_fn fn, const void *args, size_t bytes, bool blocks);

/* products.c */
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
                                     dc__cuda_pool_event **mark); /* one reference for the caller */
dc_status dc__cuda_pool_event_wait(dc__cuda_pool_event *mark, dc__cuda_stream *stream); /* takes the reference */
dc_status dc__cuda_pool_event_sync(dc__cuda_device *device, dc__cuda_pool_event *mark, int64_t timeout_ns);
bool dc__cuda_pool_event_query(dc__cuda_device *device, dc__cuda_pool_event *mark);
void dc__cuda_pool_event_release(dc__cuda_device *device, dc__cuda_pool_event *mark); /* takes NULL */
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
/* A CPU device, whose streams are the workers. NULL if there is no memory; the last error is set. */
dc_device *dc__cuda_cpu_device(void);

#endif
