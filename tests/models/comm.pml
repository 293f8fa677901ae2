/* The handshake of the shared-memory communicator (src/comm/shm), for a few ranks. Collectives of one channel follow
 * one another, each staged or in place, in one round or two, with a futex under every wait. The model has a failure, an
 * abort, a killed rank, and leaving and joining again on a channel that others may still use.
 *
 * Modelled, by name:
 *   dc__shm_channel_join, dc__shm_channel_leave, reset_channel, lock    channels.c
 *   run_collective, copy_to_staging, publish, post_and_wait, dc__signature_compare, transfer_window,
 *   dc__shm_run                                                      collective.c
 *   dc__shm_signal, sleep_until_reached, check_wait, futex_wake, futex_wake_all,
 *   dc__shm_group_fail, dc__shm_group_check, dc__shm_wait_readers    wait.c
 *
 * One step is one access to shared memory, or several that no other rank can tell apart. Sequence numbers do not wrap
 * here. Deadlines are left out: with weak fairness nothing needs one.
 *
 * Asserted: a reader finds the data that was posted, in memory that its owner has not freed. A call is compared before
 * it is overwritten. A channel is clean when it is joined. A collective that begins in a failed group fails. Every row
 * of comm_table.h is one of those in which the code can be, and no other step is made. Spin adds: no rank waits for
 * ever, where the slices of a sleep are left out (SLICES 0); and every rank comes to its end, where they are there
 * (`ends`).
 *
 * Parameters: N ranks, GENS communicators one after the other, CALLS collectives in each, ROUNDS, and the bits THREADS
 * (else processes), SLICES, ABORT, KILL, MISMATCH. MUTANT puts in one fault that spin must find. */
#define CH 2
#define SLOT(c, r) ((c) * N + (r))
#define POSTED_WORD(c, r) SLOT(c, r)
#define DONE_WORD(c, r) (CH * N + SLOT(c, r))
#define WORDS (2 * CH * N)

mtype = { CLOSED, IDLE, POSTED, READY, READING, OVER, BROKEN, FAILED, SAFE,
          JOIN, POST, ARRIVED, GAVE_UP, READ, DONE, FAIL, UNREAD, LEAVE };
#define FINE 0
#define FAILING 1
#define GROUP_FAILED 2

byte word[WORDS], waiters[WORDS];
byte asleep_on[N];                  /* word + 1; 0: awake */
bool left[CH * N], reading[CH * N]; /* dc__shm_slot: left, reading */
byte call_number[CH * N * 2];
bool call_other[CH * N * 2];        /* which of two calls */
bool call_staged[CH * N * 2];
byte staged_seq[CH * N * 2];        /* staging memory: the round whose data it holds */
byte live_seq[CH * N];              /* in place: the collective whose data it is; 0: freed */
byte number[CH], left_count[CH];
byte lock;                          /* rank + 1 */
byte failure, failures;
bool dead[N], ended[N];

#include "rows.pml"

/* An event of this rank; `s` is its state. */
inline event(e) {
  d_step {
    if
#define ROW(from, what, to) :: (s == from && e == what) -> s = to; SEEN(__COUNTER__)
#include "comm_table.h"
#undef ROW
    :: else -> assert(false)
    fi
  }
}

/* ---- wait.c ---- */

inline wake(w) {
  d_step {
    i = 0;
    do
    :: i < N -> asleep_on[i] = (asleep_on[i] == w + 1 -> 0 : asleep_on[i]); i++
    :: else -> break
    od;
    i = 0
  }
}

inline raise(w, value) {
  word[w] = value;
  if
  :: MUTANT != 1 && waiters[w] > 0 -> wake(w)
  :: else
  fi
}

/* wake_all is one step: for two ranks that sleep on two words, the order in which they did so makes no difference. */
inline group_fail() {
  atomic {
    if
    :: failure == FINE -> failure = FAILING; failures++; assert(failures == 1); first = true
    :: else
    fi
  }
  if
  :: first ->
     first = false;
     failure = GROUP_FAILED;
     d_step {
       i = 0;
       do
       :: i < N && MUTANT != 4 -> asleep_on[i] = 0; i++
       :: else -> break
       od;
       i = 0
     }
  :: else
  fi
}

