/* Turns PTX text into a program, line by line. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptx.h"

enum { NAME = 256, SYMBOLS = 64 };

/* Registers of a class, named PREFIX0 and so on, or a single register PREFIX. */
typedef struct bank {
  char prefix[16];
  int32_t first, count; /* count 0: a single register */
} bank;

typedef struct symbol {
  char name[NAME];
  uint64_t value;
} symbol;

typedef struct label {
  char name[64];
  int32_t at; /* index of the next instruction, or of the one that branches there */
} label;

typedef struct labels {
  label *all;
  int32_t count, capacity;
} labels;

typedef struct parser {
  ptx_module *module;
  ptx_entry *entry; /* the entry that the line belongs to */
  int32_t line;
  bank banks[16];
  int32_t bank_count;
  symbol symbols[SYMBOLS];
  int32_t symbol_count;
  labels defined, used;
  char *why;
  size_t why_bytes;
  bool failed;
} parser;

static void refuse(parser *p, const char *what, const char *text) {
  if (!p->failed) {
    snprintf(p->why, p->why_bytes, "PTX, line %d: %s: %.*s", p->line, what, PTX_LINE, text);
  }
  p->failed = true;
}

/* Grows an array if it has no space for another element. */
static void *grow(void *array, int32_t count, int32_t *capacity, size_t size) {
  if (count < *capacity) {
    return array;
  }
  *capacity = *capacity * 2 + 64;
  void *grown = realloc(array, (size_t)*capacity * size);
  if (grown == NULL) {
    abort();
  }
  return grown;
}

/* ---- operands ---- */

static int32_t add_constant(parser *p, uint64_t value) {
  ptx_entry *e = p->entry;
  for (int32_t i = 0; i < e->constant_count; i++) {
    if (e->constants[i] == value) {
      return ~i;
    }
  }
  e->constants = grow(e->constants, e->constant_count, &e->constant_capacity, sizeof *e->constants);
  e->constants[e->constant_count] = value;
  return ~e->constant_count++;
}

static int32_t find_register(parser *p, const char *text) {
  for (int32_t i = 0; i < p->bank_count; i++) {
    const bank *b = &p->banks[i];
    const size_t length = strlen(b->prefix);
    if (b->count == 0 && strcmp(text, b->prefix) == 0) {
      return b->first;
    }
    if (b->count > 0 && strncmp(text, b->prefix, length) == 0 && isdigit((unsigned char)text[length])) {
      const long number = strtol(text + length, NULL, 10);
      if (number < b->count) {
        return b->first + (int32_t)number;
      }
    }
  }
  refuse(p, "no such register", text);
  return 0;
}

static const char *const special[] = {"%tid.x",    "%ntid.x",   "%ctaid.x",  "%ctaid.y", "%ctaid.z",
                                      "%nctaid.x", "%nctaid.y", "%nctaid.z", NULL};

static int32_t take_value(parser *p, ptx_insn *i, const char *text) {
  for (int32_t s = 0; special[s] != NULL; s++) {
    if (strcmp(text, special[s]) == 0) {
      i->words |= PTX_SPECIAL;
      return add_constant(p, (uint64_t)s);
    }
  }
  if (text[0] == '%') {
    return find_register(p, text);
  }
  if (text[0] == '0' && (text[1] == 'f' || text[1] == 'd')) {
    return add_constant(p, strtoull(text + 2, NULL, 16));
  }
  if (isdigit((unsigned char)text[0]) || text[0] == '-') {
    return add_constant(p, (uint64_t)strtoll(text, NULL, 0));
  }
  for (int32_t s = 0; s < p->symbol_count; s++) {
    if (strcmp(text, p->symbols[s].name) == 0) {
      return add_constant(p, p->symbols[s].value);
    }
  }
  refuse(p, "no such operand", text);
  return 0;
}

/* [base] or [base+offset]. */
static int32_t take_address(parser *p, ptx_insn *i, char *text) {
  char *plus = strchr(text, '+');
  if (plus != NULL && i->op == PTX_CP) {
    refuse(p, "one offset for two addresses", text);
  } else if (plus != NULL) {
    *plus = '\0';
    i->offset = (int32_t)strtol(plus + 1, NULL, 10);
  }
  return take_value(p, i, text);
}

static void note_label(labels *l, const char *name, int32_t at) {
  l->all = grow(l->all, l->count, &l->capacity, sizeof *l->all);
  snprintf(l->all[l->count].name, sizeof l->all[0].name, "%s", name);
  l->all[l->count++].at = at;
}

