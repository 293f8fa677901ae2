/* Communicators behind one table, which each transport implements. Callers queue collectives on a stream and learn of
 * failures from dc__comm_check(). shm/ connects threads or processes of one machine by shared memory. tcp/ and mpi/
 * connect several machines, and levels/ combines one of them with shm/. external/ wraps the caller's own functions.
 * nccl/ moves data between cards, and count/ moves none.
 *
 * A collective is a group of 1 to DC__COMM_GROUP items with one handshake. Every rank calls with the same tag, totals,
 * dtypes and ranges. Transports compare them; a difference is DC_E_MISMATCH on every rank. Items that reduce into the
 * same memory run in order. */
#ifndef DC_COMM_H
#define DC_COMM_H

#include "device/device.h"

enum {
  DC__COMM_GROUP = 12,
  DC__COMM_MAX_WORLD = 1024, /* ranks; shared memory and NCCL take fewer */
  DC__COMM_MAX_LOCAL = 64,   /* ranks in shared memory: one message carries two descriptors of each */
};

/* Elements [begin, begin + count) of a flattened tensor. */
typedef struct dc__range {
  int64_t begin;
  int64_t count;
} dc__range;

/* Begin and end of an operation's work, for an entry of the flight recorder. The thread that queues a piece of work
 * counts it in `pending`; the thread that runs it sets begin and end, in dc__ticks(). A device's own work is timed by
 * the device's timestamps. An operation may have several pieces. NULL disables timing. */
typedef struct dc__op_timing {
  atomic_llong begun; /* 0: not yet */
  atomic_llong ended; /* of the latest piece; 0: none yet */
  atomic_int pending; /* pieces queued and not done; the memory must stay until 0 */
  atomic_int failed;
  dc__timestamp *_Atomic first; /* begin of the first piece; NULL if the host set `begun` */
  dc__timestamp *_Atomic last;  /* end of the latest one */
} dc__op_timing;

static inline void dc__op_timing_expect(dc__op_timing *span) {
  if (span != NULL) {
    atomic_fetch_add_explicit(&span->pending, 1, memory_order_relaxed);
  }
}

static inline void dc__op_timing_begin(dc__op_timing *span) {
  if (span != NULL && atomic_load_explicit(&span->begun, memory_order_relaxed) == 0) {
    atomic_store_explicit(&span->begun, dc__ticks(), memory_order_relaxed);
  }
}

static inline void dc__op_timing_end(dc__op_timing *span, bool failed) {
  if (span != NULL) {
    atomic_store_explicit(&span->ended, dc__ticks(), memory_order_relaxed);
    if (failed) {
      atomic_store_explicit(&span->failed, 1, memory_order_relaxed);
    }
    atomic_fetch_sub_explicit(&span->pending, 1, memory_order_release);
  }
}

/* Times the work queued on a stream between the two calls (host_transport.c). */
void dc__op_timing_begin_on(dc__op_timing *span, dc_stream *stream);
void dc__op_timing_end_on(dc__op_timing *span, dc_stream *stream);

/* For error texts and traces: which operator, graph and parameter a collective serves. */
typedef struct dc__tag {
  int64_t graph_id;    /* -1: none */
  int64_t id;          /* the first item's parameter; -1: none */
  int32_t op;          /* enum dc_op */
  dc__op_timing *span; /* this rank's; NULL if not recorded */
  uint64_t number;     /* dc__comm_number(); 0: none yet */
} dc__tag;

enum dc__coll_kind {
  DC__COLL_GATHER = 1,
  DC__COLL_REDUCE = 2,
  DC__COLL_BROADCAST = 3,
  DC__COLL_BARRIER = 4,
  DC__COLL_ALL_TO_ALL = 5 /* also a gather to one rank or a scatter from one, as tag.op says */
};

typedef struct dc__coll_item {
  const void *send;        /* gather: this rank's range of the tensor; else the whole tensor */
  void *recv;              /* reduce: this rank's range of the tensor; else the whole tensor */
  const dc__range *ranges; /* one per rank, valid until the collective is done; all-to-all: of send, then of recv */
  int64_t total;           /* elements in the ranges, in two levels fewer than in the tensor; all-to-all: of send */
  int64_t id;              /* parameter; -1: none */
  int32_t dtype;           /* of send, and of recv in a gather */
  int32_t recv_dtype;      /* reduce: of recv; results are converted after the division */
  int32_t accumulate;      /* reduce: 1 = recv += result, 0 = recv = result */
  int32_t reduce_op;       /* reduce: DC_SUM or DC_MEAN */
  int32_t lacks_recv;      /* reduce: 1 = this rank has no memory for the gather that follows, so all ranks fail */
} dc__coll_item;

