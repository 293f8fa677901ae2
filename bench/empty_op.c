/* The floor of bench_ops.py: an operator that does nothing, put into PyTorch the same way as libdc's. */
#include "shim.h"

__attribute__((visibility("default"))) const char *register_empty(void);

static void empty(dct_value *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs;
  (void)outputs;
  dct_torch.aoti_torch_delete_tensor_object(dct_as_tensor(stack[0]));
}

const char *register_empty(void) {
  static char text[256];
  const char *error = dct_shim_resolve(text, sizeof text);
  dct_library library = NULL;
  if (error == NULL && (dct_torch.aoti_torch_library_init_def("dc_bench", "empty_op", 0, &library) != 0 ||
                        dct_torch.aoti_torch_library_def(library, "empty(Tensor a, int graph_id, int id) -> ()") != 0 ||
                        dct_torch.aoti_torch_library_init_impl("dc_bench", "CPU", "empty_op", 0, &library) != 0 ||
                        dct_torch.torch_library_impl(library, "empty", empty, DCT_TORCH_ABI) != 0)) {
    error = dct_torch_reason();
  }
  return error;
}
