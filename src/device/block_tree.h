/* Blocks by size. A search for the best fit takes at most as many steps as a size has bits. There is one bin for each
 * power of two, with a binary trie over the sizes' lower bits, as in Lea's allocator (dlmalloc, tree bins). Each size
 * has one node in the trie; blocks of one size form a ring, in the order in which they were added. */
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
  dc__arena_block **link;           /* the pointer to it, if it is its size's node in the trie; else NULL */
  dc__arena_block *later, *earlier; /* in the ring of its size */
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
