/* Escapes text of foreign origin for error messages, which terminals show and logs keep. */
#ifndef DC_COMM_ESCAPE_H
#define DC_COMM_ESCAPE_H

#include <stddef.h>

/* Copies at most `bytes` of text, as much as fits, with a terminating zero. Printable ASCII and well-formed UTF-8 stay.
 * Control characters, invalid UTF-8, line separators and bidirectional marks become \n, \t, \r or \xNN. Idempotent; dst
 * may alias text. */
void dc__escape(char *dst, size_t cap, const char *text, size_t bytes);

#endif
