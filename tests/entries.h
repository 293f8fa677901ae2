/* What a folder holds: threads and descriptors of a process, for tests that nothing is left behind. */
#ifndef TESTS_ENTRIES_H
#define TESTS_ENTRIES_H

#include <dirent.h>
#include <stddef.h>

static inline int entries(const char *path) {
  int count = 0;
  DIR *directory = opendir(path);
  while (directory != NULL && readdir(directory) != NULL) {
    count++;
  }
  if (directory != NULL) {
    closedir(directory);
  }
  return count;
}

#endif
