/* Where a rank listens: at an address of the caller's interface, or at loopback if the group has no secret, else at all
 * addresses of the machine; and on a port of the caller's range. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/tcp/tcp.h"

/* Converts an address to IPv6, or IPv4-mapped. False for another family. */
static bool address_bytes(const struct sockaddr *from, unsigned char bytes[16]) {
  struct sockaddr_in6 six;
  struct sockaddr_in four;
  if (from->sa_family == AF_INET6) {
    memcpy(&six, from, sizeof six);
    memcpy(bytes, &six.sin6_addr, 16);
    return true;
  }
  memset(bytes, 0, 10);
  memset(bytes + 10, 0xff, 2);
  memcpy(&four, from, sizeof four);
  memcpy(bytes + 12, &four.sin_addr, 4);
  return from->sa_family == AF_INET;
}

bool dc__tcp_is_mapped(const unsigned char bytes[16]) {
  static const unsigned char prefix[12] = {[10] = 0xff, [11] = 0xff};
  return memcmp(bytes, prefix, sizeof prefix) == 0;
}

bool dc__tcp_is_loopback(const unsigned char bytes[16]) {
  static const unsigned char six[16] = {[15] = 1};
  return memcmp(bytes, six, sizeof six) == 0 || (dc__tcp_is_mapped(bytes) && bytes[12] == 127);
}

/* Reads "10.1.0.0/16" or "fd00::/8". False if the text is something else, such as a name. */
static bool parse_cidr(const char *text, unsigned char bytes[16], int *bits) {
  char address[INET6_ADDRSTRLEN];
  const char *slash = strchr(text, '/');
  char *rest = NULL;
  size_t length = slash == NULL ? 0 : (size_t)(slash - text);
  if (slash == NULL || length >= sizeof address || slash[1] < '0' || slash[1] > '9') {
    return false;
  }
  memcpy(address, text, length);
  address[length] = '\0';
  long count = strtol(slash + 1, &rest, 10);
  memset(bytes, 0, 10);
  memset(bytes + 10, 0xff, 2);
  bool four = inet_pton(AF_INET, address, bytes + 12) == 1;
  *bits = (int)(four ? count + 96 : count);
  return *rest == '\0' && count <= (four ? 32 : 128) && (four || inet_pton(AF_INET6, address, bytes) == 1);
}

static bool has_prefix(const unsigned char address[16], const unsigned char prefix[16], int bits) {
  int whole = bits / 8, part = bits % 8;
  return memcmp(address, prefix, (size_t)whole) == 0 &&
         (part == 0 || ((address[whole] ^ prefix[whole]) & (0xff00 >> part) & 0xff) == 0);
}

/* The first address of an interface, by name or CIDR, that is not link-local. It has the family of `near`, and is
 * `near` itself if that is there. If `near` is NULL, any family will do. */
static dc_status find_address(const char *network, const unsigned char *near, unsigned char found[16], bool *any) {
  unsigned char prefix[16], address[16];
  int bits = 0;
  bool is_cidr = parse_cidr(network, prefix, &bits);
  struct ifaddrs *list = NULL;
  *any = false;
  if (getifaddrs(&list) != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no list of interfaces: %s", strerror(errno));
  }
  for (const struct ifaddrs *i = list; i != NULL; i = i->ifa_next) {
    bool fits = i->ifa_addr != NULL && address_bytes(i->ifa_addr, address) &&
                (near == NULL || dc__tcp_is_mapped(address) == dc__tcp_is_mapped(near)) &&
                (is_cidr ? has_prefix(address, prefix, bits) : strcmp(i->ifa_name, network) == 0);
    bool link_local = fits && address[0] == 0xfe && (address[1] & 0xc0) == 0x80;
    if (fits && !link_local && (!*any || (near != NULL && memcmp(address, near, 16) == 0))) {
      memcpy(found, address, 16);
      *any = true;
    }
  }
  freeifaddrs(list);
  return DC_OK;
}

dc_status dc__tcp_find_address(const char *fn, const char *network, unsigned char found[16]) {
  bool any;
  DC__TRY(find_address(network, NULL, found, &any));
  return any ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: options.network = \"%.60s\": this machine has no address there", fn,
                        network);
}

/* An address on the caller's interface: `near` itself, else the first one of its family. */
static dc_status find_on_interface(const dc__tcp_group *group, const unsigned char near[16], unsigned char found[16]) {
  bool any;
  DC__TRY(find_address(group->network, near, found, &any));
  return any ? DC_OK
             : dc__fail(DC_E_INVALID,
                        "dc_comm_create_tcp: options.network = \"%.60s\": rank %" PRId32
                        "'s machine has no IPv%d "
                        "address there",
                        group->network, group->rank, dc__tcp_is_mapped(near) ? 4 : 6);
}

