/* Blocks by size, for the best fit in as many steps as a size has bits. Bins by powers of two; in a bin a binary trie
 * over the size's lower bits, as in Lea's allocator (dlmalloc, tree bins). Each size has one node in it; blocks of one
 * size form a ring, in the order in which they were added. */
#ifndef DC_DEVICE_BLOCK_TREE_H
#define DC_DEVICE_BLOCK_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DC__BLOCK_ALIGNMENT = 256, DC__BLOCK_BINS = 64 };

typedef struct dc__arena_block dc__arena_block; /* block_list.h */

/* A block's place in a tree. */
typedef struct dc__block_node {
  dc__arena_block *child[2];
  dc__arena_block **link;           /* what points to it, if it is the node of its size; else NULL */
  dc__arena_block *later, *earlier; /* of its size, in a ring */
} dc__block_node;

typedef struct dc__block_tree {
  dc__arena_block *bins[DC__BLOCK_BINS]; /* blocks of [2^n, 2^(n+1)) * DC__BLOCK_ALIGNMENT bytes */
  uint64_t filled;                       /* bit n: bins[n] has blocks */
} dc__block_tree;

void dc__block_tree_add(dc__block_tree *tree, dc__arena_block *b);
void dc__block_tree_remove(dc__block_tree *tree, dc__arena_block *b);
/* The block added last, or first, of the smallest size that is large enough; NULL if there is none. */
dc__arena_block *dc__block_tree_best_fit(const dc__block_tree *tree, size_t bytes, bool last);

#endif
