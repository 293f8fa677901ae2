/* A collective over TCP in progress. collective.c exchanges calls and data between all ranks; scatter.c says which
 * parts of a large broadcast go where. relay.c runs small collectives in few rounds. transfer.c moves the bytes of all
 * of them, and waits. */
#ifndef DC_COMM_TCP_COLLECTIVE_H
#define DC_COMM_TCP_COLLECTIVE_H

#include "comm/tcp/tcp.h"

/* Values that a few changed bits cannot turn into 0. */
#define DC__TCP_CHECKSUM UINT64_C(0x6373756d33326331)
#define DC__TCP_RELAYED UINT64_C(0x72656c6179656431)

enum { DC__TCP_MAX_RELAYED = 4 << 20 /* bytes of data behind a relayed message: 4 KiB from each rank */ };

/* A round's message of a small collective, which speaks for all ranks that the sender has heard of. It begins like a
 * header. */
typedef struct dc__tcp_relayed {
  uint64_t seq;
  uint64_t bytes;
  uint64_t has_checksum;
  uint64_t kind;       /* DC__TCP_RELAYED; 0 in a header */
  uint64_t digest;     /* of the sender's call */
  uint64_t word;       /* of agree() */
  uint32_t alike;      /* 1 if all their calls have this digest */
  uint32_t same_words; /* 1 if all passed this word */
} dc__tcp_relayed;

/* Traffic with one rank in one collective, each way a header and then data. */
typedef struct dc__tcp_transfer {
  int fd;
  int32_t out_count, out_pos;
  int32_t in_count, in_pos;
  size_t bytes_received;  /* of recv_header; 0 between collectives */
  uint64_t bytes_skipped; /* of the data behind a relayed message that is skipped */
  struct iovec out[DC__COMM_GROUP + 2];
  struct iovec in[DC__COMM_GROUP + 1];
  uint32_t sent_crc, received_crc; /* of the header and the data so far, if the sender has checksums */
  uint32_t peer_crc;               /* the peer's sent_crc, which arrived after the data */
  struct dc__tcp_header {
    uint64_t seq;          /* from 1, or DC__TCP_SEQ_LEAVE */
    uint64_t bytes;        /* of data behind it, without the checksum; of a rank that leaves: its last seq */
    uint64_t has_checksum; /* DC__TCP_CHECKSUM: the data's CRC-32C comes last; 0: there is none */
    uint64_t kind;         /* 0: a whole call */
    dc__signature call;
  } send_header;
  union {
    struct dc__tcp_header recv_header;
    dc__tcp_relayed recv_relayed;
  };
  dc__tcp_relayed relayed; /* to send */
} dc__tcp_transfer;

typedef struct dc__tcp_plan {
  dc__tcp *self;
  const dc__coll *coll;
  bool has_data;             /* data follow the calls */
  bool signatures_match;     /* all calls have arrived and match */
  bool scatters;             /* the data is a broadcast's, of which ranks pass on parts */
  bool same_words;           /* for agree(): all ranks passed this rank's word */
  bool queried;              /* the deadline has passed, and the peers were queried */
  bool has_checksums;        /* this rank adds checksums to its data */
  dc__signature call;        /* this rank's */
  int64_t deadline;          /* restarts on progress; 0: set at the next wait */
  int64_t deadlock_check_ns; /* next deadlock check; likewise */
  char op_text[DC__COLL_TEXT];
} dc__tcp_plan;

/* ---- transfer.c ---- */

void dc__tcp_add_iov(struct iovec *list, int32_t *count, const void *at, int64_t bytes);
uint64_t dc__tcp_iov_bytes(const struct iovec *list, int32_t from, int32_t to);
dc_status dc__tcp_reserve_scratch(dc__tcp *self, int64_t bytes);
/* Reads what is there until `bytes` of a header have arrived. False if the connection ended; then errno is its error,
 * or 0 if the peer closed it. */
