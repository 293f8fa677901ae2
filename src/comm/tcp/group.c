/* State shared by the communicators of one rank: creation and release. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include "comm/tcp/bootstrap/auth.h"
#include "comm/tcp/overlay/overlay.h"
#include "comm/tcp/tls/tls.h"

enum { CONTROL_MESH_NS = 1000000000 /* added to the deadline for the control mesh */ };

static const int64_t default_heartbeat_ns = INT64_C(1000000000);

/* In an overlay no other rank takes part in the creation, so the communicator gets its mesh's number here. */
void dc__tcp_group_add(dc__tcp_group *group, dc__tcp *member) {
  pthread_mutex_lock(&group->mutex);
  member->mesh = group->overlay ? group->meshes++ : member->mesh;
  member->next = group->members;
  group->members = member;
  group->joined = member->mesh + 1;
  pthread_mutex_unlock(&group->mutex);
}

void dc__tcp_group_remove(dc__tcp_group *group, const dc__tcp *member) {
  pthread_mutex_lock(&group->mutex);
  dc__tcp **link = &group->members;
  while (*link != member) {
    link = &(*link)->next;
  }
  *link = member->next;
  dc__tcp_drop_early(group, member->mesh);
  pthread_mutex_unlock(&group->mutex);
}

void dc__tcp_group_release(dc__tcp_group *group) {
  if (atomic_fetch_sub_explicit(&group->refs, 1, memory_order_acq_rel) != 1) {
    return;
  }
  const dc__tcp_control_msg goodbye = {.kind = DC__TCP_GOODBYE};
  pthread_mutex_lock(&group->mutex);
  dc__tcp_broadcast_control(group, &goodbye);
  pthread_mutex_unlock(&group->mutex);
  if (group->watcher_running) {
    atomic_store(&group->stopping, 1);
    (void)eventfd_write(group->wake_event, 1);
    pthread_join(group->watcher, NULL);
  }
  for (int32_t r = 0; r < group->world; r++) {
    dc__tcp_close(&group->control[r]);
  }
  for (int32_t i = 0; i < group->early_count; i++) {
    dc__tcp_close(&group->early[i].fd);
  }
  dc__free(group->early);
  dc__tcp_pending_close(&group->pending);
  dc__tcp_close(&group->listener);
  dc__tcp_close(&group->failure_event);
  dc__tcp_close(&group->wake_event);
  pthread_cond_destroy(&group->changed);
  pthread_mutex_destroy(&group->mesh_mutex);
  pthread_mutex_destroy(&group->query_mutex);
  pthread_mutex_destroy(&group->mutex);
  explicit_bzero(group->key, sizeof group->key);
  dc__free(group);
}

static void init_group(dc__tcp_group *group) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&group->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&group->mesh_mutex, NULL);
  pthread_mutex_init(&group->query_mutex, NULL);
  pthread_mutex_init(&group->mutex, NULL);
  atomic_init(&group->refs, 1);
  group->listener = group->failure_event = group->wake_event = -1;
  for (int32_t r = 0; r < group->world; r++) {
    group->control[r] = -1;
  }
}

static dc_status tcp_start_group(dc__tcp_group *group, const dc__tcp_address *address) {
  group->failure_event = dc__above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  group->wake_event = dc__above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (group->failure_event < 0 || group->wake_event < 0) {
    return dc__fail(DC_E_SYSTEM, "dc_comm_create_tcp: no eventfd: %s", strerror(errno));
  }
  if (group->world == 1) {
    return DC_OK;
  }
  DC__TRY(group->tls ? dc__tls_load("dc_comm_create_tcp") : DC_OK);
  int64_t deadline = dc__now_ns() + group->timeout_ns;
  DC__TRY(dc__tcp_rendezvous(group, address, deadline));
  group->formed_ns = dc__now_ns();
  DC__TRY(dc__tcp_mesh_connect(group, NULL, deadline + CONTROL_MESH_NS, group->control));
  dc__tcp_start_heartbeats(group);
  return dc__tcp_start_watcher(group);
}

dc_status dc__tcp_group_create(int listener, const char *address, const char *name, int32_t rank, int32_t world,
                               const dc_comm_options *options, dc__tcp_group **out) {
  dc__tcp_address at;
  dc_status parsed = dc__tcp_parse_address("dc_comm_create_tcp", address, &at);
  dc__tcp_group *group = parsed == DC_OK ? dc__calloc(1, sizeof *group) : NULL;
  if (group == NULL) {
    dc__tcp_close(&listener);
    return parsed != DC_OK ? parsed : DC_E_NO_MEMORY;
  }
  group->rank = rank;
  group->world = world;
  group->overlay = world > DC__TCP_MAX_MESH;
  group->timeout_ns = options->timeout_ns;
  dc__tcp_set_secret(group, options->secret);
  group->tls = options->tls != 0;
  snprintf(group->network, sizeof group->network, "%s", options->network == NULL ? "" : options->network);
  group->heartbeat_ns = options->heartbeat_ns != 0 ? options->heartbeat_ns : default_heartbeat_ns;
  group->first_port = options->first_port;
  group->last_port = options->last_port;
  snprintf(group->name, sizeof group->name, "%s", name);
  init_group(group);
  group->listener = listener;
  dc_status status = tcp_start_group(group, &at);
  if (status != DC_OK) {
    dc__tcp_group_fail(group, status);
    status = dc__tcp_add_lack(group, dc__tcp_group_check(group));
    dc__tcp_group_release(group);
    return status;
  }
  *out = group;
  return DC_OK;
}
