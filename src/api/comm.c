/* Chapter 5: creating, copying and destroying communicators. Their collectives are in collectives.c. */
#include "comm/comm.h"

#include <inttypes.h>
#include <string.h>

/* Sizes of the structs in the version that introduced them; frozen from then on. */
enum { DC__COMM_OPTIONS_SIZE_0_1 = 24, DC__COMM_CALLBACKS_SIZE_0_1 = 72, DC__LAUNCH_SIZE_0_1 = 56 };

_Static_assert(sizeof(void *) != 8 || sizeof(dc_comm_options) >= DC__COMM_OPTIONS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_comm_callbacks) >= DC__COMM_CALLBACKS_SIZE_0_1, "0.1");
_Static_assert(sizeof(void *) != 8 || sizeof(dc_launch) >= DC__LAUNCH_SIZE_0_1, "0.1");

static const int64_t default_timeout_ns = INT64_C(300000000000);

void dc_comm_callbacks_init(dc_comm_callbacks *callbacks, size_t struct_size) {
  dc__init_sized(callbacks, struct_size, sizeof *callbacks);
}

void dc_comm_options_init(dc_comm_options *options, size_t struct_size) {
  dc__init_sized(options, struct_size, sizeof *options);
}

static dc_status read_options(const char *fn, int32_t world, int32_t most, const dc_comm_options *options,
                              dc_comm_options *out) {
  if (world < 1 || world > most) {
    return dc__fail(DC_E_INVALID, "%s: world_size = %" PRId32 ", must be 1 to %" PRId32, fn, world, most);
  }
  *out = (dc_comm_options)DC_COMM_OPTIONS_INIT;
  DC__TRY(dc__read_options(fn, "options", out, sizeof *out, options, DC__COMM_OPTIONS_SIZE_0_1));
  if (out->timeout_ns < 0) {
    return dc__fail(DC_E_INVALID, "%s: options.timeout_ns = %" PRId64 ", must be >= 0 (0 = 300 s)", fn,
                    out->timeout_ns);
  }
  if (out->heap_bytes < 0 || out->heap_bytes > (int64_t)(SIZE_MAX / 4)) {
    return dc__fail(DC_E_INVALID, "%s: options.heap_bytes = %" PRId64 ", must be 0 to %zu", fn, out->heap_bytes,
                    SIZE_MAX / 4);
  }
  if (out->reserved0 != 0) {
    return dc__fail(DC_E_INVALID, "%s: options.reserved0 = %" PRId32 ", must be 0", fn, out->reserved0);
  }
  if (out->timeout_ns == 0) {
    out->timeout_ns = default_timeout_ns;
  } else if (out->timeout_ns > INT64_MAX / 4) {
    out->timeout_ns = INT64_MAX / 4; /* 73 years; deadlines must not overflow */
  }
  if (out->heartbeat_ns > INT64_MAX / 16) {
    out->heartbeat_ns = INT64_MAX / 16; /* four heartbeats must not overflow either */
  }
  return DC_OK;
}

static dc_status check_name(const char *fn, const char *name) {
  size_t length = name == NULL ? 0 : strnlen(name, 81);
  if (length < 1 || length > 80) {
    return dc__fail(DC_E_INVALID, "%s: name is %s, must have 1 to 80 bytes", fn,
                    name == NULL  ? "NULL"
                    : length == 0 ? "empty"
                                  : "longer");
  }
  return DC_OK;
}

static dc_status check_tcp_options(const char *fn, const dc_comm_options *options) {
  enum { MIN_SECRET = 16, MAX_SECRET = 1024, MAX_NETWORK = 63, MAX_NODE = 255 };
  size_t length = options->secret == NULL ? MIN_SECRET : strnlen(options->secret, MAX_SECRET + 1);
  if (length < MIN_SECRET || length > MAX_SECRET) { /* a short secret can be guessed; the error text must not show it */
    return dc__fail(DC_E_INVALID, "%s: options.secret has %s bytes, must have %d to %d", fn,
                    length < MIN_SECRET ? "too few" : "too many", MIN_SECRET, MAX_SECRET);
  }
  if (options->network != NULL && strnlen(options->network, MAX_NETWORK + 1) > MAX_NETWORK) {
    return dc__fail(DC_E_INVALID, "%s: options.network has more than %d bytes", fn, MAX_NETWORK);
  }
  if (options->node != NULL && strnlen(options->node, MAX_NODE + 1) > MAX_NODE) {
    return dc__fail(DC_E_INVALID, "%s: options.node has more than %d bytes", fn, MAX_NODE);
  }
  if (options->first_port < 0 || options->last_port > 65535 || options->first_port > options->last_port ||
      (options->first_port == 0) != (options->last_port == 0)) {
    return dc__fail(DC_E_INVALID,
                    "%s: options.first_port = %" PRId32 ", last_port = %" PRId32
                    ", must be both 0, or a range in "
                    "1 to 65535",
                    fn, options->first_port, options->last_port);
  }
  if (options->tls != 0 && options->tls != 1) {
    return dc__fail(DC_E_INVALID, "%s: options.tls = %" PRId32 ", must be 0 or 1", fn, options->tls);
  }
  if (options->heartbeat_ns < 0 || (options->heartbeat_ns > 0 && options->heartbeat_ns < 10000000)) {
    return dc__fail(DC_E_INVALID, "%s: options.heartbeat_ns = %" PRId64 ", must be 0 (1 s) or at least 10000000", fn,
                    options->heartbeat_ns);
  }
  return DC_OK;
}

