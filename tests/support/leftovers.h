/* Descriptors, children, abstract sockets and files in shared memory that a test of faults must not leak.
 * leftovers_note() and leftovers_compare() are the setup and the teardown of a group of tests. */
#ifndef DC_TESTS_LEFTOVERS_H
#define DC_TESTS_LEFTOVERS_H

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "address.h"

static inline int count_entries(const char *path, const char *begins) {
  int count = 0;
  DIR *folder = opendir(path);
  for (const struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
    count += strncmp(entry->d_name, begins, strlen(begins)) == 0;
  }
  if (folder != NULL) {
    closedir(folder);
  }
  return count;
}

/* Counts lines of a kernel table. */
static inline int count_lines(const char *path, const char *with) {
  char line[512];
  int count = 0;
  FILE *file = fopen(path, "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    count += strstr(line, with) != NULL;
  }
  if (file != NULL) {
    fclose(file);
  }
  return count;
}

/* Whether a socket listens at this port of the network namespace. */
static inline bool is_listening(const char *address) {
  static const char *const tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  const unsigned port = (unsigned)atoi(strrchr(address, ':') + 1);
  char local[16];
  bool found = false;
  snprintf(local, sizeof local, ":%04X ", port);
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
    char line[512];
    FILE *file = fopen(tables[i], "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
      const char *at = strstr(line, local); /* 0A: TCP_LISTEN */
      found = found || (at != NULL && (strstr(at, " 0A ") != NULL));
    }
    if (file != NULL) {
      fclose(file);
    }
  }
  return found;
}

static int leftovers_before[3];

static inline void leftovers_count(int counts[3]) {
  char own[64];
  snprintf(own, sizeof own, "test-%ld-", (long)getpid()); /* names of groups (fresh_name) */
  counts[0] = count_entries("/proc/self/fd", "");
  for (int i = 0; i < HELD_ADDRESSES; i++) {
    counts[0] -= atomic_load(&held_addresses[i]) > 0;
  }
  counts[1] = count_entries("/dev/shm", "libdc");
  counts[2] = count_lines("/proc/self/net/unix", own);
}

static inline int leftovers_note(void **state) {
  (void)state;
  leftovers_count(leftovers_before);
  return 0;
}

static inline int leftovers_compare(void **state) {
  (void)state;
  static const char *const names[] = {"descriptors", "files in /dev/shm", "abstract sockets"};
  int after[3], result = 0;
  leftovers_count(after);
  for (int i = 0; i < 3; i++) {
    if (after[i] != leftovers_before[i]) {
      fprintf(stderr, "left behind: %d %s, before the tests %d\n", after[i], names[i], leftovers_before[i]);
      result = -1;
    }
  }
  if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD) {
    fprintf(stderr, "left behind: a child process\n");
    result = -1;
  }
  return result;
}

#endif
