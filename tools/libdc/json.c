/* JSON, as much of it as dumps and reports need: whole numbers, no more depth than a dump has. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

/* ---- writing ---- */

/* Bytes of the character at text, which is not empty; 0: UTF-8 has no such character. */
static int utf8_length(const char *text) {
  const unsigned char *at = (const unsigned char *)text;
  const int length = at[0] < 0x80                     ? 1
                     : at[0] >= 0xc2 && at[0] <= 0xdf ? 2
                     : at[0] >= 0xe0 && at[0] <= 0xef ? 3
                     : at[0] >= 0xf0 && at[0] <= 0xf4 ? 4
                                                      : 0;
  for (int i = 1; i < length; i++) {
    if ((at[i] & 0xc0) != 0x80) {
      return 0;
    }
  }
  const bool is_none = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f) ||
                       (at[0] == 0xf0 && at[1] < 0x90) || (at[0] == 0xf4 && at[1] > 0x8f);
  return is_none ? 0 : length;
}

/* A path may have any bytes. JSON is UTF-8 alone. */
static void put_text(FILE *file, const char *text) {
  fputc('"', file);
  for (int length = 0; *text != '\0'; text += length > 0 ? length : 1) {
    const unsigned char c = (unsigned char)*text;
    length = utf8_length(text);
    if (length == 0) {
      fputs("\\ufffd", file);
    } else if (c == '"' || c == '\\') {
      fprintf(file, "\\%c", c);
    } else if (c < 0x20) {
      fprintf(file, "\\u%04x", c);
    } else {
      fprintf(file, "%.*s", length, text);
    }
  }
  fputc('"', file);
}

static void put_key(json *j, const char *key) {
  if (j->filled[j->depth]) {
    fputs(j->depth == 1 ? ",\n " : ", ", j->file);
  }
  j->filled[j->depth] = true;
  if (key != NULL) {
    put_text(j->file, key);
    fputs(": ", j->file);
  }
}

void json_open(json *j, const char *key, char bracket) {
  put_key(j, key);
  fputc(bracket, j->file);
  j->filled[++j->depth] = false;
}

void json_close(json *j, char bracket) {
  j->depth--;
  fputc(bracket, j->file);
  if (j->depth == 0) {
    fputc('\n', j->file);
  }
}

void json_text(json *j, const char *key, const char *text) {
  put_key(j, key);
  put_text(j->file, text);
}

void json_int(json *j, const char *key, int64_t number) {
  put_key(j, key);
  fprintf(j->file, "%" PRId64, number);
}

void json_number(json *j, const char *key, double number) {
  put_key(j, key);
  fprintf(j->file, "%.15g", number);
}

void json_bool(json *j, const char *key, bool is) {
  put_key(j, key);
  fputs(is ? "true" : "false", j->file);
}

/* ---- reading ---- */

enum { MAX_DEPTH = 16 };

typedef struct reader {
  char *begin;
  char *at;
  const char *fault; /* the first */
} reader;

static void reader_skip(reader *r) {
  r->at += strspn(r->at, " \t\r\n");
}

static bool reader_take(reader *r, char c) {
  reader_skip(r);
  if (*r->at != c) {
    return false;
  }
  r->at++;
  return true;
}

static bool reader_fail(reader *r, const char *fault) {
  r->fault = r->fault == NULL ? fault : r->fault;
  return false;
}

static int read_hex4(const char *at) {
  int code = 0;
  for (int i = 0; i < 4; i++) {
    char c = at[i];
    int digit = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
    if (digit < 0) {
      return -1;
    }
    code = code * 16 + digit;
  }
  return code;
}

/* A code point of \uXXXX as UTF-8, which is never longer; halves of a pair become a question mark. */
static char *put_utf8(char *to, int code) {
  if (code < 0x80) {
    *to++ = (char)(code == 0 ? '?' : code);
  } else if (code < 0x800) {
    *to++ = (char)(0xc0 | code >> 6);
    *to++ = (char)(0x80 | (code & 63));
  } else if (code >= 0xd800 && code < 0xe000) {
    *to++ = '?';
  } else {
    *to++ = (char)(0xe0 | code >> 12);
    *to++ = (char)(0x80 | (code >> 6 & 63));
    *to++ = (char)(0x80 | (code & 63));
  }
  return to;
}