typedef struct dc__coll dc__coll;   /* host_transport.h */
typedef struct dc__split dc__split; /* split.h */

typedef struct dc__comm_ops {
  const char *name;
  /* Collectives, queued on the stream, or done on return if stream is NULL. On a stream they never block the caller.
   * They report failures through dc__comm_fail() and copy items. */
  void (*all_gather)(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items, int32_t count);
  void (*reduce_scatter)(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int32_t count);
  void (*broadcast)(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root);
  void (*all_to_all)(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *item, int32_t root);
  void (*barrier)(dc_comm *comm, const dc__tag *tag);
  dc_status (*dup)(dc_comm *comm, dc_comm **copy);
  /* Optional; collective (split.h). */
  dc_status (*split)(dc_comm *comm, const dc__split *split, dc_comm **part);
  /* Replaces split if ranks cannot exchange their colors; see dc__comm_split_even(). */
  dc_status (*split_even)(dc_comm *comm, int32_t first, int32_t step, int32_t world, dc_comm **part);
  void (*abort)(dc_comm *comm, const char *reason);
  /* Optional, for transports on top of this one: fails the group on all ranks with this thread's last error. */
  void (*fail_group)(dc_comm *comm, dc_status status);
  /* Runs a whole collective on a host thread, and blocks. host_transport.h builds the collectives above on it. */
  void (*run)(dc_comm *comm, const dc__coll *coll);
  /* For transports on top of this one: the handshake of a collective without its data. True if all ranks passed the
   * same word, which may differ. */
  bool (*agree)(dc_comm *comm, const dc__coll *coll, uint64_t word);
  /* Optional: brackets a wait for other ranks on another communicator. Meanwhile this one moves the data of its earlier
   * collectives on, which a rank may need before it can join that wait. */
  void (*progress)(dc_comm *comm, bool waits);
  /* Optional, for transports on top of another communicator: gives that one the parent too. */
  void (*set_parent)(dc_comm *comm, dc_comm *parent);
  /* Optional: picks up a failure that another rank reported. */
  void (*poll)(dc_comm *comm);
  /* Optional: as poll, and checks for processes that ended, at one system call per rank. */
  void (*check_peers)(dc_comm *comm);
  /* Optional: memory that peers read in place. */
  dc_status (*heap_alloc)(dc_comm *comm, size_t bytes, void **ptr);
  void (*heap_free)(dc_comm *comm, void *ptr, size_t bytes);
  bool (*peer_accessible)(dc_comm *comm, const void *ptr, size_t bytes); /* can peers read it in place? */
  /* Optional, both or none. They apply to all copies. */
  dc_status (*set_checksums)(dc_comm *comm, bool enable);
  bool (*has_checksums)(const dc_comm *comm);
  void (*destroy)(dc_comm *comm);
} dc__comm_ops;

/* Memory of a device, or of the host if device is NULL. */
typedef struct dc__comm_scratch {
  dc_device *device;
  void *ptr;
  size_t bytes;
} dc__comm_scratch;

/* A rank's published state of a communicator, to detect deadlocks across communicators. Two ranks deadlock if each
 * waits in a collective that the other has not requested. That is certain only if on both ranks a single thread uses
 * both communicators and is blocked, so that no other thread can make the request. */
typedef struct dc__comm_usage {
  atomic_ullong requested; /* collectives that the rank has requested, started or not */
  atomic_ullong user; /* the thread that created, copied or used it; 0: none yet; DC__COMM_SEVERAL_USERS: several */
  atomic_ullong blocked_in; /* the collective, counted from 1, that blocks this thread; 0: none */
} dc__comm_usage;

#define DC__COMM_SEVERAL_USERS UINT64_MAX
#define DC__COMM_DEADLOCK_NS INT64_C(1000000000) /* how long a deadlock must last to be a failure */