/* Braces are ignored, since the number of operands says the same. */
static void take_operands(parser *p, ptx_insn *i, char *text) {
  char *rest = NULL;
  for (char *part = strtok_r(text, ",{} \t|", &rest); part != NULL; part = strtok_r(NULL, ",{} \t|", &rest)) {
    const size_t length = strlen(part);
    if (i->count == PTX_OPERANDS) {
      refuse(p, "too many operands", part);
      return;
    }
    if (i->op == PTX_BRA) {
      note_label(&p->used, part, p->entry->count);
    } else if (part[0] == '[') {
      part[length - 1] = '\0';
      i->at[i->count++] = take_address(p, i, part + 1);
    } else {
      i->at[i->count++] = take_value(p, i, part);
    }
  }
}

/* Returns how many operands are written; these come first. mov has as many as make up the operand on the other side. */
static int32_t results_of(const ptx_insn *i) {
  return i->op == PTX_ST || i->op == PTX_BAR || i->op == PTX_CP || i->op == PTX_BRA || i->op == PTX_RET ? 0
         : i->op == PTX_LDMATRIX || i->op == PTX_MMA                                                    ? 4
         : i->op == PTX_LD                                                                              ? i->width
         : i->op == PTX_SHFL                                                                            ? 2
                                                                                                        : 1;
}

static void take_instruction(parser *p, char *text, bool split) {
  ptx_entry *e = p->entry;
  ptx_insn i = {.guard = PTX_ALWAYS, .width = 1, .line = p->line};
  if (text[0] == '@') {
    char *end = text + strcspn(text, " \t");
    i.negated = text[1] == '!';
    *end = '\0';
    i.guard = find_register(p, text + 1 + i.negated);
    text = end + 1 + strspn(end + 1, " \t");
  }
  char *operands = text + strcspn(text, " \t");
  char *rest = *operands == '\0' ? operands : operands + 1;
  *operands = '\0';
  const char *unknown = ptx_take_opcode(&i, text);
  if (unknown != NULL) {
    refuse(p, "not known", unknown);
    return;
  }
  take_operands(p, &i, rest);
  i.results = (uint8_t)(split ? i.count - 1 : results_of(&i));
  e->collective = e->collective || i.op == PTX_BAR || i.op == PTX_SHFL || i.op == PTX_VOTE || i.op == PTX_MMA ||
                  i.op == PTX_LDMATRIX || i.op == PTX_CP || (i.words & PTX_SHARED) != 0;
  e->code = grow(e->code, e->count, &e->capacity, sizeof *e->code);
  e->code[e->count++] = i;
}

/* ---- lines ---- */

/* .reg .b32 %r<7>; or .reg .b16 %temp; */
static void take_registers(parser *p, const char *text) {
  bank *b = &p->banks[p->bank_count];
  char name[NAME];
  if (p->bank_count == (int32_t)(sizeof p->banks / sizeof *b) || sscanf(text, ".reg .%*s %255[^;]", name) != 1) {
    refuse(p, "registers", text);
    return;
  }
  char *count = strchr(name, '<');
  b->count = count == NULL ? 0 : (int32_t)strtol(count + 1, NULL, 10);
  name[count == NULL ? strcspn(name, " \t") : (size_t)(count - name)] = '\0';
  snprintf(b->prefix, sizeof b->prefix, "%.15s", name);
  for (int32_t i = 0; i < p->bank_count && b->count == 0; i++) {
    if (strcmp(p->banks[i].prefix, b->prefix) == 0) { /* declared in another scope too */
      return;
    }
  }
  b->first = p->entry->registers;
  p->entry->registers += b->count == 0 ? 1 : b->count;
  p->bank_count++;
}

/* .param or .shared .align 16 .b8 name[256] */
static void take_symbol(parser *p, const char *text, bool is_shared) {
  symbol *s = &p->symbols[p->symbol_count];
  unsigned align = 0, bytes = 0;
  if (p->symbol_count == SYMBOLS || sscanf(text, ".%*s .align %u .b8 %255[^[][%u]", &align, s->name, &bytes) != 3) {
    refuse(p, "memory", text);
    return;
  }
  ptx_entry *e = p->entry;
  if (is_shared) {
    e->shared_bytes = (e->shared_bytes + align - 1) / align * align;
    s->value = e->shared_bytes;
    e->shared_bytes += bytes;
  } else {
    s->value = 0;
    e->param_bytes = bytes;
  }
  p->symbol_count++;
}

static void begin_entry(parser *p, const char *text) {
  char name[NAME];
  ptx_entry *e = calloc(1, sizeof *e);
  if (e == NULL || sscanf(text, ".visible .entry %255[^(]", name) != 1) {
    abort();
  }
  e->name = strdup(name);
  e->next = p->module->first;
  p->module->first = e;
  p->entry = e;
  p->bank_count = p->symbol_count = p->defined.count = p->used.count = 0;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const label *)a)->name, ((const label *)b)->name);
}

