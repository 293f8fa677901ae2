/* A folder's entries: threads and descriptors of a process, for tests that nothing is left behind. */
#ifndef TESTS_ENTRIES_H
#define TESTS_ENTRIES_H

#include <dirent.h>
#include <stddef.h>
#include <string.h>

/* Those whose names have this part: other processes of the machine have theirs in folders that all share. */
static inline int entries_with(const char *path, const char *part) {
  int count = 0;
  DIR *directory = opendir(path);
  const struct dirent *entry;
  while (directory != NULL && (entry = readdir(directory)) != NULL) {
    count += strstr(entry->d_name, part) != NULL;
  }
  if (directory != NULL) {
    closedir(directory);
  }
  return count;
}

static inline int entries(const char *path) {
  return entries_with(path, "");
}

#endif
