/* The entries of a folder, such as threads and descriptors of a process, for tests of leaks. */
#ifndef TESTS_ENTRIES_H
#define TESTS_ENTRIES_H

#include <dirent.h>
#include <stddef.h>
#include <string.h>

/* Counts only names with this part, since all processes of the machine share some folders. */
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
