/* The states of one end of a local communicator while its rank's thread makes collectives. Both the model (comm.pml)
 * and the C test (test_comm_table.c) follow these rows. ROW(state, event, next state); an event is a call of
 * src/comm/shm, which the test names. */
ROW(CLOSED, JOIN, IDLE)
ROW(IDLE, POST, POSTED)
ROW(POSTED, ARRIVED, READY)  /* dc__shm_wait_posted: all have posted */
ROW(POSTED, GAVE_UP, BROKEN) /* or one never will */
ROW(READY, READ, READING)    /* others' data, or its own */
ROW(READING, READ, READING)
ROW(READY, DONE, OVER)     /* it has nothing to read */
ROW(READY, POST, POSTED)   /* nothing to read in this round */
ROW(READING, POST, POSTED) /* the next round */
ROW(READING, DONE, OVER)
ROW(READY, FAIL, FAILED) /* calls differ, or the group failed before it read */
ROW(OVER, POST, POSTED)  /* the next collective, if no rank reads this one's memory in place */
ROW(OVER, ARRIVED, IDLE) /* dc__shm_wait_done: all have read */
ROW(OVER, GAVE_UP, BROKEN)
ROW(BROKEN, FAIL, FAILED)
ROW(FAILED, UNREAD, SAFE) /* dc__shm_wait_readers */
ROW(IDLE, LEAVE, CLOSED)
ROW(OVER, LEAVE, CLOSED)
ROW(SAFE, LEAVE, CLOSED)
