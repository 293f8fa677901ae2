/* Gather, wait, release, take, persistence, update of the weights, invalidation and cleanup, for PARAMS parameters. Two
 * graphs share them, so that two users release them. N ranks make the same calls, each with a host thread, the caller's
 * stream and the gather stream. Calls go on for ever, in any order.
 *
 * Modelled, by name:
 *   dc__gather (gather_missing, open_copy, start), dc__gather_wait, dc__gather_release, dc__gather_take,
 *   dc__gather_free, drop_copy                                             runtime/gather.c, copies.c
 *   set_persistent, clear_persistent, invalidate, clear_all, raise_version api/params.c
 *   abort_step                                                             api/context.c
 *   dc__graph_register, as far as DRAIN needs it                           runtime/graphs.c
 *   dc__wait_for_caller, dc__context_synchronize, dc__unless_passed                         runtime/context.c
 *   dc__arena_alloc, dc__arena_free                                        device/arena.c
 * A block is used again after the events it was freed with. Of a collective, the model has what comm.h promises and
 * comm.pml shows. It moves when all ranks have joined, and ends for a rank when the others have read that rank's data.
 *
 * A call is one step, except where it waits: its work on queues and blocks is under their locks.
 *
 * An event is where its stream's queue ended when it was recorded: the number of tasks still before it, counted down
 * as they end. A block's content is the parameter and version written into it, or nothing: while it is written, and
 * once it is free.
 *
 * Asserted: a reader of a gathered parameter finds it whole, of the version that was current when its rank gathered it,
 * in a block that has no other owner. A gather writes no block that was released. A rank that gathers finds every
 * rank's shard of that version. Every row of param_table.h is taken. Spin adds: no rank waits for ever, and after a
 * failure every rank comes to its end (`ends`).
 *
 * Parameters: N, PARAMS, BLOCKS, QUEUE, MUTANT, and the bits ABORT, KEPT_FIRST (the first parameter was registered
 * persistent) and FEW (only the calls that ranks meet in); LIMIT is how many calls a rank makes, 0: no limit.
 */
mtype = { NONE, NONE_KEPT, CURRENT, CURRENT_USED, CURRENT_HALF, CURRENT_KEPT, CURRENT_KEPT_USED, CURRENT_KEPT_HALF,
          STALE, STALE_USED, STALE_HALF, STALE_KEPT, STALE_KEPT_USED, STALE_KEPT_HALF,
          GATHER, WAIT, RELEASE_OF_2, RELEASE_OF_1, TAKE, UPDATE, INVALIDATE, CLEAR_ALL, KEEP, KEEP_NOT, ABORT_STEP,
          USE, DRAIN, OK, STATE, INVALID };
#define HAS(x) ((x) != NONE && (x) != NONE_KEPT)
#define IS_CURRENT(x) \
  ((x) == CURRENT || (x) == CURRENT_USED || (x) == CURRENT_HALF || \
   (x) == CURRENT_KEPT || (x) == CURRENT_KEPT_USED || (x) == CURRENT_KEPT_HALF)
#define TAG(p, v) ((p) * 3 + (v) + 1) /* versions count modulo 3: at most two exist at a time */
#define NO_OWNER 255

#define AT(r, i) ((r) * QUEUE + (i))
#define OF(r, p) ((r) * PARAMS + (p))
#define BLOCK(r, b) ((r) * BLOCKS + (b))

/* The caller's stream: waits for the gather stream (the first `left` of its tasks), then may read; writes shards. */
mtype:task = { AWAIT, READ_COPY, WRITE };
mtype:task caller_kind[N * QUEUE];
byte caller_param[N * QUEUE], caller_block[N * QUEUE], caller_version[N * QUEUE], caller_left[N * QUEUE];
byte caller_length[N];
/* The gather stream: each task is after `left` tasks of the caller's. */
byte gather_param[N * QUEUE], gather_block[N * QUEUE], gather_version[N * QUEUE], gather_left[N * QUEUE];
byte gather_length[N];

