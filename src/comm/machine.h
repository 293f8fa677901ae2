/* Which processes share a machine. */
#ifndef DC_COMM_MACHINE_H
#define DC_COMM_MACHINE_H

enum { DC__MACHINE_NAME = 64 };

/* A text of the machine's boot and of the network namespace: equal where loopback and abstract sockets reach. Padded
 * with zeros. */
void dc__machine_name(char machine[DC__MACHINE_NAME]);

#endif