/* The head of every transport's struct. */
struct dc_comm {
  int32_t handle; /* DC__HANDLE_COMM */
  const dc__comm_ops *ops;
  int32_t rank;
  int32_t world;
  bool single_rank;        /* one rank: collectives on a device's stream are plain work of that stream */
  bool stream_ordered;     /* collectives on a device's stream are issued to it, and may be captured into a graph */
  bool keeps_memory;       /* after a failure an MPI request may still write to a collective's memory */
  bool supports_device;    /* tensors may lie in memory that the host cannot access */
  int32_t memory_space;    /* of the only device that its heap and supports_device refer to; 0: host heap, any device */
  const dc_device *device; /* the only one whose streams it takes; NULL: those that the two above allow */
  int64_t timeout_ns;
  dc__comm_usage *usage; /* NULL if the transport does not publish it */
  dc__owner owner;
  dc_comm *parent; /* its failure ends this one's waits; NULL: none */
  atomic_int refs;
  atomic_int exclusive;               /* 1 while dc__comm_acquire_exclusive() lends it, because it cannot be copied */
  atomic_llong wire_bytes;            /* received from other ranks in all collectives */
  atomic_ullong numbered;             /* collectives called so far, for dc__comm_number() */
  uint64_t origin;                    /* hash of which copy this is, of which communicator; 0: it is no copy */
  pthread_mutex_t mutex;              /* guards copies, failure, group, scratch */
  uint64_t copies;                    /* requested so far */
  dc__failure failure;                /* the first one; sticky */
  atomic_int failed;                  /* failure.status != DC_OK, for a fast check */
  struct dc__comm_group_state *group; /* dc_comm_group_begin … end (coll_group.c) */
  dc__comm_scratch scratch;           /* this rank's chunk of an all-reduce (all_reduce.c) */
};

/* For transports: set up and tear down the head. */
dc_status dc__comm_head_init(dc_comm *comm, const dc__comm_ops *ops, int32_t rank, int32_t world, int64_t timeout_ns);
void dc__comm_head_destroy(dc_comm *comm);
/* Keeps the first failure; the text is this thread's last error. */
void dc__comm_fail(dc_comm *comm, dc_status status);

/* Calls ops->dup and sets the copy's origin, which ranks compare in every collective. A transport pairs the n-th copies
 * of a group, but two threads may make theirs in another order on each rank. */
dc_status dc__comm_dup(dc_comm *comm, dc_comm **copy);
/* Numbers the next `collectives` and returns the first number. A thread calls them in one order, but streams may run
 * them in another. So ranks compare the numbers: else collectives of equal shapes could exchange each other's data. */
uint64_t dc__comm_number(dc_comm *comm, uint64_t collectives);
/* Notes that the calling thread uses the communicator and requests `collectives` of them. */
void dc__comm_note_request(dc_comm *comm, uint64_t collectives);
/* Counts handshakes beyond one per request, so that later requests keep the numbers of their handshakes. */
void dc__comm_note_handshakes(dc_comm *comm, uint64_t count);
/* The only thread that uses the communicator, if the calling thread's work blocks it; else 0. */
uint64_t dc__comm_blocked_user(const dc_comm *comm);

dc_comm *dc__comm_retain(dc_comm *comm);
void dc__comm_release(dc_comm *comm);
/* Makes a copy of comm. If the transport cannot, lends comm itself, to one user at a time: two would queue collectives
 * in a different order on each rank. dc__comm_release_exclusive() returns it. */
dc_status dc__comm_acquire_exclusive(const char *fn, dc_comm *comm, dc_comm **exclusive_comm);
void dc__comm_release_exclusive(dc_comm *exclusive_comm);
/* DC_OK, or the sticky failure as this thread's last error. Cheap if there is none. */
dc_status dc__comm_check(dc_comm *comm);
/* For a part that one user uses together with its whole. A failure of `parent` ends collectives of comm that wait for
 * other ranks over shared memory or TCP, and fails comm. The creation of copies and parts ignores it. Call this while
 * no collective of comm runs. `parent` must outlive comm, or be reset to NULL. */
void dc__comm_set_parent(dc_comm *comm, dc_comm *parent);
/* For transports, while they wait: the failure of the parent, or of one of its parents. */
dc_status dc__comm_check_parents(const dc_comm *comm);

/* Whether the ranks can exchange memory of the device. */
dc_status dc__comm_check_device(const char *fn, const dc_comm *comm, const dc_device *device);

/* Any number of items, split into groups of DC__COMM_GROUP. Items with total 0 are skipped. */
void dc__comm_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                         int64_t count);
void dc__comm_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                             int64_t count);
/* Works in place. A rank without memory for its chunk aborts the group. */
void dc__comm_all_reduce(dc_comm *comm, dc_stream *stream, void *data, int64_t count, int32_t dtype, int32_t op);
void dc__comm_broadcast(dc_comm *comm, dc_stream *stream, const dc__tag *tag, void *data, size_t bytes, int32_t root);
/* Calls fn(&block) once the collectives queued on the stream no longer read the block. fn may run on another thread. */
void dc__comm_run_behind(dc_comm *comm, dc_stream *stream, dc__task_fn fn, void *block);
/* All-gather of `count` int64 from each rank into table (world * count), on the calling thread. */
dc_status dc__comm_all_gather_int64(dc_comm *comm, const dc__tag *tag, const int64_t *values, int64_t count,
                                    int64_t *table);

