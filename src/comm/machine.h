/* Which processes share a machine. */
#ifndef DC_COMM_MACHINE_H
#define DC_COMM_MACHINE_H

enum { DC__MACHINE_NAME = 64 };

/* A text made of the boot ID and the network namespace, padded with zeros. It is equal for processes that reach each
 * other by loopback and abstract sockets. */
void dc__machine_name(char machine[DC__MACHINE_NAME]);

#endif
