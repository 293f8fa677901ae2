/* Counts the rows of a table that a search took; printed at its end, read by run.py. */
c_decl {
\#include <stdio.h>
  static unsigned long rows_seen[256];
  static void print_rows(void) {
    for (int row = 0; row < 256; row++) {
      if (rows_seen[row] > 0) {
        printf("row %d: %lu\n", row, rows_seen[row]);
      }
    }
  }
};
#define SEEN(row) c_code { rows_seen[row]++; }
#define START_COUNTING c_code { atexit(print_rows); }
