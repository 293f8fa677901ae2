/* Output that could not be written is an error, and an incomplete file is removed. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tool.h"

void reserve_standard_fds(void) {
  for (int fd = 0; fd <= STDERR_FILENO; fd++) {
    if (fcntl(fd, F_GETFD) == -1) {
      /* The lowest free number, which is fd: reading and writing it are errors, as of a closed one. */
      (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
  }
}

bool flush_file(FILE *file) {
  bool failed_before = ferror(file) != 0; /* whatever the reason was then */
  errno = 0;
  if (fflush(file) == 0 && !failed_before) {
    return true;
  }
  errno = errno == 0 ? EIO : errno;
  return false;
}

int finish_file(const args *a, FILE *file, const char *path) {
  struct stat about;
  bool well = flush_file(file);
  int error = errno;
  bool regular = fstat(fileno(file), &about) == 0 && S_ISREG(about.st_mode);
  if (fclose(file) != 0 && well) {
    well = false;
    error = errno;
  }
  if (well) {
    return EXIT_OK;
  }
  if (regular) {
    (void)unlink(path);
  }
  return report_error(a, EXIT_UNAVAILABLE, "--output = %s can't be written: %s", path, strerror(error));
}
