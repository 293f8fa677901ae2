/* The transport of one machine. Ranks are threads or processes; each reads what it needs directly from its peers'
 * memory.
 *
 * All ranks map one control block. To start a collective, a rank writes its call (signature and data addresses) into
 * its slot and posts the collective's number. Once all ranks have posted, it compares their calls with its own, pulls
 * its part of the data and signals done.
 *
 * A rank whose memory peers read in place waits until all have finished; a rank that staged a copy does not. Small data
 * is staged and, with processes, data outside the shared heap. Staging memory is double-buffered: a rank that refills a
 * buffer has seen every peer's next post, so every peer has read the old contents. Staged data larger than a buffer
 * moves in rounds, one post each. */
#ifndef DC_COMM_SHM_H
#define DC_COMM_SHM_H

#include <sys/types.h>

#include "comm/signature.h"

enum {
  DC__SHM_EAGER_BYTES = 1 << 16,   /* up to this size a copy costs less than waiting for the readers */
  DC__SHM_STAGING_BYTES = 1 << 20, /* a staging buffer between processes; fits into the caches */
  DC__SHM_PAGE_BYTES = 4096
};

/* ---- the control block: shared, plain data and atomics, initially zero ---- */

/* A counter that one rank raises and others wait on (futex). */
typedef struct dc__shm_counter {
  _Alignas(64) atomic_uint value;
  atomic_uint waiters; /* spares the wake-up call if no rank sleeps */
} dc__shm_counter;

typedef struct dc__shm_request {
  dc__signature call;
  uint64_t stage; /* address of the two staging buffers */
  int32_t staged;
  int32_t has_checksums; /* checksums lie behind the staging buffers */
  /* Where the items' data lies: with threads pointers, with processes offsets in the rank's heap. */
  uint64_t addresses[DC__COMM_GROUP];
} dc__shm_request;

/* One rank on one channel. */
typedef struct dc__shm_slot {
  dc__shm_counter posted;       /* rounds started */
  dc__shm_counter done;         /* rounds whose data this rank has read */
  _Alignas(64) atomic_int left; /* 1 once the rank left the channel; for one that never joined, see `released` */
  atomic_int reading;           /* 1 while it reads peers' memory */
  atomic_int last_op;           /* for error texts, since a call may be overwritten while peers read it */
  atomic_llong last_id;
  atomic_llong waits; /* the round that it waits for peers to post, or negated, to finish; 0: none */
  dc__comm_usage usage;
  dc__shm_request calls[2]; /* double-buffered, as staging memory is */
} dc__shm_slot;

/* A channel is one communicator of the group. Guarded by the control block's lock. */
typedef struct dc__shm_channel {
  int64_t number; /* of the group's communicator that it carries, from 1; 0: free */
  int32_t leavers;
  int32_t reserved;
} dc__shm_channel;

enum { DC__SHM_HEALTHY = 0, DC__SHM_FAILING = 1, DC__SHM_FAILED = 2 };

/* Channels come in segments, added when all channels are in use. Segment s has DC__SHM_CHANNELS << s. */
enum { DC__SHM_CHANNELS = 32, DC__SHM_SEGMENTS = 20 };