/* A string, unescaped in place: what it means is never longer than how it is written. */
static bool read_text(reader *r, char **text) {
  if (!reader_take(r, '"')) {
    return reader_fail(r, "a string is expected");
  }
  char *to = *text = r->at;
  while (*r->at != '"') {
    if ((unsigned char)*r->at < 0x20) {
      return reader_fail(r, "a string does not end");
    }
    if (*r->at != '\\') {
      *to++ = *r->at++;
      continue;
    }
    static const char escapes[] = "\"\\/bfnrt";
    static const char meant[] = "\"\\/\b\f\n\r\t";
    const char *known = r->at[1] == '\0' ? NULL : strchr(escapes, r->at[1]);
    int code = r->at[1] == 'u' ? read_hex4(r->at + 2) : -1;
    if (known == NULL && code < 0) {
      return reader_fail(r, "an unknown escape");
    }
    if (known != NULL) {
      *to++ = meant[known - escapes];
      r->at += 2;
    } else {
      to = put_utf8(to, code);
      r->at += 6;
    }
  }
  r->at++;
  *to = '\0';
  return true;
}

static bool read_value(reader *r, json_value *v, int depth);

static bool read_members(reader *r, json_value *v, int depth) {
  char close = v->kind == J_OBJECT ? '}' : ']';
  json_value **last = &v->first;
  if (reader_take(r, close)) {
    return true;
  }
  do {
    json_value *member = calloc(1, sizeof *member);
    if (member == NULL) {
      return reader_fail(r, "out of memory");
    }
    *last = member;
    last = &member->next;
    if (v->kind == J_OBJECT && (!read_text(r, &member->key) || !reader_take(r, ':'))) {
      return reader_fail(r, "a colon is expected");
    }
    if (!read_value(r, member, depth + 1)) {
      return false;
    }
  } while (reader_take(r, ','));
  return reader_take(r, close) || reader_fail(r, "a comma or an end is expected");
}

static bool read_word(reader *r, json_value *v) {
  static const struct {
    const char *word;
    json_kind kind;
    int64_t number;
  } words[] = {{"true", J_BOOL, 1}, {"false", J_BOOL, 0}, {"null", J_NULL, 0}};
  for (size_t i = 0; i < COUNT(words); i++) {
    size_t length = strlen(words[i].word);
    if (strncmp(r->at, words[i].word, length) == 0) {
      v->kind = words[i].kind;
      v->number = words[i].number;
      r->at += length;
      return true;
    }
  }
  char *end;
  errno = 0;
  v->kind = J_NUMBER;
  v->number = strtoll(r->at, &end, 10);
  if (end == r->at || errno != 0 || strchr(".eE", *end) != NULL) {
    return reader_fail(r, *r->at == '\0' ? "it ends too early" : "no whole number, string, list or object");
  }
  r->at = end;
  return true;
}

static bool read_value(reader *r, json_value *v, int depth) {
  reader_skip(r);
  if (depth > MAX_DEPTH) {
    return reader_fail(r, "it is nested too deeply");
  }
  if (*r->at == '{' || *r->at == '[') {
    v->kind = *r->at++ == '{' ? J_OBJECT : J_ARRAY;
    return read_members(r, v, depth);
  }
  if (*r->at == '"') {
    v->kind = J_TEXT;
    return read_text(r, &v->text);
  }
  return read_word(r, v);
}

json_value *json_read(char *text, char *error, size_t error_bytes) {
  reader r = {text, text, NULL};
  json_value *v = calloc(1, sizeof *v);
  if (v == NULL) {
    snprintf(error, error_bytes, "out of memory");
    return NULL;
  }
  bool well = read_value(&r, v, 0);
  if (well) {
    reader_skip(&r);
    well = *r.at == '\0' || reader_fail(&r, "something follows its end");
  }
  if (!well) {
    snprintf(error, error_bytes, "byte %td: %s", r.at - r.begin, r.fault);
    json_free(v);
    return NULL;
  }
  return v;
}

void json_free(json_value *v) {
  while (v != NULL) {
    json_value *next = v->next;
    json_free(v->first);
    free(v);
    v = next;
  }
}

const json_value *json_get(const json_value *object, const char *key) {
  for (const json_value *v = object->kind == J_OBJECT ? object->first : NULL; v != NULL; v = v->next) {
    if (strcmp(v->key, key) == 0) {
      return v;
    }
  }
  return NULL;
}
