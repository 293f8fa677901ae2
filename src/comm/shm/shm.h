/* The transport of one machine: ranks are threads of a process or processes of a machine, and every rank reads what
 * it needs straight from the others' memory.
 *
 * All ranks map one control block. A rank that starts a collective writes its call (what, sizes, where its data lies)
 * into its slot and posts the collective's number; when all have posted, it compares their calls with its own, pulls
 * its part of the data, and says done. Who let others read his own memory waits until all are done; who copied his
 * data to staging memory first need not wait. Small data and, with processes, data that is not in the shared heap
 * are staged. Staging memory is two buffers, used in turn: a rank that fills one again has seen everybody's next
 * post, so everybody has read it. Staged data larger than a buffer moves in rounds, one post each. */
#ifndef DC_COMM_SHM_H
#define DC_COMM_SHM_H

#include <sys/types.h>

#include "comm/signature.h"

enum {
  DC__SHM_EAGER_BYTES = 1 << 16,   /* bytes up to which copying costs less than waiting for the readers */
  DC__SHM_STAGING_BYTES = 1 << 20, /* bytes of a staging buffer between processes; small enough to stay in the caches */
  DC__SHM_PAGE_BYTES = 4096
};

/* ---- the control block: shared, plain data and atomics, zero at first ---- */

/* A number that one rank raises and others wait for. */
typedef struct dc__shm_counter {
  _Alignas(64) atomic_uint value;
  atomic_uint waiters; /* so that raising it needs no system call while nobody sleeps */
} dc__shm_counter;

typedef struct dc__shm_request {
  dc__signature call;
  uint64_t stage; /* address of the two staging buffers */
  int32_t staged;
  int32_t has_checksums; /* checksums lie behind the staging buffers */
  /* Of the items' data: with threads pointers, with processes offsets in the rank's heap. */
  uint64_t addresses[DC__COMM_GROUP];
} dc__shm_request;

/* One rank on one channel. */
typedef struct dc__shm_slot {
  dc__shm_counter posted;       /* rounds started */
  dc__shm_counter done;         /* rounds whose data this rank has read */
  _Alignas(64) atomic_int left; /* the channel; who never came to it may be gone */
  atomic_int reading;           /* other ranks' memory, now */
  atomic_int last_op;           /* for error texts; a call may be overwritten while others look */
  atomic_llong last_id;
  atomic_llong waits; /* the number of the round that it waits for others to start, or to read if negative; 0: none */
  dc__comm_usage use;
  dc__shm_request calls[2]; /* used in turn, for the reason that staging buffers are */
} dc__shm_slot;

/* A channel is one communicator of the group. Guarded by the control block's lock. */
typedef struct dc__shm_channel {
  int64_t number; /* it carries the group's number-th communicator, from 1; 0: free */
  int32_t leavers;
  int32_t reserved;
} dc__shm_channel;

enum { DC__SHM_HEALTHY = 0, DC__SHM_FAILING = 1, DC__SHM_FAILED = 2 };

/* Channels come in segments, each made when all earlier channels are in use. Segment s has DC__SHM_CHANNELS << s. */
enum { DC__SHM_CHANNELS = 32, DC__SHM_SEGMENTS = 20 };

typedef struct dc__shm_control {
  atomic_int refs; /* ranks as threads */
  atomic_int lock;
  atomic_int failed;
  dc__failure failure; /* written by the one who moved failed from FINE to FAILING */
  int32_t world;
  atomic_int gone[DC__COMM_MAX_LOCAL]; /* ranks without a communicator of the group any more */
  int32_t segments;                    /* made so far; guarded by the lock */
  void *memory[DC__SHM_SEGMENTS];      /* of each segment, with threads; guarded by the lock */
} dc__shm_control;

static inline int32_t dc__shm_channels_in(int32_t segment) {
  return DC__SHM_CHANNELS << segment;
}

static inline int32_t dc__shm_first_channel(int32_t segment) {
  return dc__shm_channels_in(segment) - DC__SHM_CHANNELS;
}

static inline int32_t dc__shm_segment_of(int32_t channel) {
  return 31 - __builtin_clz((unsigned)(channel / DC__SHM_CHANNELS + 1));
}

/* Staging memory of a channel: two buffers, and for each the checksums of what it offers to every rank. */
static inline size_t dc__shm_staging_bytes(size_t buffer, int32_t world) {
  return 2 * (buffer + sizeof(uint64_t) * DC__COMM_GROUP * (size_t)world);
}

