/* Messages between processes that carry file descriptors. */
#define _GNU_SOURCE /* MSG_CMSG_CLOEXEC */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/shm/shm.h"

ssize_t dc__shm_send_fds(int fd, const void *data, size_t bytes, const int *fds, int32_t count) {
  union {
    char space[CMSG_SPACE(sizeof(int) * DC__SHM_MAX_FDS)];
    struct cmsghdr align;
  } control;
  struct iovec part = {(void *)(uintptr_t)data, bytes};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (count > 0) {
    memset(&control, 0, sizeof control);
    message.msg_control = control.space;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
    memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
  }
  return sendmsg(fd, &message, MSG_NOSIGNAL);
}

ssize_t dc__shm_receive_fds(int fd, void *data, size_t bytes, int *fds, int32_t *count) {
  union {
    char space[CMSG_SPACE(sizeof(int) * DC__SHM_MAX_FDS)];
    struct cmsghdr align;
  } control;
  struct iovec part = {data, bytes};
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
  bool lacks = false;
  *count = 0;
  ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) {
    return got;
  }
  for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header != NULL; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      *count = (int32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      memcpy(fds, CMSG_DATA(header), (size_t)*count * sizeof(int));
      for (int32_t i = 0; i < *count; i++) {
        fds[i] = dc__above_streams(fds[i]);
        lacks = lacks || fds[i] < 0;
      }
    }
  }
  if (lacks || (message.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    return -1;
  }
  return got;
}

void dc__shm_close_fds(int *fds, int32_t count) {
  for (int32_t i = 0; i < count; i++) {
    if (fds[i] >= 0) {
      close(fds[i]);
    }
  }
}