static void end_entry(parser *p) {
  if (p->defined.count > 0) {
    qsort(p->defined.all, (size_t)p->defined.count, sizeof(label), by_name);
  }
  for (int32_t u = 0; u < p->used.count; u++) {
    const label *used = &p->used.all[u];
    const label *found =
        p->defined.count == 0 ? NULL : bsearch(used, p->defined.all, (size_t)p->defined.count, sizeof(label), by_name);
    if (found == NULL) {
      refuse(p, "no such label", used->name);
      return;
    }
    p->entry->code[used->at].target = found->at;
  }
}

static bool begins(const char *text, const char *with) {
  return strncmp(text, with, strlen(with)) == 0;
}

/* Takes a line without its comment and outer blanks. */
static void take_line(parser *p, char *text) {
  const size_t length = strlen(text);
  if (length == 0 || strcmp(text, "{") == 0 || strcmp(text, "}") == 0 || text[0] == ')' || begins(text, ".version") ||
      begins(text, ".target") || begins(text, ".address_size") || begins(text, ".pragma") ||
      begins(text, ".minnctapersm")) {
    return;
  }
  if (begins(text, ".visible .entry ")) {
    begin_entry(p, text);
  } else if (p->entry == NULL) {
    refuse(p, "outside of a kernel", text);
  } else if (begins(text, ".param ")) {
    take_symbol(p, text, false);
  } else if (begins(text, ".shared ")) {
    take_symbol(p, text, true);
  } else if (begins(text, ".maxntid ")) {
    p->entry->threads = (uint32_t)strtoul(text + 9, NULL, 10);
  } else if (begins(text, ".reg ")) {
    take_registers(p, text);
  } else if (text[0] == '$' && text[length - 1] == ':') {
    text[length - 1] = '\0';
    note_label(&p->defined, text, p->entry->count);
  } else if (text[0] == '.') {
    refuse(p, "no such directive", text);
  } else {
    const char *brace = strchr(text, '{');
    const bool split = brace != NULL && begins(text, "mov.") && strchr(text, ',') > brace;
    take_instruction(p, text, split);
  }
}

/* A line may have a scope's brace beside an instruction. */
static void take_statements(parser *p, char *text) {
  char *comment = strstr(text, "//");
  if (comment != NULL) {
    *comment = '\0';
  }
  char *rest = NULL;
  for (char *part = strtok_r(text, ";", &rest); part != NULL && !p->failed; part = strtok_r(NULL, ";", &rest)) {
    part += strspn(part, " \t\r");
    if (part[0] == '{' || (part[0] == '}' && part[1] != '\0')) {
      part += 1 + strspn(part + 1, " \t\r");
    }
    size_t length = strlen(part);
    while (length > 0 && isspace((unsigned char)part[length - 1])) {
      part[--length] = '\0';
    }
    take_line(p, part);
  }
}

static void describe(ptx_module *m) {
  size_t count = 0;
  for (ptx_entry *e = m->first; e != NULL; e = e->next) {
    count++;
    e->kernel = (cudasim_kernel){
        .name = e->name, .bytes = e->param_bytes, .threads = e->threads, .wait_at_barrier = e->collective};
  }
  m->kernels = calloc(count + 1, sizeof *m->kernels);
  if (m->kernels == NULL) {
    abort();
  }
  for (ptx_entry *e = m->first; e != NULL; e = e->next) {
    m->kernels[--count] = &e->kernel;
  }
  m->image = (cudasim_image){0, m->kernels};
}

ptx_module *ptx_parse(const char *text, char *why, size_t why_bytes) {
  parser *p = calloc(1, sizeof *p);
  ptx_module *m = calloc(1, sizeof *m);
  if (p == NULL || m == NULL) {
    abort();
  }
  *p = (parser){.module = m, .why = why, .why_bytes = why_bytes};
  while (*text != '\0' && !p->failed) {
    const size_t length = strcspn(text, "\n");
    char *line = strndup(text, length);
    p->line++;
    if (p->entry != NULL && line[0] == '}') { /* the entry's end; braces of scopes are indented */
      end_entry(p);
    }
    take_statements(p, line);
    free(line);
    text += length + (text[length] == '\n');
  }
  describe(m);
  free(p->defined.all);
  free(p->used.all);
  if (p->failed) {
    ptx_free(m);
    m = NULL;
  }
  free(p);
  return m;
}

void ptx_free(ptx_module *module) {
  while (module->first != NULL) {
    ptx_entry *next = module->first->next;
    free(module->first->name);
    free(module->first->code);
    free(module->first->constants);
    free(module->first);
    module->first = next;
  }
  free(module->kernels);
  free(module);
}