/* A segment as one rank has it mapped. */
typedef struct dc__shm_segment {
  dc__shm_slot *slots; /* (channel - first) * world + rank; the start of the mapping */
  dc__shm_channel *channels;
  /* This rank's staging memory by channel, two buffers each. Slower ranks may still read it when this one is gone, so
   * with processes it is never given back to the heap. NULL with threads: it lies behind the segment. */
  char **stages;
} dc__shm_segment;

/* ---- heap.c: this rank's shared memory ---- */

typedef struct dc__shm_block {
  size_t offset;
  size_t bytes;
} dc__shm_block;

/* With processes a memory file, mapped whole by every rank and filled as needed; with threads any memory will do. */
typedef struct dc__shm_heap {
  pthread_mutex_t mutex;
  dc__shm_block *blocks; /* in use, by offset */
  int64_t count;
  int64_t capacity;
  char *base;     /* NULL with threads */
  size_t reserve; /* bytes mapped */
  int fd;
} dc__shm_heap;

/* A memory file of `bytes`, without memory yet. */
dc_status dc__shm_file_create(const char *label, size_t bytes, int *fd);
/* The file's bytes [offset, offset + bytes), in whole pages. fill: makes sure of the memory now, so that a full machine
 * is an error here and no signal later; the file grows where it is shorter. call: for errors. */
dc_status dc__shm_file_map(const char *call, int fd, size_t offset, size_t bytes, bool fill, void **base);

dc_status dc__shm_heap_init(dc__shm_heap *heap, size_t reserve); /* 0: threads */
void dc__shm_heap_destroy(dc__shm_heap *heap);
/* Zeroed, page-aligned. */
dc_status dc__shm_heap_alloc(dc__shm_heap *heap, size_t bytes, void **ptr);
void dc__shm_heap_free(dc__shm_heap *heap, void *ptr, size_t bytes);

static inline bool dc__shm_heap_contains(const dc__shm_heap *heap, const void *ptr, size_t bytes) {
  uintptr_t offset = (uintptr_t)ptr - (uintptr_t)heap->base;
  return heap->base == NULL || (offset < heap->reserve && bytes <= heap->reserve - offset);
}

/* ---- group.c: what the channels of one rank share ---- */

typedef struct dc__shm_group {
  atomic_int refs; /* channels */
  int32_t rank;
  int32_t world;
  bool processes;
  int64_t timeout_ns;
  int64_t dups;         /* communicators made so far; guarded by the control block's lock */
  atomic_int checksums; /* dc_comm_set_checksums */
  dc__shm_control *control;
  int control_fd;    /* of the control block and, behind it, the segments; -1 with threads */
  atomic_int mapped; /* segments that this rank has: segments[s] is set before it counts */
  dc__shm_segment segments[DC__SHM_SEGMENTS];
  dc__shm_heap heap;
  uintptr_t bases[DC__COMM_MAX_LOCAL]; /* where the ranks' heaps are mapped here; 0 with threads */
  size_t reserves[DC__COMM_MAX_LOCAL];
  int pidfds[DC__COMM_MAX_LOCAL]; /* readable once the rank's process has ended; -1: cannot tell */
} dc__shm_group;

/* A group without control block and peers yet; reserve 0: threads. */
dc_status dc__shm_group_create(int32_t rank, int32_t world, size_t reserve, int64_t timeout_ns, dc__shm_group **out);
void dc__shm_group_release(dc__shm_group *group);

/* ---- channels.c: the control block's channels ---- */

/* A control block's bytes, before the segments in its file. */
static inline size_t dc__shm_control_bytes(void) {
  return (sizeof(dc__shm_control) + DC__SHM_PAGE_BYTES - 1) & ~(size_t)(DC__SHM_PAGE_BYTES - 1);
}

/* Takes a reference away from a control block of threads; the last one unmaps it. */
void dc__shm_control_release(dc__shm_control *control);
/* Makes the group's next segment. The caller holds the lock, or nobody else has the control block yet. */
dc_status dc__shm_segment_add(dc__shm_group *group);
/* Drops this rank's view of the segments. */
void dc__shm_segments_close(dc__shm_group *group);
/* Two staging buffers of `bytes` for a channel of this rank. */
dc_status dc__shm_staging(dc__shm_group *group, int32_t channel, size_t bytes, char **stage);
/* The channel for this rank's next communicator: the same on all ranks, whatever channels are free where. */
dc_status dc__shm_channel_join(dc__shm_group *group, int32_t *channel);
void dc__shm_channel_leave(dc__shm_group *group, int32_t channel);

