/* The flight recorder: its entries, and that its dump is complete, wherever and whenever it is requested. tests/tools
 * checks that the files are valid JSON, and the diagnoses from them. */
#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness.h"

enum { GRAPH = 1, KEPT = 4096, FILE_BYTES = 8 << 20 };

static char folder[] = "/tmp/dc-trace-XXXXXX";

/* ---- reading ---- */

/* Returns a rank's dump, which the caller must free; NULL: there is none. */
static char *read_dump(int number) {
  char path[64];
  snprintf(path, sizeof path, "%s/rank-%d.json", folder, number);
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    return NULL;
  }
  char *text = calloc(1, FILE_BYTES);
  size_t bytes = text == NULL ? 0 : fread(text, 1, FILE_BYTES - 1, file);
  fclose(file);
  if (bytes == 0) {
    free(text);
    return NULL;
  }
  return text;
}

static bool whole(const char *text) {
  size_t bytes = text == NULL ? 0 : strlen(text);
  return bytes > 4 && text[0] == '{' && strcmp(text + bytes - 4, "}]}\n") == 0;
}

static int occurrences(const char *text, const char *what) {
  int count = 0;
  for (const char *at = strstr(text, what); at != NULL; at = strstr(at + 1, what)) {
    count++;
  }
  return count;
}

static void empty_folder(void) {
  DIR *dir = opendir(folder);
  assert_non_null(dir);
  for (struct dirent *e = readdir(dir); e != NULL; e = readdir(dir)) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
    if (e->d_name[0] != '.') {
      unlink(path);
    } else {
      assert_null(strstr(e->d_name, ".part")); /* no partial file remains */
    }
  }
  closedir(dir);
}

/* ---- work ---- */

static dc_status gather(rank *r, int64_t id) {
  dc_tensor full = DC_TENSOR_INIT;
  dc_status status = dc_allgather_param(r->ctx, NULL, GRAPH, id, DC_DTYPE_NONE, &full);
  status = status != DC_OK ? status : dc_wait_allgather(r->ctx, NULL, GRAPH, id);
  return status != DC_OK ? status : dc_release_param(r->ctx, NULL, GRAPH, id, 1);
}