/* A dead process is found by its pidfd, and only after a slice without progress. */
inline sleep_until(w, peer, seq_wanted) {
  waiters[w]++;
  quiet = false;
  do
  :: seen = word[w];
     if
     :: seen >= seq_wanted -> break
     :: else
     fi;
     if
     :: failure != FINE && MUTANT != 5 -> err = true; break
     :: else
     fi;
     if
     :: left[SLOT(ch, peer)] || (quiet && dead[peer] && MUTANT != 7) ->
        if
        :: word[w] < seq_wanted -> err = true; break
        :: else
        fi
     :: else
     fi;
     d_step { quiet = false; asleep_on[me] = (word[w] == seen || MUTANT == 2 -> w + 1 : 0) };
     if
     :: asleep_on[me] == 0
     :: SLICES && asleep_on[me] != 0 -> d_step { asleep_on[me] = 0; quiet = true }
     fi
  od;
  waiters[w]--;
  d_step { seen = 0; quiet = false }
}

inline await(base, seq_wanted) {
  peer = 0;
  do
  :: peer < N && !err ->
     if
     :: peer != me && word[base + SLOT(ch, peer)] < seq_wanted -> sleep_until(base + SLOT(ch, peer), peer, seq_wanted)
     :: else
     fi;
     peer++
  :: else -> break
  od;
  peer = 0
}

/* ---- group.c ---- */

inline take_lock() {
  if
  :: atomic { lock == 0 -> lock = me + 1 }
  :: lock != 0 && dead[lock - 1] -> err = true
  fi
}

inline join() {
  take_lock();
  if
  :: !err ->
     d_step {
       ch = CH; i = CH;
       do
       :: i > 0 ->
          i--;
          if
          :: number[i] == generation -> ch = i; break
          :: number[i] == 0 -> ch = i
          :: else
          fi
       :: else -> break
       od;
       i = 0;
       if
       :: ch < CH -> number[ch] = generation
       :: else -> err = true; ch = 0
       fi;
       assert(err || (word[POSTED_WORD(ch, me)] == 0 && word[DONE_WORD(ch, me)] == 0 && !left[SLOT(ch, me)]))
     };
     lock = 0
  :: else
  fi
}

inline leave() {
  left[SLOT(ch, me)] = true;
  raise(POSTED_WORD(ch, me), word[POSTED_WORD(ch, me)]);
  raise(DONE_WORD(ch, me), word[DONE_WORD(ch, me)]);
  take_lock();
  if
  :: lock == me + 1 ->
     d_step {
       left_count[ch]++;
       if
       :: left_count[ch] == (MUTANT == 6 -> 1 : N) -> /* reset_slots */
          i = 0;
          do
          :: i < N ->
             word[POSTED_WORD(ch, i)] = 0;
             word[DONE_WORD(ch, i)] = 0;
             left[SLOT(ch, i)] = false;
             i++
          :: else -> break
          od;
          i = 0; number[ch] = 0; left_count[ch] = 0
       :: else
       fi
     };
     lock = 0
  :: else
  fi
}

/* ---- collective.c ---- */

/* Reads the others' data of this round. */
inline move() {
  reading[SLOT(ch, me)] = true;
  if
  :: failure != FINE && MUTANT != 8 -> reading[SLOT(ch, me)] = false; err = true
  :: else ->
     if
     :: true -> peer = 0
     :: ROUNDS > 1 -> peer = N /* its part is empty */
     fi;
     do
     :: peer < N ->
        event(READ);
        d_step {
          if
          :: peer == me
          :: peer != me && call_staged[SLOT(ch, peer) * 2 + (calls & 1)] ->
             assert(staged_seq[SLOT(ch, peer) * 2 + (seq & 1)] == seq || (!THREADS && failure != FINE))
          :: else -> assert(live_seq[SLOT(ch, peer)] == calls || (!THREADS && failure != FINE))
          fi;
          peer++
        }
     :: else -> break
     od;
     peer = 0;
     reading[SLOT(ch, me)] = false
  fi
}

/* Data that others read must be as it was posted. */
inline bring() {
  if
  :: staged -> d_step { staged_seq[SLOT(ch, me) * 2 + ((seq + 1) & 1)] = seq + 1 }
  :: else
  fi
}