static dc_status fail_no_secret(const dc__tcp_group *group) {
  return dc__fail(DC_E_INVALID,
                  "dc_comm_create_tcp: group \"%s\": rank %" PRId32
                  " has no options.secret, and the address is not "
                  "this machine's loopback: without a secret any machine could join",
                  group->name, group->rank);
}

/* Tries each port of the range, if there is one. */
static dc_status listen_in_range(const dc__tcp_group *group, const unsigned char *at, int32_t *port, int *fd) {
  if (*port != 0 || group->first_port == 0) {
    return dc__tcp_listen(at, port, fd);
  }
  dc_status status = DC_E_EXISTS;
  for (int32_t p = group->first_port; status == DC_E_EXISTS && p <= group->last_port; p++) {
    *port = p;
    status = dc__tcp_listen(at, port, fd);
  }
  return status != DC_E_EXISTS
             ? status
             : dc__fail(DC_E_EXISTS, "dc_comm_create_tcp: all ports of %" PRId32 " to %" PRId32 " are in use",
                        group->first_port, group->last_port);
}

dc_status dc__tcp_listen_near(dc__tcp_group *group, const struct sockaddr *near, int32_t port) {
  unsigned char bytes[16], at[16];
  const unsigned char *bound = NULL;
  dc__tcp_endpoint *own = &group->endpoints[group->rank];
  if (!address_bytes(near, bytes)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: an address of family %d", near->sa_family);
  }
  if (!group->sealed && !dc__tcp_is_loopback(bytes)) {
    return fail_no_secret(group);
  }
  if (group->network[0] != '\0') {
    DC__TRY(find_on_interface(group, bytes, at));
    bound = at;
    memcpy(own->address, at, sizeof own->address);
  } else if (!group->sealed) {
    bound = bytes;
  }
  DC__TRY(listen_in_range(group, bound, &port, &group->listener));
  own->port = port;
  if (bound != NULL) {
    memcpy(group->listens_at, bound, sizeof group->listens_at);
  }
  return DC_OK;
}

void dc__tcp_stop_listening(dc__tcp_group *group) {
  dc__tcp_close(&group->listener);
  dc__tcp_pending_close(&group->pending); /* no rank's is among them */
}

dc_status dc__tcp_listen_new(const dc__tcp_group *group, int32_t *port, int *fd) {
  static const unsigned char any[16];
  *port = 0;
  return listen_in_range(group, memcmp(group->listens_at, any, sizeof any) == 0 ? NULL : group->listens_at, port, fd);
}

dc_status dc__tcp_listen_again(dc__tcp_group *group) {
  dc__tcp_close(&group->listener); /* of a mesh that failed */
  return dc__tcp_listen_new(group, &group->endpoints[group->rank].port, &group->listener);
}

/* Reads where the caller's listener is, since later listeners use the same address. */
static dc_status read_listener(dc__tcp_group *group) {
  static const unsigned char any_ipv4[16] = {[10] = 0xff, [11] = 0xff};
  struct sockaddr_storage at = {0};
  socklen_t length = sizeof at;
  if (getsockname(group->listener, (struct sockaddr *)&at, &length) != 0 ||
      !address_bytes((const struct sockaddr *)&at, group->listens_at)) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no address of a listener: %s", strerror(errno));
  }
  if (memcmp(group->listens_at, any_ipv4, sizeof any_ipv4) == 0) {
    memset(group->listens_at, 0, sizeof group->listens_at);
  }
  return DC_OK;
}

/* HOST may have several addresses; rank 0 takes the first one where it can listen. */
dc_status dc__tcp_listen_root(dc__tcp_group *group, const dc__tcp_address *address) {
  struct addrinfo *found = NULL;
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  struct sockaddr_in six_or_four = {.sin_family = AF_INET};
  if (group->listener >= 0) { /* the caller listens already */
    group->endpoints[0].port = address->port;
    return read_listener(group);
  }
  int error = getaddrinfo(address->host, NULL, &hints, &found);
  if (error != 0 && !group->sealed) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: group \"%s\": host \"%s\": %s", group->name, address->host,
                    gai_strerror(error));
  }
  if (error != 0) { /* a name that only the other ranks know */
    return dc__tcp_listen_near(group, (const struct sockaddr *)&six_or_four, address->port);
  }
  dc_status status = DC_E_SYSTEM;
  for (const struct addrinfo *a = found; a != NULL && status != DC_OK && status != DC_E_EXISTS; a = a->ai_next) {
    status = dc__tcp_listen_near(group, a->ai_addr, address->port);
  }
  freeaddrinfo(found);
  return status;
}

dc_status dc__tcp_listen_peer(dc__tcp_group *group, int fd) {
  struct sockaddr_storage own = {0};
  socklen_t length = sizeof own;
  if (getsockname(fd, (struct sockaddr *)&own, &length) != 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no address of a connection: %s", strerror(errno));
  }
  return dc__tcp_listen_near(group, (const struct sockaddr *)&own, 0);
}
