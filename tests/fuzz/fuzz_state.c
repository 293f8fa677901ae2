/* Saved states of optimizers. Any bytes are refused with a text, and nothing changes; or they are loaded, and saving
 * gives the same bytes. The first byte says whether the rest is the state itself or a list of changes to a valid one.
 * Length and checksum of a changed state are then corrected, to reach the code behind their checks. */
#include "base/base.h"
#include "fuzz.h"

enum { KINDS = 3, MOST = 65536, HEAD = 24, SUM = 8 };

static struct subject {
  dc_optimizer *optimizer;
  unsigned char whole[MOST]; /* its valid initial state */
  size_t bytes;
} subjects[KINDS];

static void save(dc_optimizer *optimizer, unsigned char *to, size_t *bytes) {
  int64_t size;
  PROMISE(dc_optimizer_get_save_bytes(optimizer, &size) == DC_OK && size <= MOST);
  PROMISE(dc_optimizer_save(optimizer, to, size) == DC_OK);
  *bytes = (size_t)size;
}

static void make_subjects(void) {
  static const int64_t shapes[3][2] = {{3, 5}, {0, 2}, {7, 1}};
  dc_linalg_options options = DC_LINALG_OPTIONS_INIT;
  dc_device *device;
  dc_linalg *linalg;
  options.threads = 1;
  PROMISE(dc_device_open("cpu", NULL, &device) == DC_OK);
  PROMISE(dc_linalg_create(device, &options, &linalg) == DC_OK);
  PROMISE(dc_adamw_create(linalg, NULL, &subjects[0].optimizer) == DC_OK);
  PROMISE(dc_shampoo_create(linalg, NULL, NULL, &subjects[1].optimizer) == DC_OK);
  PROMISE(dc_muon_create(linalg, NULL, NULL, &subjects[2].optimizer) == DC_OK);
  dc_linalg_destroy(linalg);
  dc_device_destroy(device);
  for (int32_t k = 0; k < KINDS; k++) {
    for (int32_t i = 0; i < 3; i++) {
      int64_t count = shapes[i][0] * shapes[i][1];
      int32_t dtype = i == 2 ? DC_BFLOAT16 : DC_FLOAT32;
      PROMISE(dc_optimizer_add_param(subjects[k].optimizer, 0, shapes[i], 2, 0, count, dtype, NULL) == DC_OK);
    }
    save(subjects[k].optimizer, subjects[k].whole, &subjects[k].bytes);
  }
}

/* Copies the valid state with some bytes changed, perhaps shorter or longer. Returns its length. */
static size_t changed(bytes *b, const struct subject *s, unsigned char state[MOST]) {
  size_t size = s->bytes + (size_t)(read_u8(b) / 64 * 8);
  size -= (size_t)(read_u8(b) / 16 * 8);
  memset(state, 0, MOST);
  memcpy(state, s->whole, size < s->bytes ? size : s->bytes);
  while (b->left > 0) {
    uint16_t at;
    take(b, &at, sizeof at);
    state[at % size] = read_u8(b);
  }
  if (size >= HEAD + SUM) {
    const uint64_t length = size;
    memcpy(state + HEAD - sizeof length, &length, sizeof length);
    const uint64_t sum = dc__checksum(DC__CHECKSUM, state, size - SUM);
    memcpy(state + size - SUM, &sum, SUM);
  }
  return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static unsigned char state[MOST], after[MOST];
  bytes b = {data, size};
  if (subjects[0].optimizer == NULL) {
    make_subjects();
  }
  uint8_t choice = read_u8(&b);
  struct subject *s = &subjects[choice % KINDS];
  PROMISE(dc_optimizer_load(s->optimizer, s->whole, (int64_t)s->bytes) == DC_OK);
  size_t length = b.left;
  if (choice / KINDS % 4 == 0) {
    take(&b, state, length);
  } else {
    length = changed(&b, s, state);
  }
  size_t saved;
  dc_status status = dc_optimizer_load(s->optimizer, state, (int64_t)length);
  save(s->optimizer, after, &saved);
  if (status == DC_OK) {
    PROMISE(saved == length && memcmp(after, state, saved) == 0);
  } else {
    PROMISE(strncmp(dc_last_error(), "dc_optimizer_load: ", 19) == 0);
    PROMISE(saved == s->bytes && memcmp(after, s->whole, saved) == 0);
  }
  return 0;
}