/* Shared by the functions that create one rank's communicator. */
static dc_status comm_begin_create(const char *fn, int32_t rank, int32_t world, int32_t most,
                                   const dc_comm_options *options, dc_comm_options *known, dc_comm **comm) {
  if (comm == NULL) {
    return dc__fail(DC_E_INVALID, "%s: comm is NULL", fn);
  }
  *comm = NULL;
  DC__TRY(read_options(fn, world, most, options, known));
  if (rank < 0 || rank >= world) {
    return dc__fail(DC_E_INVALID, "%s: rank = %" PRId32 ", must be 0 to %" PRId32, fn, rank, world - 1);
  }
  return DC_OK;
}

dc_status dc_comm_create_threads(int32_t world_size, const dc_comm_options *options, dc_comm **comms) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_threads";
  if (comms == NULL) {
    return dc__fail(DC_E_INVALID, "%s: comms is NULL", fn);
  }
  if (world_size >= 1 && world_size <= DC__COMM_MAX_LOCAL) {
    memset(comms, 0, (size_t)world_size * sizeof *comms);
  }
  dc_comm_options known;
  DC__TRY(read_options(fn, world_size, DC__COMM_MAX_LOCAL, options, &known));
  return dc__comm_create_threads(world_size, &known, comms);
}

dc_status dc_comm_create_processes(const char *name, int32_t rank, int32_t world_size, const dc_comm_options *options,
                                   dc_comm **comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_processes";
  dc_comm_options known;
  DC__TRY(comm_begin_create(fn, rank, world_size, DC__COMM_MAX_LOCAL, options, &known, comm));
  DC__TRY(check_name(fn, name));
  return dc__comm_create_processes(name, rank, world_size, &known, comm);
}

dc_status dc_comm_create_tcp(const char *address, const char *name, int32_t rank, int32_t world_size,
                             const dc_comm_options *options, dc_comm **comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_tcp";
  dc_comm_options known;
  DC__TRY(comm_begin_create(fn, rank, world_size, DC__COMM_MAX_WORLD, options, &known, comm));
  DC__TRY(check_name(fn, name));
  DC__TRY(check_tcp_options(fn, &known));
  if (known.tls == 1 && known.secret == NULL) {
    return dc__fail(DC_E_INVALID, "%s: options.tls = 1 needs options.secret, of which its keys are made", fn);
  }
  dc_comm *whole;
  DC__TRY(dc__comm_create_tcp(address, name, rank, world_size, &known, &whole));
  return dc__comm_create_levels(whole, known.node, comm);
}

dc_status dc_comm_create_external(const dc_comm_callbacks *callbacks, int32_t rank, int32_t world_size,
                                  const dc_comm_options *options, dc_comm **comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_external";
  dc_comm_options known;
  DC__TRY(comm_begin_create(fn, rank, world_size, DC__COMM_MAX_WORLD, options, &known, comm));
  if (callbacks == NULL) {
    return dc__fail(DC_E_INVALID, "%s: callbacks is NULL", fn);
  }
  dc_comm_callbacks table;
  DC__TRY(dc__read_options(fn, "callbacks", &table, sizeof table, callbacks, DC__COMM_CALLBACKS_SIZE_0_1));
  const char *missing = table.all_gather == NULL                                   ? "all_gather"
                        : table.reduce_scatter == NULL && table.all_to_all == NULL ? "reduce_scatter"
                        : table.broadcast == NULL                                  ? "broadcast"
                        : table.barrier == NULL                                    ? "barrier"
                                                                                   : NULL;
  if (missing != NULL) {
    return dc__fail(DC_E_INVALID, "%s: callbacks.%s is NULL", fn, missing);
  }
  return dc__comm_create_external(&table, rank, world_size, &known, comm);
}

