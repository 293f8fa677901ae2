/* The system's memory: /proc/meminfo, and the control group's limit where it is lower. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cpu/cpu.h"

enum { TEXT = 4096 };

/* The beginning of a file as text; false if there is none. */
static bool memory_read_text(const char *path, char text[TEXT]) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return false;
  }
  ssize_t length = read(fd, text, TEXT - 1);
  close(fd);
  text[length > 0 ? length : 0] = '\0';
  return length > 0;
}

/* The number after a key, times a unit; -1 if the key is missing. */
static int64_t number_after(const char *text, const char *key, int64_t unit) {
  const char *at = strstr(text, key);
  return at == NULL ? -1 : strtoll(at + strlen(key), NULL, 10) * unit;
}

/* Version 2 of control groups; "max" has no digits and means no limit. */
static void apply_group(int64_t *total, int64_t *free_bytes) {
  char text[TEXT];
  if (!memory_read_text("/sys/fs/cgroup/memory.max", text) || text[0] < '0' || text[0] > '9') {
    return;
  }
  int64_t limit = number_after(text, "", 1);
  int64_t used = memory_read_text("/sys/fs/cgroup/memory.current", text) ? number_after(text, "", 1) : 0;
  if (limit < *total) {
    int64_t left = limit > used ? limit - used : 0;
    *total = limit;
    *free_bytes = left < *free_bytes ? left : *free_bytes;
  }
}

dc_status dc__cpu_memory_info(dc_device *device, int64_t *total, int64_t *free_bytes) {
  (void)device;
  char text[TEXT];
  if (!memory_read_text("/proc/meminfo", text)) {
    return dc__fail(DC_E_SYSTEM, "/proc/meminfo: %s", strerror(errno));
  }
  *total = number_after(text, "MemTotal:", 1024);
  *free_bytes = number_after(text, "MemAvailable:", 1024);
  if (*total < 0 || *free_bytes < 0) {
    return dc__fail(DC_E_SYSTEM, "/proc/meminfo has no MemTotal or no MemAvailable");
  }
  apply_group(total, free_bytes);
  return DC_OK;
}
