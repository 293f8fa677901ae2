/* File descriptors that stay off the numbers of the standard streams. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/base.h"

int dc__above_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) {
    return fd;
  }
  const int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  close(fd);
  errno = error;
  return moved;
}
