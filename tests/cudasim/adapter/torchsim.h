/* A stand-in for a PyTorch with CUDA: libtorch's C shim as the adapter finds it in a process, over the simulated
 * driver. The adapter's sources run on it unchanged.
 *
 *   tensors     have counted storages on the CPU or on the device. When a tensor on the device dies, its memory is
 *               overwritten in the order of the stream that it was allocated on, as PyTorch's next owner may do
 *   streams     each thread has a current one
 *   operators   are those that the adapter registered, by name and key, called as the dispatcher calls
 *
 * Any function can be made to fail, and any symbol to be missing. The adapter is compiled with -Ddlopen=torchsim_dlopen
 * and -Ddlsym=torchsim_dlsym. */
#ifndef TESTS_TORCHSIM_H
#define TESTS_TORCHSIM_H

#include "shim.h"

enum { SIM_CPU = 0, SIM_CUDA = 1, SIM_META = 14, SIM_FLOAT32 = 6, SIM_BFLOAT16 = 15 };

/* Sets the device from which memory is allocated; NULL waits until all of its memory is freed. */
void torchsim_use(dc_device *device);
/* Returns the number of live tensors, lists, optional values and libraries. */
int torchsim_live(void);

/* After `before` more calls of the function, one call fails. */
void torchsim_fail(const char *function, int before);
/* Returns whether that call was made. From now on no call fails. */
bool torchsim_failed(void);
/* Hides a symbol or a library from the process; NULL hides none. */
void torchsim_hide(const char *name);

/* Sets this thread's current stream, one of the simulated driver. */
void torchsim_set_stream(void *native);

/* Elements of an operator's stack. Tensors are new and uninitialised; a tensor with index 1 has no memory. */
dct_tensor torchsim_tensor(int32_t device, int32_t index, int32_t dtype, int32_t ndim, const int64_t *sizes);
dct_tensor torchsim_again(dct_tensor tensor);      /* another handle of the same tensor */
dct_tensor torchsim_transposed(dct_tensor tensor); /* a view of a matrix */
void torchsim_drop(dct_tensor tensor);
dct_value torchsim_list(const dct_value *items, size_t count, bool tensors); /* takes the tensors */
void torchsim_items(dct_value list, dct_tensor *items, size_t n);            /* unpacks a result, and frees the list */
dct_value torchsim_some(dct_value value);                                    /* an optional that has a value */
void *torchsim_data(dct_tensor tensor);
int64_t torchsim_numel(dct_tensor tensor);
int32_t torchsim_device(dct_tensor tensor, int32_t *index);

/* Calls an operator by the kernel of a dispatch key. Returns NULL, or the error that it raised. Its arguments are
 * always freed. */
const char *torchsim_call(const char *ns, const char *name, const char *key, dct_value *stack, uint64_t inputs,
                          uint64_t outputs);
bool torchsim_has(const char *ns, const char *name, const char *key);

#endif
