/* Shared by the two sides of a rendezvous: rank 0 (rendezvous_root.c) and the other ranks (rendezvous.c). */
#ifndef DC_COMM_SHM_RENDEZVOUS_H
#define DC_COMM_SHM_RENDEZVOUS_H

#include <sys/socket.h>
#include <sys/un.h>

#include "comm/shm/shm.h"

enum { DC__SHM_PROTOCOL = 4 }; /* raise it when the messages or the control block change */

/* A rank's message to rank 0, with descriptors of its heap and, if has_pidfd, of its process. */
typedef struct dc__shm_hello {
  char magic[8];
  uint32_t protocol;
  int32_t rank;
  int32_t world;
  int32_t has_pidfd;
  uint64_t reserve;
} dc__shm_hello;

/* Rank 0's answer, with descriptors of the control block and of each rank's heap and, if has_pidfd, process. */
typedef struct dc__shm_welcome {
  int32_t status;
  int32_t reserved;
  int32_t has_pidfd[DC__COMM_MAX_LOCAL];
  uint64_t reserves[DC__COMM_MAX_LOCAL];
  char text[512];
} dc__shm_welcome;

/* The abstract socket that is named after the group. */
socklen_t dc__shm_socket_address(const char *name, struct sockaddr_un *address);
bool dc__shm_same_user(int fd);
/* Maps the other ranks' heaps, whose sizes are in group->reserves. */
dc_status dc__shm_map_peers(dc__shm_group *group, const int *heaps);

dc_status dc__shm_rendezvous_root(const char *name, dc__shm_group *group, int64_t deadline);

#endif