typedef struct dc__shm_control {
  atomic_int refs; /* with threads: ranks */
  atomic_int lock;
  atomic_int failed;
  dc__failure failure; /* written by the rank that moved `failed` from HEALTHY to FAILING */
  int32_t world;
  _Atomic(struct dc__shm_control *) unused; /* left by a failed split; freed with this one */
  atomic_int released[DC__COMM_MAX_LOCAL];  /* 1 once a rank has released its last communicator */
  int32_t segments;                         /* made so far; guarded by the lock */
  void *memory[DC__SHM_SEGMENTS];           /* of each segment, with threads; guarded by the lock */
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

/* Staging memory of a channel: two buffers, each with checksums of its data for every rank. */
static inline size_t dc__shm_staging_bytes(size_t buffer, int32_t world) {
  return 2 * (buffer + sizeof(uint64_t) * DC__COMM_GROUP * (size_t)world);
}

/* One rank's mapping of a segment. */
typedef struct dc__shm_segment {
  dc__shm_slot *slots; /* (channel - first) * world + rank; the start of the mapping */
  dc__shm_channel *channels;
  /* This rank's staging memory by channel, two buffers each. Slower ranks may read it after this one is gone, so with
   * processes it is never returned to the heap. NULL with threads, where it lies behind the segment. */
  char **stages;
} dc__shm_segment;

/* ---- heap.c: this rank's shared memory ---- */

typedef struct dc__shm_block {
  size_t offset;
  size_t bytes;
} dc__shm_block;

/* With processes a memory file, which every rank maps whole and fills on demand; with threads anonymous memory. */
typedef struct dc__shm_heap {
  pthread_mutex_t mutex;
  dc__shm_block *blocks; /* in use, by offset */
  int64_t count;
  int64_t capacity;
  char *base;     /* NULL with threads */
  size_t reserve; /* bytes mapped */
  int fd;
} dc__shm_heap;

/* Creates a memory file of `bytes` without allocating its memory. */
dc_status dc__shm_file_create(const char *label, size_t bytes, int *fd);
/* Maps the file's bytes [offset, offset + bytes), in whole pages. `fill` allocates them now and grows the file if
 * needed, so that a lack of memory is an error and not a later signal. `call` is for error texts. */
dc_status dc__shm_file_map(const char *call, int fd, size_t offset, size_t bytes, bool fill, void **base);

dc_status dc__shm_heap_init(dc__shm_heap *heap, size_t reserve); /* 0 with threads */
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
  atomic_int mapped; /* segments mapped by this rank; segments[s] is set before the count */
  dc__shm_segment segments[DC__SHM_SEGMENTS];
  dc__shm_heap heap;
  uintptr_t bases[DC__COMM_MAX_LOCAL]; /* the ranks' heaps as mapped here; 0 with threads */
  size_t reserves[DC__COMM_MAX_LOCAL];
  int pidfds[DC__COMM_MAX_LOCAL]; /* readable once the rank's process has ended; -1 if unknown */
} dc__shm_group;

/* A group without control block and peers; reserve is 0 with threads. */
dc_status dc__shm_group_create(int32_t rank, int32_t world, size_t reserve, int64_t timeout_ns, dc__shm_group **out);
void dc__shm_group_release(dc__shm_group *group);

/* ---- channels.c: the control block's channels ---- */

/* A control block's bytes, before the segments in its file. */
static inline size_t dc__shm_control_bytes(void) {
  return (sizeof(dc__shm_control) + DC__SHM_PAGE_BYTES - 1) & ~(size_t)(DC__SHM_PAGE_BYTES - 1);
}

/* Drops a reference to a control block of threads; the last one unmaps it. */
void dc__shm_control_release(dc__shm_control *control);
/* Adds the group's next segment. Requires the lock, or sole access to the control block. */
dc_status dc__shm_segment_add(dc__shm_group *group);
/* Unmaps this rank's segments. */
void dc__shm_segments_close(dc__shm_group *group);
/* Two staging buffers of `bytes` for a channel of this rank. */
dc_status dc__shm_staging(dc__shm_group *group, int32_t channel, size_t bytes, char **stage);
/* The channel for this rank's next communicator, the same on all ranks. */
dc_status dc__shm_channel_join(dc__shm_group *group, int32_t *channel);
void dc__shm_channel_leave(dc__shm_group *group, int32_t channel);

/* Number of channels that this rank has mapped, which include those of its communicators. */
static inline int32_t dc__shm_channel_count(const dc__shm_group *group) {
  return dc__shm_first_channel(atomic_load_explicit(&group->mapped, memory_order_acquire));
}

