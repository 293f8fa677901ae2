/* Names the machine that a process runs on. */
#include "comm/machine.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

void dc__machine_name(char machine[DC__MACHINE_NAME]) {
  char boot[40] = "";
  struct stat network = {.st_ino = 0};
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
  if (file != NULL) {
    (void)fscanf(file, "%39s", boot);
    fclose(file);
  }
  (void)stat("/proc/self/ns/net", &network);
  memset(machine, 0, DC__MACHINE_NAME);
  snprintf(machine, DC__MACHINE_NAME, "%.36s %llu", boot, (unsigned long long)network.st_ino);
}
