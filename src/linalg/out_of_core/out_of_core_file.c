/* Matrices in files, whose rows are read by pread() and written by pwrite(). */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "linalg/out_of_core/out_of_core.h"

dc_status dc__file_status(dc__file_failure *failure, const char *fn) {
  return !dc__file_failed(failure)
             ? DC_OK
             : dc__fail(DC_E_SYSTEM, "%s: %s's file, byte %" PRId64 ": %s", fn, failure->arg, failure->at,
                        failure->error != 0 ? strerror(failure->error) : "the file ends");
}

/* Reads or writes one contiguous run of bytes. On failure returns false with errno, which is 0 at the end of the file,
 * and the position in *at. */
static bool io_contiguous(const dc__matrix_source *s, char *memory, int64_t *at, int64_t bytes, bool write) {
  while (bytes > 0) {
    errno = 0;
    ssize_t done = write ? pwrite(s->fd, memory, (size_t)bytes, *at) : pread(s->fd, memory, (size_t)bytes, *at);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return false;
    }
    memory += done;
    *at += done;
    bytes -= done;
  }
  return true;
}

bool dc__file_io_contiguous(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write,
                            char *memory, int64_t first, int64_t count) {
  const int64_t size = (int64_t)dc_dtype_size(s->mat.dtype);
  int64_t at = s->offset + first * size;
  if (io_contiguous(s, memory, &at, count * size, write)) {
    return true;
  }
  const int error = errno;
  if (!atomic_exchange(&failure->failed, true)) {
    failure->arg = arg;
    failure->at = at;
    failure->error = error;
  }
  return false;
}

bool dc__file_io_block(dc__file_failure *failure, const char *arg, const dc__matrix_source *s, bool write, char *memory,
                       const dc__matrix_part *part) {
  const int64_t step = part->cols == s->mat.cols ? part->rows : 1;
  const int64_t count = step * part->cols;
  for (int64_t i = 0; i < part->rows; i += step, memory += count * (int64_t)dc_dtype_size(s->mat.dtype)) {
    const int64_t first = (part->row + i) * s->mat.cols + part->col;
    if (!dc__file_io_contiguous(failure, arg, s, write, memory, first, count)) {
      return false;
    }
  }
  return true;
}

bool dc__file_can_read_back(const dc__matrix_source *s) {
  struct stat status;
  return dc__in_file(s) && fstat(s->fd, &status) == 0 && S_ISREG(status.st_mode) &&
         (fcntl(s->fd, F_GETFL) & O_ACCMODE) == O_RDWR;
}

dc__mat dc__matrix_source_block(const dc__matrix_source *s, void *read, const dc__matrix_part *part) {
  dc__mat m = s->mat;
  m.rows = part->rows;
  m.cols = part->cols;
  if (dc__in_file(s)) {
    m.data = read;
    m.row_stride = part->cols;
    m.col_stride = 1;
  } else {
    m.data = dc__element_ptr(m.data, m.dtype, part->row * m.row_stride + part->col * m.col_stride);
  }
  return m;
}

void dc__file_prefetch(const dc__matrix_source *s, int64_t row, int64_t rows) {
  enum { MAX_PREFETCH = 8 << 20 };
  const int64_t line = s->mat.cols * (int64_t)dc_dtype_size(s->mat.dtype);
  rows = dc__min_int64(rows, s->mat.rows - row);
  if (dc__in_file(s) && rows > 0 && line <= MAX_PREFETCH / rows) {
    (void)posix_fadvise(s->fd, s->offset + row * line, rows * line, POSIX_FADV_WILLNEED);
  }
}

dc_status dc__file_check(const char *fn, const char *arg, const dc__matrix_source *s, bool input) {
  struct stat status;
  int64_t end;
  if (!dc__in_file(s)) {
    return DC_OK;
  }
  if (s->fd < 0 || fstat(s->fd, &status) != 0) {
    return dc__fail(DC_E_INVALID, "%s: %s.fd = %" PRId32 " is no open file", fn, arg, s->fd);
  }
  if (!input && (fcntl(s->fd, F_GETFL) & O_APPEND) != 0) { /* Linux's pwrite() then ignores its offset */
    return dc__fail(DC_E_INVALID, "%s: %s.fd = %" PRId32 " is open for appending, must be open for writing", fn, arg,
                    s->fd);
  }
  if (s->offset < 0 || __builtin_mul_overflow(s->mat.rows * s->mat.cols, (int64_t)dc_dtype_size(s->mat.dtype), &end) ||
      __builtin_add_overflow(end, s->offset, &end)) {
    return dc__fail(DC_E_INVALID, "%s: %s.offset = %" PRId64 ", must be >= 0 and the matrix behind it below 2^63 bytes",
                    fn, arg, s->offset);
  }
  if (input && S_ISREG(status.st_mode) && status.st_size < end) {
    return dc__fail(DC_E_INVALID, "%s: %s's file has %" PRId64 " byte%s, must have %" PRId64, fn, arg,
                    (int64_t)status.st_size, DC__PLURAL_S(status.st_size), end);
  }
  return DC_OK;
}

dc_status dc__file_check_apart(const char *fn, const dc__matrix_source *out, const char *arg,
                               const dc__matrix_source *in) {
  struct stat a, b;
  if (!dc__in_file(out) || !dc__in_file(in) || fstat(out->fd, &a) != 0 || fstat(in->fd, &b) != 0 ||
      a.st_dev != b.st_dev || a.st_ino != b.st_ino || !S_ISREG(a.st_mode)) {
    return DC_OK;
  }
  const int64_t out_bytes = out->mat.rows * out->mat.cols * (int64_t)dc_dtype_size(out->mat.dtype);
  const int64_t in_bytes = in->mat.rows * in->mat.cols * (int64_t)dc_dtype_size(in->mat.dtype);
  const bool apart = out->offset >= in->offset + in_bytes || in->offset >= out->offset + out_bytes;
  return apart || out_bytes == 0 || in_bytes == 0
             ? DC_OK
             : dc__fail(DC_E_INVALID, "%s: out.offset = %" PRId64 ": %s lies in the same bytes of the same file", fn,
                        out->offset, arg);
}
