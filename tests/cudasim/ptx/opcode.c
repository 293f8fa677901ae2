/* An opcode and its words: the known part of PTX. */
#include <string.h>

#include "ptx.h"

static const char *const op_names[] = {
#define X(name, text) text,
    PTX_OPS(X)
#undef X
};

const char *ptx_op_name(int op) {
  return op_names[op];
}

typedef struct word {
  const char *text;
  int value;
} word;

static const word types[] = {{"pred", PTX_PRED},   {"b8", PTX_B8},     {"b16", PTX_B16},       {"b32", PTX_B32},
                             {"b64", PTX_B64},     {"u8", PTX_U8},     {"u16", PTX_U16},       {"u32", PTX_U32},
                             {"u64", PTX_U64},     {"s8", PTX_S8},     {"s16", PTX_S16},       {"s32", PTX_S32},
                             {"s64", PTX_S64},     {"f16", PTX_F16},   {"f32", PTX_F32},       {"f64", PTX_F64},
                             {"f16x2", PTX_F16X2}, {"bf16", PTX_BF16}, {"bf16x2", PTX_BF16X2}, {NULL, 0}};
static const word compares[] = {{"eq", PTX_EQ},   {"ne", PTX_NE},   {"lt", PTX_LT},   {"le", PTX_LE},
                                {"gt", PTX_GT},   {"ge", PTX_GE},   {"equ", PTX_EQU}, {"neu", PTX_NEU},
                                {"ltu", PTX_LTU}, {"leu", PTX_LEU}, {"gtu", PTX_GTU}, {"geu", PTX_GEU},
                                {"nan", PTX_NAN}, {NULL, 0}};
static const word words[] = {{"wide", PTX_WIDE},         {"shared", PTX_SHARED}, {"param", PTX_PARAM},
                             {"trans", PTX_TRANS},       {"approx", PTX_APPROX}, {"rzi", PTX_RZI},
                             {"warp", PTX_WARP_BARRIER}, {"wait_all", PTX_WAIT}, {NULL, 0}};
/* Words for what is assumed anyway. */
static const char *const plain_words[] = {"rn",  "lo",       "to",  "global", "uni",    "sync", "aligned",
                                          "ftz", "async",    "cg",  "idx",    "ballot", "max",  "m8n8",
                                          "x4",  "m16n8k16", "row", "col",    NULL};

static const word *find_word(const word *table, const char *text) {
  while (table->text != NULL && strcmp(table->text, text) != 0) {
    table++;
  }
  return table->text == NULL ? NULL : table;
}

static bool is_plain(const char *text) {
  for (const char *const *plain = plain_words; *plain != NULL; plain++) {
    if (strcmp(*plain, text) == 0) {
      return true;
    }
  }
  return false;
}

/* Returns false if the word is not known. */
static bool take_word(ptx_insn *i, const char *text) {
  const word *found = i->op == PTX_SETP ? find_word(compares, text) : NULL;
  if (found != NULL) {
    i->compare = (uint8_t)found->value;
  } else if ((found = find_word(types, text)) != NULL) {
    if (i->op == PTX_MMA) { /* the operands' types stand between those of the sums */
      i->from = found->value == PTX_F32 ? i->from : (uint8_t)found->value;
      i->type = PTX_F32;
    } else if (i->type == PTX_NONE) {
      i->type = (uint8_t)found->value;
    } else {
      i->from = (uint8_t)found->value;
    }
  } else if ((found = find_word(words, text)) != NULL) {
    i->words |= (uint16_t)found->value;
  } else if (strcmp(text, "v2") == 0 || strcmp(text, "v4") == 0) {
    i->width = (uint8_t)(text[1] - '0');
  } else {
    return is_plain(text);
  }
  return true;
}

const char *ptx_take_opcode(ptx_insn *i, char *text) {
  char *rest = NULL;
  const char *part = strtok_r(text, ".", &rest);
  int op = 0;
  while (op < PTX_OP_COUNT && strcmp(op_names[op], part) != 0) {
    op++;
  }
  if (op == PTX_OP_COUNT) {
    return part;
  }
  i->op = (uint8_t)op;
  while ((part = strtok_r(NULL, ".", &rest)) != NULL) {
    if (!take_word(i, part)) {
      return part;
    }
  }
  return NULL;
}
