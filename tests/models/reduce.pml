/* One parameter's gradients in the buckets of two types, two each, on N ranks that make the same
 * calls. Each rank has a host thread, the caller's stream, which copies a gradient into a slot, and the reduce stream.
 * A bucket holds one gradient here, so that the next one flushes it. One of its type needs the space; one of the other
 * type must not overtake it. The end of a backward comes after every third, and the step goes on for ever.
 *
 * Modelled, by name:
 *   put_in_bucket, open_slot, combine, flush, dc__reduce_finish   runtime/reduce.c
 *   dc__wait_for_caller, dc__event_wait                              runtime/context.c, device.h
 * and of a collective what comm.h promises, as in gather.pml, where events are explained.
 *
 * Asserted: a rank that reduces finds the right gradient in every rank's slot, from beginning to end. When a backward
 * has ended, every gradient has arrived, in order. Spin adds: no rank waits for ever, and after a failure every rank
 * comes to its end (`ends`). Parameters: N, QUEUE, MUTANT, the bit ABORT; LIMIT is how many gradients, 0: no limit. */
#define AT(r, i) ((r) * QUEUE + (i))
#define SLOT(r, h) ((r) * 4 + (h))
#define NEXT(k) ((k) % 7 + 1) /* gradients count 1 to 7, and again: at most four exist at a time */
#define TYPE(k) ((k) == 2 || (k) == 6) /* of each; there are three of one type in a row, and every change of types */

byte copy_half[N * QUEUE], copy_which[N * QUEUE], copy_left[N * QUEUE];
byte copies[N]; /* length of the caller's stream */
byte reduce_half[N * QUEUE], reduce_which[N * QUEUE], reduce_left[N * QUEUE];
byte reductions[N];
byte done[N * 4]; /* a bucket's latest reduction: tasks of the reduce stream before its end */
byte slot[N * 4], arrived[N];
bit posted[N], moved[N];
bool failed, ended[N];

inline pop_copy() {
  d_step {
    i = 0;
    do
    :: i + 1 < QUEUE ->
       copy_half[AT(me, i)] = copy_half[AT(me, i + 1)];
       copy_which[AT(me, i)] = copy_which[AT(me, i + 1)];
       copy_left[AT(me, i)] = copy_left[AT(me, i + 1)];
       i++
    :: else -> break
    od;
    copy_half[AT(me, i)] = 0; copy_which[AT(me, i)] = 0; copy_left[AT(me, i)] = 0;
    copies[me]--;
    i = 0;
    do
    :: i < QUEUE -> reduce_left[AT(me, i)] = (reduce_left[AT(me, i)] > 0 -> reduce_left[AT(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0
  }
}

inline pop_reduction() {
  d_step {
    i = 0;
    do
    :: i + 1 < QUEUE ->
       reduce_half[AT(me, i)] = reduce_half[AT(me, i + 1)];
       reduce_which[AT(me, i)] = reduce_which[AT(me, i + 1)];
       reduce_left[AT(me, i)] = reduce_left[AT(me, i + 1)];
       i++
    :: else -> break
    od;
    reduce_half[AT(me, i)] = 0; reduce_which[AT(me, i)] = 0; reduce_left[AT(me, i)] = 0;
    reductions[me]--;
    i = 0;
    do
    :: i < QUEUE -> copy_left[AT(me, i)] = (copy_left[AT(me, i)] > 0 -> copy_left[AT(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < 4 -> done[SLOT(me, i)] = (done[SLOT(me, i)] > 0 -> done[SLOT(me, i)] - 1 : 0); i++
    :: else -> break
    od;
    i = 0
  }
}

proctype caller(byte me) {
  byte i;
end:
  do
  :: copies[me] > 0 && (copy_left[AT(me, 0)] == 0 || MUTANT == 1) ->
     slot[SLOT(me, copy_half[AT(me, 0)])] = copy_which[AT(me, 0)];
     pop_copy()
  od
}

#if N == 2
#define ALL(flag, value) (flag[0] == value && flag[1] == value)
#else
#define ALL(flag, value) (flag[0] == value && flag[1] == value && flag[2] == value)
#endif
#define GIVEN_UP (failed && MUTANT != 5)

inline check_reduced() {
  i = 0;
  do
  :: i < N -> assert(slot[SLOT(i, reduce_half[AT(me, 0)])] == reduce_which[AT(me, 0)] || failed); i++
  :: else -> break
  od;
  i = 0
}

proctype reducer(byte me) {
  byte i;
  bit turn;
end:
  do
  :: reductions[me] > 0 && (reduce_left[AT(me, 0)] == 0 || MUTANT == 2) ->
     turn = 1 - turn;
     posted[me] = turn;
     if
     :: ALL(posted, turn) ->
        check_reduced();
        check_reduced(); /* it takes time */
        assert(NEXT(arrived[me]) == reduce_which[AT(me, 0)] || failed);
        arrived[me] = reduce_which[AT(me, 0)];
        moved[me] = turn;
        if
        :: ALL(moved, turn) || MUTANT == 4
        :: GIVEN_UP
        fi
     :: GIVEN_UP
     fi;
     pop_reduction()
  od
}

/* Of one type: its bucket is 2 * type + filling[type]. */
inline flush(type) {
  if
  :: waits[type] != 0 ->
     reductions[me] < QUEUE;
     d_step {
       reduce_half[AT(me, reductions[me])] = 2 * type + filling[type];
       reduce_which[AT(me, reductions[me])] = waits[type];
       reduce_left[AT(me, reductions[me])] = copies[me];
       reductions[me]++;
       done[SLOT(me, 2 * type + filling[type])] = reductions[me];
       filling[type] = 1 - filling[type];
       waits[type] = 0
     }
  :: else
  fi
}

/* A flush comes at the same gradient on every rank: the ends of backwards are at every third. */
proctype host(byte me) {
  byte which, count, since;
  bit filling[2];
  byte waits[2]; /* by type: the gradient in the filling bucket; 0: none */
  do
  :: !failed && (LIMIT == 0 || count < LIMIT) ->
     if
     :: MUTANT != 6 -> flush((1 - TYPE(NEXT(which))))
     :: else
     fi;
     flush(TYPE(NEXT(which)));
     copies[me] < QUEUE;
     d_step {
       which = NEXT(which);
       copy_half[AT(me, copies[me])] = 2 * TYPE(which) + filling[TYPE(which)];
       copy_which[AT(me, copies[me])] = which;
       copy_left[AT(me, copies[me])] = done[SLOT(me, 2 * TYPE(which) + filling[TYPE(which)])];
       copies[me]++;
       waits[TYPE(which)] = which;
       since = (since + 1) % 3;
       count = (LIMIT > 0 -> count + 1 : 0)
     };
     if
     :: since == 0 -> /* dc__reduce_finish */
        flush(0);
        flush(1);
        reductions[me] == 0 || MUTANT == 3;
        assert(arrived[me] == which || failed)
     :: else
     fi
  :: failed || (LIMIT > 0 && count == LIMIT) -> break
  od;
  flush(0);
  flush(1);
  copies[me] == 0 && reductions[me] == 0;
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
    do
    :: r < N -> run host(r); run caller(r); run reducer(r); r++
    :: else -> break
    od;
    if :: ABORT -> run aborter() :: else fi
  }
}

ltl ends { <> ALL(ended, true) }
