/* In the trie of bin n, all sizes below a node of depth d share its bits above the lowest n - d. */
#include "device/block_tree.h"

#include "device/block_list.h"

static int bin_of(size_t bytes) {
  return 63 - __builtin_clzll((unsigned long long)(bytes / DC__BLOCK_ALIGNMENT));
}

/* The size's bits below its highest one, moved to the top of the word. */
static uint64_t path_of(size_t bytes) {
  uint64_t units = bytes / DC__BLOCK_ALIGNMENT;
  return units << __builtin_clzll(units) << 1;
}

static void tree_insert(dc__arena_block **link, dc__arena_block *b) {
  *link = b;
  b->node.link = link;
}

void dc__block_tree_add(dc__block_tree *tree, dc__arena_block *b) {
  int bin = bin_of(b->bytes);
  uint64_t path = path_of(b->bytes);
  dc__arena_block **link = &tree->bins[bin];
  tree->filled |= UINT64_C(1) << bin;
  while (*link != NULL && (*link)->bytes != b->bytes) {
    link = &(*link)->node.child[path >> 63];
    path <<= 1;
  }
  dc__arena_block *first = *link;
  b->node = (dc__block_node){.later = b, .earlier = b};
  if (first == NULL) {
    tree_insert(link, b);
    return;
  }
  b->node.later = first;
  b->node.earlier = first->node.earlier;
  first->node.earlier->node.later = b;
  first->node.earlier = b;
}

/* Removes and returns a leaf below `top`, which may replace any node above it; NULL if there is none. */
static dc__arena_block *tree_remove_leaf(dc__arena_block *top) {
  dc__arena_block *leaf = top;
  for (dc__arena_block *next = top; next != NULL; next = leaf->node.child[leaf->node.child[0] == NULL]) {
    leaf = next;
  }
  if (leaf == top) {
    return NULL;
  }
  *leaf->node.link = NULL;
  return leaf;
}

void dc__block_tree_remove(dc__block_tree *tree, dc__arena_block *b) {
  dc__arena_block *successor = b->node.later;
  successor->node.earlier = b->node.earlier;
  b->node.earlier->node.later = successor;
  if (b->node.link == NULL) {
    return;
  }
  if (successor == b) {
    successor = tree_remove_leaf(b);
  }
  *b->node.link = successor;
  if (successor == NULL) {
    int bin = bin_of(b->bytes);
    tree->filled &= ~((uint64_t)(tree->bins[bin] == NULL) << bin);
    return;
  }
  successor->node.link = b->node.link;
  for (int i = 0; i < 2; i++) {
    successor->node.child[i] = NULL;
    if (b->node.child[i] != NULL) {
      tree_insert(&successor->node.child[i], b->node.child[i]);
    }
  }
}

static dc__arena_block *tree_smaller(dc__arena_block *a, dc__arena_block *b, size_t bytes) {
  return b->bytes >= bytes && (a == NULL || b->bytes < a->bytes) ? b : a;
}

/* The best fit at or below a node. Sizes below the left child are smaller than those below the right one. */
static dc__arena_block *tree_leftmost(dc__arena_block *at, dc__arena_block *best, size_t bytes) {
  while (at != NULL) {
    best = tree_smaller(best, at, bytes);
    at = at->node.child[at->node.child[0] == NULL];
  }
  return best;
}

/* Follows the size's own bits. Where they turn left, all sizes to the right are larger; those of the last turn are
 * closest. */
static dc__arena_block *tree_best_in_bin(dc__arena_block *at, size_t bytes) {
  dc__arena_block *best = NULL, *larger = NULL;
  for (uint64_t path = path_of(bytes); at != NULL; path <<= 1) {
    best = tree_smaller(best, at, bytes);
    if (at->bytes == bytes) {
      return at;
    }
    if (path >> 63 == 0 && at->node.child[1] != NULL) {
      larger = at->node.child[1];
    }
    at = at->node.child[path >> 63];
  }
  return tree_leftmost(larger, best, bytes);
}

dc__arena_block *dc__block_tree_best_fit(const dc__block_tree *tree, size_t bytes, bool last) {
  int bin = bin_of(bytes);
  dc__arena_block *best = tree_best_in_bin(tree->bins[bin], bytes);
  uint64_t larger = bin == DC__BLOCK_BINS - 1 ? 0 : tree->filled >> (bin + 1) << (bin + 1);
  if (best == NULL && larger != 0) {
    best = tree_leftmost(tree->bins[__builtin_ctzll(larger)], NULL, bytes);
  }
  return best != NULL && last ? best->node.earlier : best;
}