inline post_and_wait() {
  seq++;
  event(POST);
  raise(POSTED_WORD(ch, me), seq);
  await(0, (MUTANT == 3 -> seq - 1 : seq));
  if
  :: err -> event(GAVE_UP)
  :: else -> event(ARRIVED)
  fi
}

inline compare() {
  d_step {
    i = 0; any_staged = false;
    do
    :: i < N ->
       assert(call_number[SLOT(ch, i) * 2 + (calls & 1)] == calls);
       err = err || call_other[SLOT(ch, i) * 2 + (calls & 1)] != other;
       any_staged = any_staged || call_staged[SLOT(ch, i) * 2 + (calls & 1)];
       i++
    :: else -> break
    od;
    i = 0
  }
}

inline collective() {
  d_step { began_failed = failure == GROUP_FAILED; calls++; other = false };
  if
  :: failure != FINE -> err = true /* dc__comm_check, in run_task: not started */
  :: else ->
     if
     :: staged = true
     :: staged = false
     fi;
     if
     :: MISMATCH && me == 0 -> other = true
     :: true
     fi;
     d_step { live_seq[SLOT(ch, me)] = (staged -> 0 : calls) };
     bring();
     d_step {
       call_number[SLOT(ch, me) * 2 + (calls & 1)] = calls;
       call_other[SLOT(ch, me) * 2 + (calls & 1)] = other;
       call_staged[SLOT(ch, me) * 2 + (calls & 1)] = staged
     };
     post_and_wait();
     if
     :: !err -> compare()
     :: else
     fi;
     round = 0;
     do
     :: !err && round < (any_staged -> ROUNDS : 1) ->
        if
        :: round > 0 -> bring(); post_and_wait()
        :: else
        fi;
        if
        :: !err -> move()
        :: else
        fi;
        round++
     :: else -> break
     od;
     round = 0;
     if
     :: !err ->
        event(DONE);
        raise(DONE_WORD(ch, me), seq);
        if
        :: !staged && MUTANT != 9 ->
           await(CH * N, seq);
           if
           :: err -> event(GAVE_UP)
           :: else -> event(ARRIVED)
           fi
        :: else
        fi
     :: else
     fi;
     if
     :: err -> /* dc__shm_run */
        event(FAIL);
        group_fail();
        if
        :: THREADS && MUTANT != 10 ->
           do
           :: peer < N && (peer == me || !reading[SLOT(ch, peer)]) -> peer++
           :: peer == N -> break
           od;
           peer = 0
        :: else
        fi;
        event(UNREAD)
     :: else
     fi
  fi;
  d_step { live_seq[SLOT(ch, me)] = 0 }; /* freed to the caller */
  assert(!began_failed || err)
}

proctype rank(byte me) {
  mtype s = CLOSED;
  byte i, ch, generation, seq, calls, peer, seen, round;
  bool first, err, staged, other, any_staged, quiet, began_failed;
  {
    generation = 1;
    do
    :: generation <= GENS && !err ->
       join();
       if
       :: !err ->
          event(JOIN);
          do
          :: calls < CALLS && !err -> collective()
          :: else -> break
          od;
          if
          :: true -> leave(); event(LEAVE)
          :: err -> break /* a rank that failed may keep its communicator */
          fi;
          seq = 0;
          d_step { calls = 0; any_staged = false; staged = false }
       :: else
       fi;
       generation++
    :: else -> break
    od;
    assert(!err || failure != FINE || KILL || GENS > CH);
    ended[me] = true
  } unless {
    dead[me]
  }
}

/* dc_comm_abort, from any thread, at any time, or never. */
proctype aborter() {
  byte i;
  bool first;
  if
  :: true -> group_fail()
  :: true
  fi
}

proctype killer() {
  if
  :: !ended[0] -> dead[0] = true
  :: true
  fi
}

init {
  atomic {
    byte r;
    START_COUNTING;
    do
    :: r < N -> run rank(r); r++
    :: else -> break
    od;
    if :: ABORT -> run aborter() :: else fi;
    if :: KILL -> run killer() :: else fi
  }
}

#define AT_END(r) (ended[r] || dead[r])
#if N == 2
ltl ends { <> (AT_END(0) && AT_END(1)) }
#else
ltl ends { <> (AT_END(0) && AT_END(1) && AT_END(2)) }
#endif
