/* Votes on a failure in a group whose ranks are not all connected (failure.c): neighbours tell each other the best vote
 * that they know, and which ranks have voted. In a mesh each rank's vote reaches all at once, and nothing is passed. */
#include <string.h>

#include "comm/tcp/overlay/overlay.h"

enum { TOLD_AT_ONCE = 4 /* neighbours; the others then get newer votes, too */ };

/* Notes that neighbours do not know all votes yet. */
static void note_news(dc__tcp_group *group) {
  group->told = (dc__rank_set){{0}};
  group->votes_grew = true;
}

/* Counts this rank and ranks that have ended as having voted. */
static void add_own_votes(dc__tcp_group *group) {
  for (int32_t r = 0; r < group->world; r++) {
    if ((r == group->rank || atomic_load(&group->closed[r]) != 0) && !dc__rank_set_has(&group->votes, r)) {
      dc__rank_set_add(&group->votes, r);
      note_news(group);
    }
  }
  group->vote.votes = group->votes;
}

/* Sends the votes to at most `most` neighbours that do not know them. */
static void pass_votes_to(dc__tcp_group *group, int32_t most) {
  const int32_t first = group->next_told;
  group->pass_ns = dc__now_ns() + DC__TCP_PASS_NS;
  add_own_votes(group);
  for (int32_t i = 0; i < group->world && most > 0; i++) {
    const int32_t r = (first + i) % group->world;
    if (group->control[r] >= 0 && !dc__rank_set_has(&group->told, r)) {
      dc__tcp_send_directly(group, r, &group->vote);
      dc__rank_set_add(&group->told, r);
      group->next_told = (r + 1) % group->world;
      most--;
    }
  }
  group->votes_grew = most == 0; /* there may be more of them */
}

void dc__tcp_pass_votes(dc__tcp_group *group) {
  if (group->overlay && group->voted) {
    add_own_votes(group);
    if (group->votes_grew && dc__now_ns() >= group->pass_ns) {
      pass_votes_to(group, TOLD_AT_ONCE);
    }
  }
}

void dc__tcp_pass_votes_to_all(dc__tcp_group *group) {
  if (group->overlay) {
    pass_votes_to(group, group->world);
  }
}

void dc__tcp_begin_votes(dc__tcp_group *group, const dc__tcp_control_msg *vote) {
  if (group->overlay) {
    dc__rank_set_unite(&group->votes, &vote->votes);
    add_own_votes(group);
    memset(&group->told, 0xff, sizeof group->told); /* the vote goes to all */
    group->votes_grew = false;
  }
}

void dc__tcp_merge_votes(dc__tcp_group *group, int32_t r, const dc__tcp_control_msg *vote) {
  if (!group->overlay) {
    return;
  }
  uint64_t news = dc__tcp_vote_outranks(vote, &group->vote), lacks = dc__tcp_vote_outranks(&group->vote, vote);
  for (int32_t i = 0; i < DC__RANK_WORDS; i++) {
    news |= vote->votes.words[i] & ~group->votes.words[i];
    lacks |= group->votes.words[i] & ~vote->votes.words[i];
  }
  dc__rank_set_unite(&group->votes, &vote->votes);
  if (news != 0) {
    note_news(group);
  }
  if (lacks == 0) {
    dc__rank_set_add(&group->told, r);
  }
}
