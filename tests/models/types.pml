/* The types in which one parameter is gathered, in any order, with releases in between: the result of a gather does not
 * depend on earlier gathers.
 *
 * Modelled, by name: dc__gather, start_one                                          runtime/gather.c
 *                    dc__gather_copy, dc__gather_source, dc__gather_free             runtime/copies.c
 *
 * A copy's content is the least exact type that its values went through: NARROW, OWN or WIDE, 1 to 3. The shard is of
 * type OWN. Where several copies may be cast from, the model takes any of them.
 *
 * Asserted: every copy is as exact as the cast of the shard to its type. Every row of type_table.h is taken.
 *
 * Parameters: MUTANT 1 casts from any current copy.
 */
mtype = { NOTHING, NARROW, OWN, WIDE, NARROW_OWN, NARROW_WIDE, OWN_WIDE, ALL_THREE,
          GATHER_NARROW, GATHER_OWN, GATHER_WIDE, FOUND, CAST, WIRE };
#define LEAST(a, b) ((a) < (b) -> (a) : (b))
#define SHARD 2

#include "rows.pml"

inline look_up(e) {
  d_step {
    if
#define ROW(from, call, outcome, to) :: (s == from && e == call) -> s = to; source = outcome; SEEN(__COUNTER__)
#include "type_table.h"
#undef ROW
    :: else -> assert(false)
    fi
  }
}

active proctype host() {
  mtype s = NOTHING, call, source;
  byte content[4], asked, from; /* by type, 1 to 3; 0: no copy */
  START_COUNTING;
end:
  do
  :: atomic {
       if
       :: call = GATHER_NARROW; asked = 1
       :: call = GATHER_OWN; asked = 2
       :: call = GATHER_WIDE; asked = 3
       fi;
       look_up(call);
       if
       :: source == FOUND -> assert(content[asked] != 0)
       :: source == WIRE && MUTANT == 1 && content[1] != 0 -> content[asked] = LEAST(content[1], asked)
       :: source == WIRE && !(MUTANT == 1 && content[1] != 0) ->
          assert(content[2] == 0 && content[3] == 0);
          content[asked] = LEAST(SHARD, asked)
       :: source == CAST ->
          if
          :: content[2] != 0 -> from = 2
          :: content[3] != 0 -> from = 3
          fi;
          content[asked] = LEAST(content[from], asked)
       fi;
       assert(content[asked] == LEAST(SHARD, asked));
       from = 0; asked = 0; call = 0; source = 0
     }
  :: atomic { s = NOTHING; content[1] = 0; content[2] = 0; content[3] = 0 } /* the last user has released it */
  od
}
