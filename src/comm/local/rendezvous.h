/* What the two sides of a rendezvous share: rank 0's (rendezvous_host.c) and its guests' (rendezvous.c). */
#ifndef DC_COMM_LOCAL_RENDEZVOUS_H
#define DC_COMM_LOCAL_RENDEZVOUS_H

#include <sys/socket.h>
#include <sys/un.h>

#include "comm/local/local.h"

enum { DC__LOCAL_PROTOCOL = 4 }; /* raise it when the messages or the control block change */

/* A guest's word, with descriptors of its heap and, if has_pidfd, of its process. */
typedef struct dc__local_hello {
  char magic[8];
  uint32_t protocol;
  int32_t rank;
  int32_t world;
  int32_t has_pidfd;
  uint64_t reserve;
} dc__local_hello;

/* Rank 0's word, with descriptors of the control block and then each rank's heap and, if has_pidfd, process. */
typedef struct dc__local_welcome {
  int32_t status;
  int32_t reserved;
  int32_t has_pidfd[DC__COMM_MAX_LOCAL];
  uint64_t reserves[DC__COMM_MAX_LOCAL];
  char text[512];
} dc__local_welcome;

/* The abstract socket that is named after the group. */
socklen_t dc__local_address_of(const char *name, struct sockaddr_un *address);
bool dc__local_same_user(int fd);
/* Maps the other ranks' heaps; reserves are there. */
dc_status dc__local_map_peers(dc__local_group *group, const int *heaps);

dc_status dc__local_rendezvous_as_host(const char *name, dc__local_group *group, int64_t deadline);

#endif