/* How many channels this rank has mapped; its own communicators are on channels below. */
static inline int32_t dc__shm_channel_count(const dc__shm_group *group) {
  return dc__shm_first_channel(atomic_load_explicit(&group->mapped, memory_order_acquire));
}

static inline dc__shm_slot *dc__shm_slot_of(const dc__shm_group *group, int32_t channel, int32_t rank) {
  int32_t s = channel < DC__SHM_CHANNELS ? 0 : dc__shm_segment_of(channel); /* most groups have only the first */
  size_t place = (size_t)(channel - dc__shm_first_channel(s)) * (size_t)group->world + (size_t)rank;
  return &group->segments[s].slots[place];
}

/* fd_passing.c: messages that carry file descriptors. */
enum { DC__SHM_MAX_FDS = 2 * DC__COMM_MAX_LOCAL + 1 }; /* the most in one message */
ssize_t dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count);
/* fds: DC__SHM_MAX_FDS entries, *count of them the caller's to close, also on failure: -1 with EMFILE when some were
 * lost. */
ssize_t dc__shm_receive_fds(int fd, void *data, size_t bytes, int *fds, int32_t *count);
void dc__shm_close_fds(int *fds, int32_t count); /* -1: not open */

/* rendezvous.c: finds the other processes; fills in control, bases, reserves and pidfds. */
dc_status dc__shm_rendezvous(const char *name, dc__shm_group *group);

/* ---- shm.c: the communicator ---- */

/* A rank with which this one is crossed: each waits in a collective, of different channels, that the other one will
 * never come to. */
typedef struct dc__shm_wait_cycle {
  int32_t rank;
  int32_t channel;
  uint64_t number; /* of the rank's collective on the channel */
  int64_t since;   /* 0: there is none */
} dc__shm_wait_cycle;

typedef struct dc__shm {
  struct dc_comm head;
  dc__shm_group *group;
  int32_t channel;
  pthread_mutex_t collective_mutex; /* one collective at a time */
  uint32_t seq;                     /* rounds posted */
  uint64_t calls;                   /* collectives started */
  uint32_t waits;                   /* wait.c: how long to spin */
  int32_t spin_credit;
  dc__shm_wait_cycle cycle; /* crossed.c: of the present wait */
  char *stage;              /* two buffers of stage_bytes */
  size_t stage_bytes;
} dc__shm;

/* collective.c */
void dc__shm_run(dc_comm *comm, const dc__coll *coll);

/* single_rank.c: collectives on streams, which with one rank alone are work of the device. */
void dc__shm_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                        int32_t count);
void dc__shm_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                            int32_t count);
bool dc__shm_agree(dc_comm *comm, const dc__coll *coll, uint64_t counter);

/* The checksums of a round's pieces, [rank * DC__COMM_GROUP + item], behind a rank's staging buffers. */
static inline uint64_t *dc__shm_checksums(const dc__shm *self, const char *stage, uint32_t seq) {
  uintptr_t sums = (uintptr_t)stage + 2 * self->stage_bytes;
  return (uint64_t *)sums + (size_t)(seq & 1) * DC__COMM_GROUP * (size_t)self->head.world;
}

/* ---- wait.c ---- */

/* Raises a word of this rank to seq and wakes who waits for it. */
void dc__shm_signal(const dc__shm_group *group, dc__shm_counter *counter, uint32_t seq);
/* Waits until every other rank has posted (or has done) seq. */
dc_status dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq);

/* ---- crossed.c ---- */

/* While this rank waits for others to come to its present collective: says whether its user is held there, and looks
 * for a rank with which it is crossed; an error once that has lasted. */
dc_status dc__shm_check_deadlock(dc__shm *self, const dc__coll *coll);

/* Makes every communicator of the group fail, on all ranks, with this thread's last error, unless they have a failure.
 */
void dc__shm_group_fail(const dc__shm_group *group, dc_status status);
/* After a failure: until no other thread reads this rank's memory any more, which its owner may free next. */
void dc__shm_wait_readers(const dc__shm *self);
/* Fails the group if a rank's process has ended. */
void dc__shm_check_peers(const dc__shm *self);
/* The group's failure as this thread's last error. */
dc_status dc__shm_group_check(const dc__shm_group *group);

#endif
