/* A large broadcast between three ranks or more. The root sends each of the others a part, which they pass on to the
 * rest while it arrives. So each rank's link carries the data once in each direction. If the root sent everything to
 * each rank, its link would carry the data once per rank. The last byte of a part is passed on only if its checksum is
 * right. */
#include "comm/tcp/collective.h"

enum { PART = 8 << 10, /* bytes below which a second hop costs more than it saves */ ALIGN = 64 };

bool dc__tcp_scatters(const dc__tcp_plan *p) {
  const int32_t parts = p->self->head.world - 1;
  return p->has_data && p->coll->kind == DC__COLL_BROADCAST && parts > 1 && p->coll->items[0].total / parts >= PART;
}

/* Where the part begins that rank r passes on; the part of the rank before it ends there. The root has none. */
static int64_t part_begin(const dc__tcp_plan *p, int32_t r) {
  const int64_t parts = p->self->head.world - 1, total = p->coll->items[0].total;
  const int64_t place = r - (r > p->coll->root ? 1 : 0);
  return place == parts ? total : total / ALIGN * place / parts * ALIGN;
}

static void add_part(const dc__tcp_plan *p, int32_t r, struct iovec *list, int32_t *count) {
  const int64_t begin = part_begin(p, r);
  dc__tcp_add_iov(list, count, (char *)p->coll->items[0].recv + begin, part_begin(p, r + 1) - begin);
}

void dc__tcp_fill_scatter(const dc__tcp_plan *p, int32_t r, dc__tcp_transfer *transfer) {
  const int32_t me = p->self->head.rank, root = p->coll->root;
  if (r != root) {
    add_part(p, me == root ? r : me, transfer->out, &transfer->out_count);
  }
  if (me != root) {
    add_part(p, r == root ? me : r, transfer->in, &transfer->in_count);
  }
}

uint64_t dc__tcp_missing_part(const dc__tcp_plan *p) {
  const dc__tcp_transfer *from = &p->self->transfers[p->coll->root];
  if (!p->scatters || p->self->head.rank == p->coll->root) {
    return 0;
  }
  const bool has_checksum = p->signatures_match && from->recv_header.has_checksum != 0;
  const uint64_t bytes = dc__tcp_iov_bytes(from->in, from->in_pos, from->in_count - (has_checksum ? 1 : 0));
  return bytes == 0 && from->in_pos < from->in_count ? 1 : bytes; /* the last byte waits for the checksum */
}