dc_status dc_comm_create_nccl(dc_comm *comm, dc_device *device, dc_comm **nccl) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_nccl";
  if (nccl == NULL) {
    return dc__fail(DC_E_INVALID, "%s: nccl is NULL", fn);
  }
  *nccl = NULL;
  DC__TRY(dc__handle_check(fn, "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__handle_check(fn, "device", device, DC__HANDLE_DEVICE));
  DC__TRY(dc__owner_check(fn, "communicator", &comm->owner));
  DC__TRY(dc__owner_check(fn, "device", &device->owner));
  DC__TRY(dc__comm_check(comm));
  return dc__comm_create_nccl(comm, device, nccl);
}

dc_status dc_nccl_get_version(int32_t *version) {
  DC__WITHOUT_TRAPS;
  if (version == NULL) {
    return dc__fail(DC_E_INVALID, "dc_nccl_get_version: version is NULL");
  }
  return dc__nccl_version(version);
}

/* MPI supplies rank and world, so the checks get rank 0 of 1. */
dc_status dc_comm_create_mpi(const dc_comm_options *options, dc_comm **comm) {
  DC__WITHOUT_TRAPS;
  static const char fn[] = "dc_comm_create_mpi";
  dc_comm_options known;
  DC__TRY(comm_begin_create(fn, 0, 1, 1, options, &known, comm));
  DC__TRY(check_tcp_options(fn, &known));
  if (known.tls == 1) {
    return dc__fail(DC_E_INVALID, "%s: options.tls = 1, must be 0: MPI moves the data, and libdc cannot encrypt it",
                    fn);
  }
  dc_comm *whole;
  DC__TRY(dc__comm_create_mpi(&known, &whole));
  return dc__comm_create_levels(whole, known.node, comm);
}

dc_status dc_mpi_get_version(const char **version) {
  DC__WITHOUT_TRAPS;
  if (version == NULL) {
    return dc__fail(DC_E_INVALID, "dc_mpi_get_version: version is NULL");
  }
  *version = NULL;
  return dc__mpi_version(version);
}

void dc_launch_init(dc_launch *launch, size_t struct_size) {
  dc__init_sized(launch, struct_size, sizeof *launch);
}

dc_status dc_launch_get(dc_launch *launch) {
  DC__WITHOUT_TRAPS;
  dc_launch l;
  DC__TRY(dc__launch_read(&l));
  return dc__write_sized("dc_launch_get", "launch", launch, &l, sizeof l, DC__LAUNCH_SIZE_0_1);
}

void dc_comm_destroy(dc_comm *comm) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(comm, DC__HANDLE_COMM) && !dc__owner_is_forked(&comm->owner)) {
    dc__comm_release(comm);
  }
}

int32_t dc_comm_rank(const dc_comm *comm) {
  return dc__handle_is(comm, DC__HANDLE_COMM) ? comm->rank : -1;
}

int32_t dc_comm_size(const dc_comm *comm) {
  return dc__handle_is(comm, DC__HANDLE_COMM) ? comm->world : -1;
}

dc_status dc_comm_dup(dc_comm *comm, dc_comm **copy) {
  DC__WITHOUT_TRAPS;
  if (copy == NULL) {
    return dc__fail(DC_E_INVALID, "dc_comm_dup: copy is NULL");
  }
  *copy = NULL;
  DC__TRY(dc__handle_check("dc_comm_dup", "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__owner_check("dc_comm_dup", "communicator", &comm->owner));
  DC__TRY(dc__comm_check(comm));
  return dc__comm_dup(comm, copy);
}

/* Ranks exchange errors in color and part, so that none waits for a rank with a bad argument. */
dc_status dc_comm_split(dc_comm *comm, int32_t color, int32_t key, dc_comm **part) {
  DC__WITHOUT_TRAPS;
  if (part != NULL) {
    *part = NULL;
  }
  DC__TRY(dc__handle_check("dc_comm_split", "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__owner_check("dc_comm_split", "communicator", &comm->owner));
  DC__TRY(dc__comm_check(comm));
  return dc__comm_split(comm, color, key, part);
}

dc_status dc_comm_set_checksums(dc_comm *comm, int32_t enable) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check("dc_comm_set_checksums", "comm", comm, DC__HANDLE_COMM));
  if (enable != 0 && enable != 1) {
    return dc__fail(DC_E_INVALID, "dc_comm_set_checksums: enable = %" PRId32 ", must be 0 or 1", enable);
  }
  DC__TRY(dc__owner_check("dc_comm_set_checksums", "communicator", &comm->owner));
  if (comm->ops->set_checksums == NULL) {
    return dc__fail(DC_E_UNSUPPORTED, "dc_comm_set_checksums: this communicator (%s) does not see what ranks send",
                    comm->ops->name);
  }
  return comm->ops->set_checksums(comm, enable == 1);
}

void dc_comm_abort(dc_comm *comm, const char *reason) {
  DC__WITHOUT_TRAPS;
  if (dc__handle_is(comm, DC__HANDLE_COMM) && !dc__owner_is_forked(&comm->owner)) {
    comm->ops->abort(comm, reason);
  }
}

dc_status dc_comm_check(dc_comm *comm) {
  DC__WITHOUT_TRAPS;
  DC__TRY(dc__handle_check("dc_comm_check", "comm", comm, DC__HANDLE_COMM));
  DC__TRY(dc__owner_check("dc_comm_check", "communicator", &comm->owner));
  return dc__comm_check(comm);
}
