/* The calls of MPI that take handles, compiled once for each type of handle. */
#include <dlfcn.h>

#include "comm/mpi/library.h"
#include "device/device.h"

#define HANDLE int
#define MEMBER number
#define NAME(x) number_##x
#include "comm/mpi/calls_template.h"
#undef HANDLE
#undef MEMBER
#undef NAME

#define HANDLE void *
#define MEMBER pointer
#define NAME(x) pointer_##x
#include "comm/mpi/calls_template.h"

const char *dc__mpi_load_calls(dc__mpi_library *library) {
  bool numbers = library->abi == DC__MPI_MPICH;
  library->calls = numbers ? &number_calls : &pointer_calls;
  return numbers ? number_load(library) : pointer_load(library);
}