static inline dc__shm_slot *dc__shm_slot_of(const dc__shm_group *group, int32_t channel, int32_t rank) {
  int32_t s = channel < DC__SHM_CHANNELS ? 0 : dc__shm_segment_of(channel); /* most groups have only the first */
  size_t index = (size_t)(channel - dc__shm_first_channel(s)) * (size_t)group->world + (size_t)rank;
  return &group->segments[s].slots[index];
}

/* fd_passing.c: messages that carry file descriptors. */
enum { DC__SHM_MAX_FDS = 2 * DC__COMM_MAX_LOCAL + 1 }; /* per message */
ssize_t dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count);
/* fds has DC__SHM_MAX_FDS entries; the caller closes *count of them, also on failure. -1 with EMFILE if the kernel
 * dropped some. */
ssize_t dc__shm_receive_fds(int fd, void *data, size_t bytes, int *fds, int32_t *count);
void dc__shm_close_fds(int *fds, int32_t count); /* -1: not open */

/* rendezvous.c: connects the processes; fills in control, bases, reserves and pidfds. */
dc_status dc__shm_rendezvous(const char *name, dc__shm_group *group);

/* ---- shm.c: the communicator ---- */

/* A deadlock with another rank: each waits in a collective that the other will never join, on different channels. */
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
  dc__spin spin;
  dc__shm_wait_cycle cycle; /* deadlock.c: of the present wait */
  char *stage;              /* two buffers of stage_bytes */
  size_t stage_bytes;
} dc__shm;

/* collective.c */
void dc__shm_run(dc_comm *comm, const dc__coll *coll);

/* single_rank.c: collectives on streams, which for a single rank are plain device work. */
void dc__shm_all_gather(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                        int32_t count);
void dc__shm_reduce_scatter(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *items,
                            int32_t count);
void dc__shm_all_to_all(dc_comm *comm, dc_stream *stream, const dc__tag *tag, const dc__coll_item *item, int32_t root);
/* collective.c */
bool dc__shm_agree(dc_comm *comm, const dc__coll *coll, uint64_t word);

/* Checksums of a round's slices, [rank * DC__COMM_GROUP + item], behind a rank's staging buffers. */
static inline uint64_t *dc__shm_checksums(const dc__shm *self, const char *stage, uint32_t seq) {
  uintptr_t sums = (uintptr_t)stage + 2 * self->stage_bytes;
  return (uint64_t *)sums + (size_t)(seq & 1) * DC__COMM_GROUP * (size_t)self->head.world;
}

/* ---- wait.c ---- */

/* Raises a counter of this rank to seq and wakes the ranks that wait on it. */
void dc__shm_signal(const dc__shm_group *group, dc__shm_counter *counter, uint32_t seq);
/* Waits until every other rank has posted (or finished) seq. */
dc_status dc__shm_wait_posted(dc__shm *self, const dc__coll *coll, uint32_t seq);
dc_status dc__shm_wait_done(dc__shm *self, const dc__coll *coll, uint32_t seq);

/* Whether a rank's process has ended; false with threads, or if the system cannot tell. */
bool dc__shm_has_exited(const dc__shm_group *group, int32_t rank);

/* ---- deadlock.c ---- */

/* Called while peers are missing in the present collective: publishes whether it blocks this rank's user, and looks for
 * a deadlock. An error once that has lasted DC__COMM_DEADLOCK_NS. */
dc_status dc__shm_check_deadlock(dc__shm *self, const dc__coll *coll);

/* ---- wait.c: failures of the group ---- */

/* Fails the group on all ranks with this thread's last error, unless it has failed. */
void dc__shm_group_fail(const dc__shm_group *group, dc_status status);
/* After a failure: waits until no peer thread reads this rank's memory, which its owner may free next. */
void dc__shm_wait_readers(const dc__shm *self);
/* Fails the group if a rank's process has ended. */
void dc__shm_check_peers(const dc__shm *self);
/* The group's failure as this thread's last error. */
dc_status dc__shm_group_check(const dc__shm_group *group);

#endif
