/* Names of parameters, for error texts and logs. Texts are first written with ids, since transports and other ranks do
 * not know the names. The names are added when a text leaves the context. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/flight_recorder_internal.h"

enum { SHOWN = 96 }; /* maximum bytes of a name in a text of 512 bytes */

static const char *find_name(const dc_context *ctx, int64_t id) {
  return dc__map_get(&ctx->recorder->names, id);
}

/* Takes the recorder's mutex, as a dump reads names without the context's. */
static bool set_name(dc_context *ctx, int64_t id, char *name) {
  dc__recorder *r = ctx->recorder;
  bool set_name = true;
  pthread_mutex_lock(&r->mutex);
  char *old = dc__map_get(&r->names, id);
  if (name != NULL) {
    set_name = dc__map_put(&r->names, id, name);
  } else if (old != NULL) {
    dc__map_remove(&r->names, id);
  }
  pthread_mutex_unlock(&r->mutex);
  if (set_name) {
    dc__free(old);
  }
  return set_name;
}

dc_status dc__name_set(dc_context *ctx, const char *fn, int64_t id, const char *name) {
  dc__param *param;
  DC__TRY(dc__param_find(ctx, fn, id, &param));
  for (size_t i = 0; name != NULL && name[i] != '\0'; i++) {
    unsigned char c = (unsigned char)name[i];
    if (c < 0x20 || c == 0x7f) {
      return dc__fail(DC_E_INVALID,
                      "%s: name of parameter %" PRId64 " has byte 0x%02x at %zu, must have no control bytes", fn, id, c,
                      i);
    }
  }
  if (name == NULL || name[0] == '\0') {
    dc__name_remove(ctx, id);
    return DC_OK;
  }
  char *copy = dc__strdup(name);
  if (copy == NULL || !set_name(ctx, id, copy)) {
    dc__free(copy);
    return DC_E_NO_MEMORY;
  }
  return DC_OK;
}

void dc__name_remove(dc_context *ctx, int64_t id) {
  (void)set_name(ctx, id, NULL);
}

void dc__names_free(dc__recorder *r) {
  DC__MAP_EACH (&r->names, i) {
    dc__free(r->names.values[i]);
  }
  dc__map_clear(&r->names);
}

/* ---- in texts ---- */

typedef struct text_buffer {
  char *at;
  size_t used, cap;
} text_buffer;

static void append_text(text_buffer *t, const char *bytes, size_t count) {
  size_t room = t->cap - 1 - t->used;
  size_t n = count < room ? count : room;
  memcpy(t->at + t->used, bytes, n);
  t->used += n;
  t->at[t->used] = '\0';
}

/* Writes " (name)". It keeps the end of a long name, which tells more in "model.layers.7.mlp.weight". */
static void make_label(const char *name, char label[SHOWN + 8]) {
  size_t length = strlen(name);
  const char *shown = name + (length > SHOWN ? length - SHOWN : 0);
  while (shown > name && ((unsigned char)*shown & 0xc0) == 0x80) { /* not in the middle of a character */
    shown++;
  }
  snprintf(label, SHOWN + 8, " (%s%s)", shown > name ? "..." : "", shown);
}

void dc__names_annotate(const dc_context *ctx, const char *plain, char *named, size_t cap) {
  static const char word[] = "parameter ";
  text_buffer t = {named, 0, cap};
  named[0] = '\0';
  for (const char *next = plain, *found; (found = strstr(next, word)) != NULL;) {
    char *end;
    char label[SHOWN + 8] = "";
    int64_t id = strtoll(found + sizeof word - 1, &end, 10);
    const char *name = end == found + sizeof word - 1 ? NULL : find_name(ctx, id);
    if (name != NULL) {
      make_label(name, label);
    }
    bool has_it = strncmp(end, label, strlen(label)) == 0; /* a failure that is raised again has its names already */
    append_text(&t, next, (size_t)(end - next));
    append_text(&t, label, has_it ? 0 : strlen(label));
    next = plain = end;
  }
  append_text(&t, plain, strlen(plain));
}

void dc__names_annotate_error(const dc_context *ctx, dc_status status) {
  if (status != DC_OK && ctx->recorder->names.count > 0 && strstr(dc_last_error(), "parameter ") != NULL) {
    char named[512];
    dc__names_annotate(ctx, dc_last_error(), named, sizeof named);
    (void)dc__fail(status, "%s", named);
  }
}