bool dc__tcp_read_header(dc__tcp_transfer *transfer, size_t bytes, bool *progress);
/* Whether the received part of a header announces that the peer destroys the communicator. */
bool dc__tcp_has_left(const dc__tcp_transfer *transfer);
/* Returns the error of a lost connection to rank r; `error` is errno, or 0 if the peer closed it. */
dc_status dc__tcp_fail_transfer(const dc__tcp_plan *p, int32_t r, int error);
/* Rank r sent something else than a message of this collective. */
dc_status dc__tcp_fail_garbled(const dc__tcp_plan *p, int32_t r);
dc_status dc__tcp_fail_size(const dc__tcp_plan *p, int32_t r, uint64_t bytes, uint64_t expected);
/* Whether some of transfer->out may be sent now. */
bool dc__tcp_can_send(const dc__tcp_plan *p, int32_t r);
/* Send as much of transfer->out as fits; read as much of transfer->in as is there. */
dc_status dc__tcp_send_some(const dc__tcp_plan *p, int32_t r, bool *progress);
dc_status dc__tcp_receive_some(const dc__tcp_plan *p, int32_t r, bool *progress);
/* DC_E_CORRUPT if the data from rank r does not match its checksum. DC_OK if rank r sends none. */
dc_status dc__tcp_compare_checksum(const dc__tcp_plan *p, int32_t r);
/* Restarts the deadlines, after progress. */
void dc__tcp_note_progress(dc__tcp_plan *p);
/* A wait calls it between two tests of another network. It checks for a failure of the group or its parents, the
 * deadline, and deadlocks. missing: the ranks that are waited for. */
dc_status dc__tcp_check_wait(dc__tcp_plan *p, const dc__rank_set *missing);
/* Waits until one of self->polls[0, count) is ready or the group fails. self->polls needs two more. A failure counts
 * only once the caller has read what has arrived, since peers may have failed in a later collective. missing: the ranks
 * that are waited for; all_headers: their calls have arrived. */
dc_status dc__tcp_wait_ready(dc__tcp_plan *p, int32_t count, const dc__rank_set *missing, bool all_headers);

/* ---- own_part.c ---- */

/* Bytes of all items of a reduction that `rank` receives from one other rank, with padding. */
int64_t dc__tcp_part_bytes(const dc__coll *coll, int32_t rank);
void dc__tcp_copy_own(const dc__tcp *self, const dc__coll *coll);
/* Adds the received parts in scratch memory and this rank's own, in rank order. */
void dc__tcp_reduce_own(const dc__tcp *self, const dc__coll *coll);

/* ---- scatter.c ---- */

/* Whether the root of a broadcast sends each rank a part to pass on: the same on all ranks whose calls match. */
bool dc__tcp_scatters(const dc__tcp_plan *p);
/* Adds the parts to send to rank r and to receive from it. */
void dc__tcp_fill_scatter(const dc__tcp_plan *p, int32_t r, dc__tcp_transfer *transfer);
/* Bytes of its part that this rank may not pass on yet, since they or their checksum have not arrived. */
uint64_t dc__tcp_missing_part(const dc__tcp_plan *p);

/* ---- relay.c ---- */

/* Whether ranks of this communicator send small collectives in rounds. */
bool dc__tcp_relays(const dc__tcp *self);
/* Whether a collective is so small that it goes in rounds: the same on all ranks whose calls match. */
bool dc__tcp_is_small(const dc__tcp_plan *p);
/* Runs a small collective, or without data the handshake of any. If *alike is false, some calls differ, and all ranks
 * that relay know it. Then no data has been written. */
dc_status dc__tcp_run_small(dc__tcp_plan *p, bool with_data, bool *alike);
/* carried.c: runs the handshake over the carrier. *alike: as above. */
dc_status dc__tcp_compare_carried(dc__tcp_plan *p, bool *alike);
/* After *alike was false, if all ranks relay: gathers the calls of all. */
dc_status dc__tcp_gather_calls(const dc__tcp_plan *p, dc__signature *calls);

#endif