byte ready[N * PARAMS];                                  /* the copy's event: tasks of the gather stream before it */
byte owner[N * BLOCKS];                                  /* NO_OWNER: free, or waits for these two */
byte after_gather[N * BLOCKS], after_caller[N * BLOCKS];
byte content[N * BLOCKS], shard[N * PARAMS];
bit posted[N], moved[N]; /* of the collective under way, counted modulo 2 */
bool failed, ended[N];
chan calls[N] = [1] of { mtype, byte };

#include "rows.pml"

/* ---- streams ---- */

/* A block that can be used again holds nothing: a read of it is a fault even before the next write. */
#define REUSABLE(b) \
  (owner[BLOCK(me, b)] == NO_OWNER && after_gather[BLOCK(me, b)] == 0 && after_caller[BLOCK(me, b)] == 0)

inline pop_caller() {
  d_step {
    i = 0;
    do
    :: i + 1 < QUEUE ->
       caller_kind[AT(me, i)] = caller_kind[AT(me, i + 1)];
       caller_param[AT(me, i)] = caller_param[AT(me, i + 1)];
       caller_block[AT(me, i)] = caller_block[AT(me, i + 1)];
       caller_version[AT(me, i)] = caller_version[AT(me, i + 1)];
       caller_left[AT(me, i)] = caller_left[AT(me, i + 1)];
       i++
    :: else -> break
    od;
    caller_kind[AT(me, i)] = 0; caller_param[AT(me, i)] = 0; caller_block[AT(me, i)] = 0;
    caller_version[AT(me, i)] = 0; caller_left[AT(me, i)] = 0;
    caller_length[me]--;
    i = 0;
    do
    :: i < QUEUE -> gather_left[AT(me, i)] = (gather_left[AT(me, i)] > 0 -> gather_left[AT(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < BLOCKS ->
       after_caller[BLOCK(me, i)] = (after_caller[BLOCK(me, i)] > 0 -> after_caller[BLOCK(me, i)] - 1 : 0);
       content[BLOCK(me, i)] = (REUSABLE(i) -> 0 : content[BLOCK(me, i)]);
       i++
    :: else -> break
    od;
    i = 0
  }
}

inline pop_gather() {
  d_step {
    i = 0;
    do
    :: i + 1 < QUEUE ->
       gather_param[AT(me, i)] = gather_param[AT(me, i + 1)];
       gather_block[AT(me, i)] = gather_block[AT(me, i + 1)];
       gather_version[AT(me, i)] = gather_version[AT(me, i + 1)];
       gather_left[AT(me, i)] = gather_left[AT(me, i + 1)];
       i++
    :: else -> break
    od;
    gather_param[AT(me, i)] = 0; gather_block[AT(me, i)] = 0; gather_version[AT(me, i)] = 0; gather_left[AT(me, i)] = 0;
    gather_length[me]--;
    i = 0;
    do
    :: i < QUEUE -> caller_left[AT(me, i)] = (caller_left[AT(me, i)] > 0 -> caller_left[AT(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < PARAMS -> ready[OF(me, i)] = (ready[OF(me, i)] > 0 -> ready[OF(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < BLOCKS ->
       after_gather[BLOCK(me, i)] = (after_gather[BLOCK(me, i)] > 0 -> after_gather[BLOCK(me, i)] - 1 : 0);
       content[BLOCK(me, i)] = (REUSABLE(i) -> 0 : content[BLOCK(me, i)]);
       i++
    :: else -> break
    od;
    i = 0
  }
}

#define SOUND \
  (content[BLOCK(me, caller_block[AT(me, 0)])] == TAG(caller_param[AT(me, 0)], caller_version[AT(me, 0)]) || failed)

proctype caller(byte me) {
  byte i;
end:
  do
  :: caller_length[me] > 0 ->
     if
     :: atomic { caller_left[AT(me, 0)] == 0 || MUTANT == 5 -> skip }
     fi;
     if
     :: caller_kind[AT(me, 0)] == AWAIT
     :: caller_kind[AT(me, 0)] == READ_COPY -> /* it takes time */
        assert(SOUND);
        assert(SOUND)
     :: caller_kind[AT(me, 0)] == WRITE -> shard[OF(me, caller_param[AT(me, 0)])] = caller_version[AT(me, 0)]
     fi;
     pop_caller()
  od
}

#if N == 1
#define ALL(flag, value) (flag[0] == value)
#elif N == 2
#define ALL(flag, value) (flag[0] == value && flag[1] == value)
#else
#define ALL(flag, value) (flag[0] == value && flag[1] == value && flag[2] == value)
#endif
/* A failed group waits for no rank. Posted and moved alternate, so no rank is a whole collective ahead. */
#define GIVEN_UP (failed && MUTANT != 7)

proctype gatherer(byte me) {
  byte i;
  bit turn;
end:
  do
  :: gather_length[me] > 0 && (gather_left[AT(me, 0)] == 0 || MUTANT == 3) ->
     turn = 1 - turn;
     posted[me] = turn;
     if
     :: ALL(posted, turn) ->
        content[BLOCK(me, gather_block[AT(me, 0)])] = 0;
        i = 0;
        do
        :: i < N -> assert(shard[OF(i, gather_param[AT(me, 0)])] == gather_version[AT(me, 0)] || failed); i++
        :: else -> break
        od;
        i = 0;
        assert(!REUSABLE(gather_block[AT(me, 0)]));
        content[BLOCK(me, gather_block[AT(me, 0)])] = TAG(gather_param[AT(me, 0)], gather_version[AT(me, 0)]);
        moved[me] = turn;
        if
        :: ALL(moved, turn) || MUTANT == 6
        :: GIVEN_UP
        fi
     :: GIVEN_UP
     fi;
     pop_gather()
  od
}

/* ---- the host's calls ---- */

inline push_caller(kind, block, left) {
  d_step {
    caller_kind[AT(me, caller_length[me])] = kind;
    caller_param[AT(me, caller_length[me])] = p;
    caller_block[AT(me, caller_length[me])] = block;
    caller_version[AT(me, caller_length[me])] = version[p];
    caller_left[AT(me, caller_length[me])] = left;
    caller_length[me]++
  }
}

#define ROOM (caller_length[me] < QUEUE && gather_length[me] < QUEUE)

/* Looks the call up; the two states then say what has to be done. */
inline look_up(e) {
  d_step {
    before = s[p];
    if
#define ROW(from, call, outcome, to) :: (s[p] == from && e == call) -> s[p] = to; result = outcome; SEEN(__COUNTER__)
#include "param_table.h"
#undef ROW
    :: else -> assert(false)
    fi
  }
}

/* Takes a block. Where the arena would ask the system for more, the model waits. */
inline allocate() {
  if
  :: atomic { REUSABLE(0) -> where[p] = 0 }
#if BLOCKS > 1
  :: atomic { REUSABLE(1) -> where[p] = 1 }
#endif
#if BLOCKS > 2
  :: atomic { REUSABLE(2) -> where[p] = 2 }
#endif
  fi;
  owner[BLOCK(me, where[p])] = p
}

inline start_gather() {
  if
  :: !HAS(before) -> allocate()
  :: else
  fi;
  d_step {
    gather_param[AT(me, gather_length[me])] = p;
    gather_block[AT(me, gather_length[me])] = where[p];
    gather_version[AT(me, gather_length[me])] = version[p];
    gather_left[AT(me, gather_length[me])] = caller_length[me];
    gather_length[me]++;
    ready[OF(me, p)] = gather_length[me];
    awaited[p] = false
  }
}

inline drop() {
  d_step {
    owner[BLOCK(me, where[p])] = NO_OWNER;
    after_gather[BLOCK(me, where[p])] = (MUTANT == 2 -> 0 : ready[OF(me, p)]);
    after_caller[BLOCK(me, where[p])] = (MUTANT == 1 -> 0 : caller_length[me]);
    content[BLOCK(me, where[p])] = (REUSABLE(where[p]) -> 0 : content[BLOCK(me, where[p])]);
    where[p] = 0
  }
}

inline synchronize() {
  if
  :: caller_length[me] == 0 && gather_length[me] == 0
  fi
}

inline carry_out() {
  if
  :: result != OK
  :: result == OK ->
     if
     :: (call == GATHER || call == KEEP || call == USE) && !IS_CURRENT(before) -> start_gather()
     :: call == TAKE && HAS(before) && !HAS(s[p]) -> /* owned by the caller, which frees it when all is done */
        if
        :: IS_CURRENT(before) -> push_caller(READ_COPY, where[p], ready[OF(me, p)])
        :: else -> push_caller(AWAIT, 0, ready[OF(me, p)])
        fi;
        synchronize();
        d_step {
          owner[BLOCK(me, where[p])] = NO_OWNER; content[BLOCK(me, where[p])] = 0; where[p] = 0; awaited[p] = true
        }
     :: call != TAKE && HAS(before) && !HAS(s[p]) -> drop()
     :: else
     fi
  fi;
  if
  :: call == USE -> /* gather, wait, compute */
     push_caller(READ_COPY, where[p], ready[OF(me, p)]);
     awaited[p] = true
  :: call == WAIT && result == OK -> push_caller(AWAIT, 0, ready[OF(me, p)]); awaited[p] = true
  :: call == UPDATE -> /* the optimizer's kernel, and dc_context_params_updated */
     d_step { version[p] = (version[p] + 1) % 3 };
     push_caller(WRITE, 0, 0)
  :: else
  fi
}

inline select_param() {
  if
  :: p = 0
#if PARAMS > 1
  :: p = 1
#endif
  fi
}

/* Legal: weights are written after a wait for the gathers that read them; stale weights are not computed with. */
inline choose() {
  select_param();
  if
  :: call = USE
  :: call = GATHER
  :: call = RELEASE_OF_1
  :: awaited[p] -> call = UPDATE
  :: call = INVALIDATE
#if !FEW
  :: call = WAIT
  :: call = RELEASE_OF_2
  :: call = TAKE
  :: call = CLEAR_ALL
  :: call = KEEP
  :: call = KEEP_NOT
  :: call = ABORT_STEP
  :: call = DRAIN
#endif
  fi
}

inline perform() {
  if
  :: call == CLEAR_ALL || call == ABORT_STEP -> /* for all parameters */
     if
     :: call == ABORT_STEP -> synchronize()
     :: else
     fi;
     p = 0;
     do
     :: p < PARAMS -> look_up(call); carry_out(); p++
     :: else -> break
     od;
     p = 0
  :: call == DRAIN -> /* as in registering a graph: afterwards nothing is in progress */
     synchronize();
     awaited[0] = true;
#if PARAMS > 1
     awaited[1] = true
#endif
  :: call == USE -> look_up(GATHER); carry_out(); look_up(WAIT)
  :: call == UPDATE && MUTANT == 4 -> result = OK; before = s[p]; carry_out()
  :: else -> look_up(call); carry_out()
  fi;
  d_step { before = 0; result = 0; call = 0; p = 0 }
}

proctype host(byte me) {
  mtype s[PARAMS], before, call, result;
  byte p, i, where[PARAMS], version[PARAMS], count;
  bool awaited[PARAMS];
  d_step {
    do
    :: i < PARAMS -> s[i] = (i == 0 && KEPT_FIRST -> NONE_KEPT : NONE); awaited[i] = true; i++
    :: else -> break
    od;
    i = 0
  };
  do
  :: !failed && ROOM && (LIMIT == 0 || count < LIMIT) ->
     if
     :: me == 0 ->
        atomic { choose() };
        do
        :: i + 1 < N ->
           i++;
           if
           :: calls[i]!call, p
           :: failed
           fi
        :: else -> break
        od;
        i = 0;
        atomic { perform() }
     :: me > 0 ->
        if
        :: atomic { calls[me]?call, p -> perform() }
        :: failed
        fi
     fi;
     count = (LIMIT > 0 -> count + 1 : 0)
  :: failed || (LIMIT > 0 && count == LIMIT) -> break
  od;
  synchronize(); /* dc__context_cleanup drains */
  ended[me] = true
}

proctype aborter() {
  if
  :: true -> failed = true
  :: LIMIT > 0
  fi
}

init {
  atomic {
    byte r;
    START_COUNTING;
    do
    :: r < N * BLOCKS -> owner[r] = NO_OWNER; r++
    :: else -> break
    od;
    r = 0;
    do
    :: r < N -> run host(r); run caller(r); run gatherer(r); r++
    :: else -> break
    od;
    if :: ABORT -> run aborter() :: else fi
  }
}

ltl ends { <> ALL(ended, true) }
