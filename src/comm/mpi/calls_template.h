/* MPI's functions by one type of handles: calls.c includes this with HANDLE, MEMBER (of dc__mpi_handle) and NAME(x). */

typedef struct NAME(functions) {
  int (*MPI_Comm_rank)(HANDLE, int *);
  int (*MPI_Comm_size)(HANDLE, int *);
  int (*MPI_Comm_set_errhandler)(HANDLE, HANDLE);
  int (*MPI_Comm_idup)(HANDLE, HANDLE *, HANDLE *);
  int (*MPI_Comm_split)(HANDLE, int, int, HANDLE *);
  int (*MPI_Comm_free)(HANDLE *);
  int (*MPI_Iallgatherv)(const void *, int, HANDLE, void *, const int *, const int *, HANDLE, HANDLE, HANDLE *);
  int (*MPI_Ialltoallv)(const void *, const int *, const int *, HANDLE, void *, const int *, const int *, HANDLE,
                        HANDLE, HANDLE *);
  int (*MPI_Ibcast)(void *, int, HANDLE, int, HANDLE, HANDLE *);
  int (*MPI_Ibarrier)(HANDLE, HANDLE *);
  int (*MPI_Isend)(const void *, int, HANDLE, int, int, HANDLE, HANDLE *);
  int (*MPI_Irecv)(void *, int, HANDLE, int, int, HANDLE, HANDLE *);
  int (*MPI_Cancel)(HANDLE *);
  int (*MPI_Test)(HANDLE *, int *, void *);
  int (*MPI_Iprobe)(int, int, HANDLE, int *, void *);
} NAME(functions);

static const NAME(functions) * NAME(of)(const dc__mpi_library *mpi) {
  return mpi->functions;
}

static const char *NAME(load)(dc__mpi_library *mpi) {
  static NAME(functions) functions;
  const char *missing = NULL;
  DC__DLSYM(mpi->module, &functions, MPI_Comm_rank, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Comm_size, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Comm_set_errhandler, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Comm_idup, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Comm_split, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Comm_free, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Iallgatherv, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Ialltoallv, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Ibcast, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Ibarrier, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Isend, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Irecv, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Cancel, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Test, missing)
  DC__DLSYM(mpi->module, &functions, MPI_Iprobe, missing)
  mpi->functions = &functions;
  return missing;
}

static int NAME(comm_rank)(const dc__mpi_library *mpi, dc__mpi_handle comm, int *rank) {
  return NAME(of)(mpi)->MPI_Comm_rank(comm.MEMBER, rank);
}

static int NAME(comm_size)(const dc__mpi_library *mpi, dc__mpi_handle comm, int *size) {
  return NAME(of)(mpi)->MPI_Comm_size(comm.MEMBER, size);
}

static int NAME(comm_return_errors)(const dc__mpi_library *mpi, dc__mpi_handle comm) {
  return NAME(of)(mpi)->MPI_Comm_set_errhandler(comm.MEMBER, mpi->errors_return.MEMBER);
}

static int NAME(comm_idup)(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *copy,
                           dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Comm_idup(comm.MEMBER, &copy->MEMBER, &request->MEMBER);
}

static int NAME(comm_split)(const dc__mpi_library *mpi, dc__mpi_handle comm, int color, int key, dc__mpi_handle *part) {
  return NAME(of)(mpi)->MPI_Comm_split(comm.MEMBER, color, key, &part->MEMBER);
}

static int NAME(comm_free)(const dc__mpi_library *mpi, dc__mpi_handle *comm) {
  return NAME(of)(mpi)->MPI_Comm_free(&comm->MEMBER);
}

static int NAME(iallgatherv)(const dc__mpi_library *mpi, void *recv, const int *counts, const int *at,
                             dc__mpi_handle comm, dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Iallgatherv(mpi->in_place, 0, mpi->byte.MEMBER, recv, counts, at, mpi->byte.MEMBER,
                                        comm.MEMBER, &request->MEMBER);
}

static int NAME(ialltoallv)(const dc__mpi_library *mpi, const void *send, const int *send_counts, const int *send_at,
                            void *recv, const int *recv_counts, const int *recv_at, dc__mpi_handle comm,
                            dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Ialltoallv(send, send_counts, send_at, mpi->byte.MEMBER, recv, recv_counts, recv_at,
                                       mpi->byte.MEMBER, comm.MEMBER, &request->MEMBER);
}

static int NAME(ibcast)(const dc__mpi_library *mpi, void *data, int count, int root, dc__mpi_handle comm,
                        dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Ibcast(data, count, mpi->byte.MEMBER, root, comm.MEMBER, &request->MEMBER);
}

static int NAME(ibarrier)(const dc__mpi_library *mpi, dc__mpi_handle comm, dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Ibarrier(comm.MEMBER, &request->MEMBER);
}

static int NAME(isend)(const dc__mpi_library *mpi, const void *data, int bytes, int to, int tag, dc__mpi_handle comm,
                       dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Isend(data, bytes, mpi->byte.MEMBER, to, tag, comm.MEMBER, &request->MEMBER);
}

static int NAME(irecv)(const dc__mpi_library *mpi, void *data, int bytes, int from, int tag, dc__mpi_handle comm,
                       dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Irecv(data, bytes, mpi->byte.MEMBER, from, tag, comm.MEMBER, &request->MEMBER);
}

static int NAME(cancel)(const dc__mpi_library *mpi, dc__mpi_handle *request) {
  return NAME(of)(mpi)->MPI_Cancel(&request->MEMBER);
}

static int NAME(test)(const dc__mpi_library *mpi, dc__mpi_handle *request, int *done) {
  return NAME(of)(mpi)->MPI_Test(&request->MEMBER, done, mpi->status_ignore);
}

static int NAME(iprobe)(const dc__mpi_library *mpi, int rank, dc__mpi_handle comm) {
  int found = 0;
  return NAME(of)(mpi)->MPI_Iprobe(rank, 0, comm.MEMBER, &found, mpi->status_ignore);
}

static const dc__mpi_calls NAME(calls) = {.comm_rank = NAME(comm_rank),
                                          .comm_size = NAME(comm_size),
                                          .comm_return_errors = NAME(comm_return_errors),
                                          .comm_idup = NAME(comm_idup),
                                          .comm_split = NAME(comm_split),
                                          .comm_free = NAME(comm_free),
                                          .iallgatherv = NAME(iallgatherv),
                                          .ialltoallv = NAME(ialltoallv),
                                          .ibcast = NAME(ibcast),
                                          .ibarrier = NAME(ibarrier),
                                          .isend = NAME(isend),
                                          .irecv = NAME(irecv),
                                          .cancel = NAME(cancel),
                                          .test = NAME(test),
                                          .iprobe = NAME(iprobe)};
