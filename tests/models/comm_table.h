/* One end of a local communicator, as its rank's thread walks through collectives. Both the model (comm.pml) and the C
 * test (test_comm_table.c) follow these rows. ROW(state, event, next state); an event is a call of src/comm/shm, named
 * in the test. */
ROW(CLOSED, JOIN, IDLE)
ROW(IDLE, POST, POSTED)
ROW(POSTED, CAME, READY)  /* dc__shm_wait_posted: all have posted */
ROW(POSTED, LOST, BROKEN) /* or will not */
ROW(READY, READ, READING) /* others' data, or the own */
ROW(READING, READ, READING)
ROW(READY, DONE, OVER)     /* it had nothing to read */
ROW(READY, POST, POSTED)   /* nor in this round */
ROW(READING, POST, POSTED) /* the next round */
ROW(READING, DONE, OVER)
ROW(READY, FAIL, FAILED) /* calls differ, or the group failed before it read */
ROW(OVER, POST, POSTED)  /* the next collective: no rank read its memory in place */
ROW(OVER, CAME, IDLE)    /* dc__shm_wait_done: all have read */
ROW(OVER, LOST, BROKEN)
ROW(BROKEN, FAIL, FAILED)
ROW(FAILED, UNREAD, SAFE) /* dc__shm_wait_readers */
ROW(IDLE, LEAVE, CLOSED)
ROW(OVER, LEAVE, CLOSED)
ROW(SAFE, LEAVE, CLOSED)
