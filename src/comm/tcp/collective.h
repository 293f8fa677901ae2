/* A collective over TCP in progress. collective.c exchanges the calls and the data of all ranks with all; scatter.c
 * says what goes of a large broadcast. relay.c does small collectives in few rounds. transfer.c moves bytes, and waits,
 * for all of them. */
#ifndef DC_COMM_TCP_COLLECTIVE_H
#define DC_COMM_TCP_COLLECTIVE_H

#include "comm/tcp/tcp.h"

/* No few changed bits turn it into 0. */
#define DC__TCP_CHECKSUM UINT64_C(0x6373756d33326331)
#define DC__TCP_RELAYED UINT64_C(0x72656c6179656431)

enum { DC__TCP_MAX_RELAYED = 4 << 20 /* bytes of data behind a relayed message: of 4 KiB a rank */ };

/* A round's message of a small collective, for all ranks heard of. It begins as a header does. */
typedef struct dc__tcp_relayed {
  uint64_t seq;
  uint64_t bytes;
  uint64_t has_checksum;
  uint64_t kind;       /* DC__TCP_RELAYED; 0 in a header */
  uint64_t digest;     /* of the sender's call */
  uint64_t word;       /* of agree() */
  uint32_t alike;      /* 1: all of them have this digest */
  uint32_t same_words; /* 1: and this word */
} dc__tcp_relayed;

/* Traffic with one rank in one collective, each way a header and then data. */
typedef struct dc__tcp_transfer {
  int fd;
  int32_t out_count, out_pos;
  int32_t in_count, in_pos;
  size_t bytes_received;  /* of recv_header; 0 between collectives */
  uint64_t bytes_skipped; /* of what is behind a relayed message that does not matter */
  struct iovec out[DC__COMM_GROUP + 2];
  struct iovec in[DC__COMM_GROUP + 1];
  uint32_t sent_crc, received_crc; /* of the header and the data so far, if the sender has checksums */
  uint32_t peer_crc;               /* the peer's sent_crc, which came behind the data */
  struct dc__tcp_header {
    uint64_t seq;          /* from 1, or DC__TCP_SEQ_LEAVE */
    uint64_t bytes;        /* of data behind it, without the checksum */
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
  bool scatters;             /* the data are a broadcast's of which ranks send on parts */
  bool same_words;           /* of agree(): all ranks passed this rank's */
  bool queried;              /* the deadline has passed, and the peers were queried */
  bool has_checksums;        /* of what this rank sends */
  dc__signature call;        /* this rank's */
  int64_t deadline;          /* restarts on progress; 0: set at the next wait */
  int64_t deadlock_check_ns; /* next deadlock check; likewise */
  char op_text[DC__COLL_TEXT];
} dc__tcp_plan;

/* ---- transfer.c ---- */

void dc__tcp_add_iov(struct iovec *list, int32_t *count, const void *at, int64_t bytes);
uint64_t dc__tcp_iov_bytes(const struct iovec *list, int32_t from, int32_t to);
dc_status dc__tcp_reserve_scratch(dc__tcp *self, int64_t bytes);
/* Reads what is there until `bytes` of a header have come. False if the connection ended, with errno, or 0 if the peer
 * closed it. */
bool dc__tcp_read_header(dc__tcp_transfer *transfer, size_t bytes, bool *progress);
/* Whether the peer announced that it destroys the communicator; part of a header has come. */
bool dc__tcp_has_left(const dc__tcp_transfer *transfer);
/* The lost connection to rank r as an error; error is errno, or 0 if the peer closed it. */
dc_status dc__tcp_fail_transfer(const dc__tcp_plan *p, int32_t r, int error);
/* Rank r sent something else than a message of this collective. */
dc_status dc__tcp_fail_garbled(const dc__tcp_plan *p, int32_t r);
dc_status dc__tcp_fail_size(const dc__tcp_plan *p, int32_t r, uint64_t bytes, uint64_t expected);
/* Whether there is something of transfer->out that may be sent now. */
bool dc__tcp_can_send(const dc__tcp_plan *p, int32_t r);
/* Sends what fits of it, and reads what is there of transfer->in. */
dc_status dc__tcp_send_some(const dc__tcp_plan *p, int32_t r, bool *progress);
dc_status dc__tcp_receive_some(const dc__tcp_plan *p, int32_t r, bool *progress);
/* DC_E_CORRUPT unless what came from rank r has its checksum, or rank r sends none. */
dc_status dc__tcp_compare_checksum(const dc__tcp_plan *p, int32_t r);
/* After progress: deadlines begin anew. */
void dc__tcp_note_progress(dc__tcp_plan *p);
/* Waits until one of self->polls[0, count) is ready or the group fails. self->polls needs two more. A failure counts
 * only once the caller has read what has arrived, since peers may have failed in a later collective. missing: the ranks
 * that are waited for; all_headers: their calls have come. */
dc_status dc__tcp_wait_ready(dc__tcp_plan *p, int32_t count, const dc__rank_set *missing, bool all_headers);

/* ---- own_part.c ---- */

/* Of all items of a reduction that this rank receives from one rank. */
int64_t dc__tcp_part_bytes(const dc__coll *coll, int32_t rank);
void dc__tcp_copy_own(const dc__tcp *self, const dc__coll *coll);
/* Adds what lies in scratch memory, in rank order. */
void dc__tcp_reduce_own(const dc__tcp *self, const dc__coll *coll);

/* ---- scatter.c ---- */

/* Whether the root of a broadcast sends each rank a part to send on: the same on all ranks whose calls match. */
bool dc__tcp_scatters(const dc__tcp_plan *p);
/* Adds what goes to rank r and what comes from it. */
void dc__tcp_fill_scatter(const dc__tcp_plan *p, int32_t r, dc__tcp_transfer *transfer);
/* Bytes of the part that this rank sends on and may not send yet, since they or the checksum have not come. */
uint64_t dc__tcp_missing_part(const dc__tcp_plan *p);

/* ---- relay.c ---- */

/* Whether ranks of this communicator send small collectives in rounds. */
bool dc__tcp_relays(const dc__tcp *self);
/* Whether a collective is so small that it goes in rounds: the same on all ranks whose calls match. */
bool dc__tcp_is_small(const dc__tcp_plan *p);
/* All of a small collective, or without its data the handshake of any. *alike false: calls differ somewhere, as all
 * ranks that relay have learned. Nothing is written then. */
dc_status dc__tcp_run_small(dc__tcp_plan *p, bool with_data, bool *alike);
/* After *alike was false, where all ranks relay: the calls of all. */
dc_status dc__tcp_gather_calls(const dc__tcp_plan *p, dc__signature *calls);

#endif