static void keeps_the_last(rank *r) {
  sharded p;
  int64_t id = 4, count;
  static _Thread_local dc_trace_event events[3 * KEPT];
  OK(r, register_sharded(r, &p, id, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  OK(r, dc_context_trace_dump(r->ctx, folder));
  char *text = read_dump(r->rank);
  CHECK(r, whole(text) && occurrences(text, "\"n\":") == 2 && strstr(text, "\"register_graph\"") != NULL);
  free(text);
  for (int i = 0; i < KEPT; i++) { /* three operations each */
    OK(r, gather(r, id));
  }
  OK(r, dc_context_trace_dump(r->ctx, folder));
  text = read_dump(r->rank);
  CHECK(r, whole(text) && occurrences(text, "\"n\":") == KEPT && strstr(text, "\"n\":2,") == NULL);
  CHECK(r, strstr(text, "\"state\":\"done\"") != NULL && strstr(text, "\"state\":\"running\"") == NULL);
  free(text);
  OK(r, dc_context_trace_start(r->ctx, 3 * KEPT)); /* a larger ring keeps old entries, but the trace starts now */
  for (int i = 0; i < KEPT; i++) {
    OK(r, gather(r, id));
  }
  OK(r, dc_context_trace_read(r->ctx, events, sizeof events[0], 3 * KEPT, &count));
  CHECK(r, count == 3 * KEPT && events[0].op == DC_OP_ALLGATHER_PARAM);
  for (int64_t i = 0; i < count; i++) {
    CHECK(r, events[i].end_ns >= events[i].begin_ns && events[i].begin_ns > 0);
  }
  OK(r, dc_context_trace_start(r->ctx, 0));
  OK(r, dc_context_trace_dump(r->ctx, folder));
  text = read_dump(r->rank);
  CHECK(r, whole(text) && occurrences(text, "\"n\":") == KEPT);
  free(text);
  free_sharded(&p);
}

static void test_keeps_the_last(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, keeps_the_last, NULL);
  empty_folder();
}

/* ---- dumps beside calls ---- */

static atomic_int seen; /* 1: rank 0 begins to wait; the other rank then dumps it */
static rank *waiting;

static void dump_while_blocked(rank *r) {
  sharded p;
  int64_t id = 4;
  OK(r, register_sharded(r, &p, id, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  if (r->rank == 0) {
    waiting = r;
    atomic_store(&seen, 1);
    OK(r, gather(r, id)); /* holds the context's mutex until the other rank comes */
  } else {
    bool found = false;
    for (int i = 0; i < 60000 && !found; i++) {
      usleep(1000);
      if (atomic_load(&seen) == 1) {
        OK(r, dc_context_trace_dump(waiting->ctx, folder));
        char *text = read_dump(0);
        CHECK(r, whole(text));
        found = strstr(text, "\"op\":\"wait_allgather\"") != NULL && occurrences(text, "\"state\":\"running\"") == 2;
        free(text);
      }
    }
    CHECK(r, found);
    OK(r, gather(r, id));
  }
  free_sharded(&p);
}

static void test_dump_while_blocked(void **state) {
  (void)state;
  atomic_store(&seen, 0);
  run_ranks((setup){.world = 2}, dump_while_blocked, NULL);
  empty_folder();
}

static void *dump_often(void *arg) {
  rank *r = arg;
  for (int i = 0; i < 50; i++) {
    char *text = dc_context_trace_dump(r->ctx, folder) == DC_OK ? read_dump(r->rank) : NULL;
    if (!whole(text)) {
      snprintf(r->failure, sizeof r->failure, "dump %d is not whole: %s", i, dc_last_error());
    }
    free(text);
  }
  return NULL;
}

static void dump_beside_work(rank *r) {
  sharded p;
  int64_t id = 4;
  pthread_t thread;
  OK(r, register_sharded(r, &p, id, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, &id, 1));
  CHECK(r, pthread_create(&thread, NULL, dump_often, r) == 0);
  dc_status status = DC_OK;
  for (int i = 0; i < 3000 && status == DC_OK; i++) { /* the ring is overwritten while it is read */
    status = gather(r, id);
    if (status == DC_OK && i % 500 == 0) {
      status = dc_context_trace_start(r->ctx, KEPT * (i / 500 % 2 + 1)); /* and the ring is replaced */
    }
  }
  pthread_join(thread, NULL);
  OK(r, status);
  free_sharded(&p);
}

static void test_dump_beside_work(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, dump_beside_work, NULL);
  empty_folder();
}

/* ---- failures ---- */

static void fails(rank *r) {
  sharded p;
  sharded q;
  int64_t ids[2] = {4, 5};
  OK(r, register_sharded(r, &p, 4, 10, 0));
  OK(r, register_sharded(r, &q, 5, 10, 0));
  OK(r, dc_register_graph_z3(r->ctx, GRAPH, ids, 2));
  OK(r, dc_context_trace_dump_on_error(r->ctx, "/tmp/other"));
  OK(r, dc_context_trace_dump_on_error(r->ctx, r->user == NULL ? folder : r->user));
  FAILS(r, gather(r, 9), DC_E_NOT_FOUND, "id = 9"); /* a wrong argument causes no dump */
  char *text = read_dump(r->rank);
  CHECK(r, text == NULL);
  FAILS(r, gather(r, r->rank == 1 ? 5 : 4), DC_E_MISMATCH, "parameter 5");
  text = read_dump(r->rank);
  CHECK(r, r->user != NULL || (whole(text) && strstr(text, "\"status\":\"DC_E_MISMATCH\"") != NULL &&
                               strstr(text, "\"state\":\"failed\"") != NULL && strstr(text, "parameter 5") != NULL));
  free(text);
  free_sharded(&p);
  free_sharded(&q);
}

static void test_dump_on_error(void **state) {
  (void)state;
  run_ranks((setup){.world = 2}, fails, NULL);
  assert_int_not_equal(access("/tmp/other", F_OK), 0); /* the folder was changed before */
  empty_folder();
  run_ranks((setup){.world = 2}, fails, "/proc/no such place"); /* the call's own error is still the one reported */
}

static char last_line[640];

static void keep_line(int32_t level, const char *message, void *user) {
  (void)user;
  snprintf(last_line, sizeof last_line, "%d %s", level, message);
}

static void *other_bucket(void *arg) {
  dc_comm *comm = arg;
  dc_device *device = NULL;
  dc_context *ctx = NULL;
  dc_context_options options = DC_CONTEXT_OPTIONS_INIT;
  options.log = dc_comm_rank(comm) == 0 ? keep_line : NULL;
  if (dc_device_open("cpu", NULL, &device) == DC_OK && dc_context_create(device, &options, &ctx) == DC_OK) {
    (void)dc_context_trace_dump_on_error(ctx, dc_comm_rank(comm) == 0 ? "/proc/no such place" : folder);
    (void)dc_init(ctx, comm, NULL, 100 + dc_comm_rank(comm));
  }
  dc_context_destroy(ctx);
  dc_device_destroy(device);
  return NULL;
}

/* A failure of dc_init itself is dumped; if the dump fails, the log says so. */
static void test_init_fails(void **state) {
  (void)state;
  dc_comm *comms[2];
  pthread_t thread;
  assert_int_equal(dc_comm_create_threads(2, NULL, comms), DC_OK);
  assert_int_equal(pthread_create(&thread, NULL, other_bucket, comms[1]), 0);
  other_bucket(comms[0]);
  pthread_join(thread, NULL);
  char *text = read_dump(1);
  assert_true(whole(text));
  assert_non_null(strstr(text, "initial_reduce_bucket_size = 101 on rank 1"));
  free(text);
  assert_non_null(strstr(last_line, "2 no dump of rank 0: "));
  dc_comm_destroy(comms[0]);
  dc_comm_destroy(comms[1]);
  empty_folder();
}

static void test_bad_input(void **state) {
  (void)state;
  dc_device *device;
  dc_context *ctx;
  char longest[5000];
  memset(longest, 'x', sizeof longest - 1);
  longest[sizeof longest - 1] = '\0';
  assert_int_equal(dc_device_open("cpu", NULL, &device), DC_OK);
  assert_int_equal(dc_context_create(device, NULL, &ctx), DC_OK);
  assert_int_equal(dc_context_trace_dump(NULL, folder), DC_E_INVALID);
  assert_int_equal(dc_context_trace_dump_on_error(NULL, folder), DC_E_INVALID);
  assert_int_equal(dc_context_trace_dump(ctx, folder), DC_E_STATE);
  assert_int_equal(dc_init(ctx, NULL, NULL, 1), DC_OK);
  assert_int_equal(dc_context_trace_dump(ctx, NULL), DC_E_INVALID);
  assert_int_equal(dc_context_trace_dump(ctx, ""), DC_E_INVALID);
  assert_int_equal(dc_context_trace_dump_on_error(ctx, ""), DC_E_INVALID);
  assert_int_equal(dc_context_trace_dump_on_error(ctx, NULL), DC_OK);
  assert_int_equal(dc_context_trace_dump(ctx, longest), DC_E_INVALID);
  assert_non_null(strstr(dc_last_error(), "folder has 4999 bytes"));
  assert_int_equal(dc_context_trace_dump(ctx, "/proc/no such place/at all"), DC_E_SYSTEM);
  assert_non_null(strstr(dc_last_error(), "/proc/no such place/at all"));
  assert_int_equal(dc_cleanup(ctx), DC_OK);
  assert_int_equal(dc_context_trace_dump(ctx, folder), DC_OK); /* the recorder still has its entries */
  dc_context_destroy(ctx);
  dc_device_destroy(device);
  empty_folder();
}

int main(void) {
  if (mkdtemp(folder) == NULL) {
    return 1;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_keeps_the_last),   cmocka_unit_test(test_dump_while_blocked),
      cmocka_unit_test(test_dump_beside_work), cmocka_unit_test(test_dump_on_error),
      cmocka_unit_test(test_init_fails),       cmocka_unit_test(test_bad_input),
  };
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  rmdir(folder);
  return failed;
}
