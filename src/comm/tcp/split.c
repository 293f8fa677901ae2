/* Parts of a group over TCP are groups of their own. A part's rank 0 listens at a new port of the address where it
 * listened before, and announces the port over the old communicator. The part's secret is derived from the old group's
 * and the part's name. */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/split.h"
#include "comm/tcp/collective.h"

enum { SPLIT_SECRET = 2 * DC__MAC_BYTES + 1, SPLIT_ADDRESS = INET6_ADDRSTRLEN + 16 };

static void derive_secret(const dc__tcp_group *group, const dc__split *split, char secret[SPLIT_SECRET]) {
  unsigned char mac[DC__MAC_BYTES];
  dc__hmac_sha256(group->key, sizeof group->key, split->name, sizeof split->name, mac);
  for (size_t i = 0; i < sizeof mac; i++) {
    snprintf(secret + 2 * i, 3, "%02x", mac[i]);
  }
  explicit_bzero(mac, sizeof mac);
}

/* The leader's address, as this rank reaches it. */
static void leader_address(const dc__tcp_group *group, const dc__split *split, int32_t port, char text[SPLIT_ADDRESS]) {
  const unsigned char *bytes = group->endpoints[split->leader].address;
  char host[INET6_ADDRSTRLEN] = "127.0.0.1"; /* the leader does not use its own */
  bool four = dc__tcp_is_mapped(bytes);
  if (split->leader != group->rank) {
    (void)inet_ntop(four ? AF_INET : AF_INET6, four ? bytes + 12 : bytes, host, sizeof host);
  }
  snprintf(text, SPLIT_ADDRESS, strchr(host, ':') == NULL ? "%s:%" PRId32 : "[%s]:%" PRId32, host, port);
}

static dc_status join_part(dc_comm *comm, const dc__split *split, int listener, int32_t port, dc_comm **part) {
  const dc__tcp_group *group = ((dc__tcp *)comm)->group;
  char secret[SPLIT_SECRET], address[SPLIT_ADDRESS], name[DC__TCP_NAME];
  const dc_comm_options options = {.struct_size = sizeof options,
                                   .timeout_ns = comm->timeout_ns,
                                   .secret = group->sealed ? secret : NULL,
                                   .network = group->network[0] != '\0' ? group->network : NULL,
                                   .heartbeat_ns = group->heartbeat_ns,
                                   .first_port = group->first_port,
                                   .last_port = group->last_port,
                                   .tls = group->tls};
  derive_secret(group, split, secret);
  leader_address(group, split, port, address);
  snprintf(name, sizeof name, "%.40s/%016" PRIx64, group->name, split->name[0]);
  dc_status status = dc__comm_create_tcp_at(listener, address, name, split->rank, split->world, &options, part);
  explicit_bzero(secret, sizeof secret);
  return status;
}

dc_status dc__tcp_split(dc_comm *comm, const dc__split *split, dc_comm **part) {
  dc__tcp_group *group = ((dc__tcp *)comm)->group;
  int32_t port = 0;
  int listener = -1;
  dc__failure failure = {DC_OK, ""};
  int64_t *ports = dc__calloc((size_t)comm->world, sizeof *ports);
  dc_status status = ports != NULL ? DC_OK : DC_E_NO_MEMORY;
  if (ports == NULL) {
    comm->ops->abort(comm, "a rank has no memory for dc_comm_split");
    return status;
  }
  if (split->world > 1 && split->leader == comm->rank) {
    dc__failure_keep(&failure, dc__tcp_listen_new(group, &port, &listener));
  }
  const int64_t own = port;
  status = dc__split_exchange(comm, &own, 1, ports);
  port = (int32_t)ports[split->leader];
  dc__free(ports);
  if (status != DC_OK || failure.status != DC_OK || split->world == 0 || (split->world > 1 && port == 0)) {
    dc__tcp_close(&listener);
    DC__TRY(status);
    DC__TRY(failure.status != DC_OK ? dc__failure_raise(&failure) : DC_OK);
    return split->world == 0
               ? DC_OK
               : dc__fail(DC_E_SYSTEM, "dc_comm_split: rank %" PRId32 " cannot listen for the others", split->leader);
  }
  return join_part(comm, split, listener, port == 0 ? 1 : port, part); /* a single rank meets no other */
}