/* Starts a caller's checked all-gather or reduce-scatter, or adds it to the open group. Copies the ranges. */
dc_status dc__comm_submit(dc_comm *comm, dc_stream *stream, int32_t kind, const dc__coll_item *item);
/* Starts a caller's checked all-to-all, or its gather to the root or scatter from it. Copies the ranges. */
dc_status dc__comm_all_to_all(dc_comm *comm, dc_stream *stream, int32_t op, int32_t root, const dc__coll_item *item);
bool dc__comm_group_is_open(dc_comm *comm);
dc_status dc__comm_group_begin(const char *fn, dc_comm *comm);
dc_status dc__comm_group_end(const char *fn, dc_comm *comm, dc_stream *stream);
/* Closes the open group, if there is one, without starting it. */
void dc__comm_group_drop(dc_comm *comm);

/* For comm.c: what the head keeps for coll_group.c and all_reduce.c. */
void dc__comm_free_group(dc_comm *comm);
void dc__comm_free_scratch(dc_comm *comm);

/* Collective (split.c). Orders the ranks of each color by key, then by rank. *part is NULL if color is -1. Succeeds on
 * all ranks or on none. */
dc_status dc__comm_split(dc_comm *comm, int32_t color, int32_t key, dc_comm **part);
/* Collective. Divides all ranks into parts of `world` ranks. This rank's part has every step-th rank from `first` on.
 * The counting communicator can only be split this way, since it has no other ranks to exchange colors with. */
dc_status dc__comm_split_even(dc_comm *comm, int32_t first, int32_t step, int32_t world, dc_comm **part);

/* Constructors. src/api/comm.c has checked the arguments; no option but heap_bytes is 0. */
dc_status dc__comm_create_self(dc_comm **comm); /* a world of one rank */
dc_status dc__comm_create_threads(int32_t world, const dc_comm_options *options, dc_comm **comms);
dc_status dc__comm_create_processes(const char *name, int32_t rank, int32_t world, const dc_comm_options *options,
                                    dc_comm **comm);
dc_status dc__comm_create_tcp(const char *address, const char *name, int32_t rank, int32_t world,
                              const dc_comm_options *options, dc_comm **comm);
/* The same with rank 0's listener, which it takes over even if it fails; -1: none yet. */
dc_status dc__comm_create_tcp_at(int listener, const char *address, const char *name, int32_t rank, int32_t world,
                                 const dc_comm_options *options, dc_comm **comm);
dc_status dc__comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world,
                                   const dc_comm_options *options, dc_comm **comm);
/* Collective. One card per rank, through NCCL; a copy of `comm` does the bootstrap and the handshakes. A rank that
 * fails while peers may wait for it in NCCL aborts the group. */
dc_status dc__comm_create_nccl(dc_comm *comm, dc_device *device, dc_comm **copy);
/* One rank of a group on the counting device. heap: shards are staged for peers, as in shared memory and by NCCL. */
dc_status dc__comm_create_count(dc_device *device, int32_t rank, int32_t world, bool heap, dc_comm **comm);
/* The ranks of MPI_COMM_WORLD. */
dc_status dc__comm_create_mpi(const dc_comm_options *options, dc_comm **comm);
/* Collective (levels/). Takes over a communicator whose ranks may lie on several machines. *comm does its collectives
 * in two levels where that is possible, else it is `whole`. node: a text that the ranks of one machine have in common;
 * NULL: the machine's name; empty: this rank shares memory with no other. */
dc_status dc__comm_create_levels(dc_comm *whole, const char *node, dc_comm **comm);
/* The MPI that would be used, a text that stays valid. DC_E_UNSUPPORTED if there is none, with the reason. */
dc_status dc__mpi_version(const char **version);

/* ---- launch/launch.c ---- */

/* For dc_launch_get(): reads a launcher's variables in the environment. Texts live until this thread's next call. */
dc_status dc__launch_read(dc_launch *launch);
/* The number of ranks that a launcher of MPI, Slurm or Flux says it started; 0 if none says. */
int32_t dc__launch_mpi_size(void);
/* Version of the NCCL that would be used, 22907 for 2.29.7. DC_E_UNSUPPORTED if there is none, with the reason. */
dc_status dc__nccl_version(int32_t *version);

#endif
