/* Text from elsewhere, made fit for an error that a terminal shows or a log keeps. */
#ifndef DC_COMM_ESCAPE_H
#define DC_COMM_ESCAPE_H

#include <stddef.h>

/* Copies at most `bytes` of text, as much as fits, and ends it with a zero byte. Printable ASCII and well-formed UTF-8
 * stay as they are. Control characters, bytes that are no UTF-8, and marks that change the order of what is shown
 * become \n, \t, \r or \xNN. Text that this function made stays as it is. dst may be text. */
void dc__escape(char *dst, size_t cap, const char *text, size_t bytes);

#endif
