/* Registers the operators, once. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "adapter.h"
#include "operators.h"

/* Dispatch keys of real kernels whose arguments have a tensor. The CPU is always there. CUDA's is there when this
 * PyTorch has CUDA and tells its current stream, whether libdc has its plug-in or not. The kernels name both devices if
 * a tensor is on another device than the context's; PyTorch would only say that there is no kernel. */
static const char *const device_keys[] = {"CPU", "CUDA"};
enum { DEVICE_KEYS = sizeof device_keys / sizeof device_keys[0] };

static int device_key_count(void) {
  return dct_torch.aoti_torch_get_current_cuda_stream != NULL ? DEVICE_KEYS : 1;
}

static const char *const namespaces[] = {"dc", "dc_rt"};
enum { NAMESPACES = sizeof namespaces / sizeof namespaces[0], LIBRARIES = NAMESPACES * (DEVICE_KEYS + 3) };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool registered;
static char error_text[512];

/* Handles of a registration under way: deleting one takes its definitions back. */
typedef struct libraries {
  dct_library all[LIBRARIES];
  int count;
} libraries;

static void register_keep(libraries *made, dct_library library) {
  made->all[made->count++] = library;
}

static bool register_fail(const char *ns, const char *what) {
  snprintf(error_text, sizeof error_text, "dct_register: %s::%s could not be registered: %s", ns, what,
           dct_torch_reason());
  return false;
}

static bool register_define(libraries *made, const char *ns) {
  dct_library library = NULL;
  if (dct_torch.aoti_torch_library_init_def(ns, "libdc_torch", 0, &library) != 0) {
    snprintf(
        error_text, sizeof error_text,
        "dct_register: the operator namespace '%s' is taken: DeepSpeed's own dc operators (deepspeed.ops.dc), or a "
        "second copy of libdc, are loaded in this process. Use one of them. (%.160s)",
        ns, dct_torch_reason());
    return false;
  }
  register_keep(made, library);
  for (size_t i = 0; i < dct_op_count; ++i) {
    if (strcmp(dct_ops[i].ns, ns) == 0 && dct_torch.aoti_torch_library_def(library, dct_ops[i].schema) != 0) {
      return register_fail(ns, dct_ops[i].name);
    }
  }
  return true;
}

/* Which kernel of an operator a dispatch key gets; NULL: none. An operator that may come without a tensor is not
 * dispatched by device, so it has one kernel for all of them. */
static dct_kernel kernel_for(const dct_op *op, const char *key) {
  if (strcmp(key, "Meta") == 0) {
    return op->meta;
  }
  bool composite = strcmp(key, "CompositeExplicitAutograd") == 0;
  return composite == op->any_device ? op->real : NULL;
}

static bool register_implement(libraries *made, const char *ns, const char *key) {
  dct_library library = NULL;
  if (dct_torch.aoti_torch_library_init_impl(ns, key, "libdc_torch", 0, &library) != 0) {
    return register_fail(ns, key);
  }
  register_keep(made, library);
  for (size_t i = 0; i < dct_op_count; ++i) {
    const dct_op *op = &dct_ops[i];
    dct_kernel kernel = strcmp(op->ns, ns) == 0 ? kernel_for(op, key) : NULL;
    if (kernel != NULL && dct_torch.torch_library_impl(library, op->name, kernel, DCT_TORCH_ABI) != 0) {
      return register_fail(ns, op->name);
    }
  }
  return true;
}

static bool register_all(libraries *made) {
  for (int n = 0; n < NAMESPACES; ++n) {
    bool ok = register_define(made, namespaces[n]) && register_implement(made, namespaces[n], "Meta") &&
              register_implement(made, namespaces[n], "CompositeExplicitAutograd");
    for (int k = 0; ok && k < device_key_count(); ++k) {
      ok = register_implement(made, namespaces[n], device_keys[k]);
    }
    if (!ok) {
      return false;
    }
  }
  return true;
}

/* A libdc.so that another package has loaded before may not be the one that this was built with. */
static bool same_series(void) {
  uint32_t loaded = dc_api_version();
  if (loaded / 1000 == DC_API_VERSION / 1000 && loaded >= DC_API_VERSION) {
    return true;
  }
  snprintf(error_text, sizeof error_text,
           "dct_register: libdc is version %s, this adapter needs %d.%d.%d or newer of its series", dc_version_string(),
           DC_VERSION_MAJOR, DC_VERSION_MINOR, DC_VERSION_PATCH);
  return false;
}

int dct_register(void) {
  pthread_mutex_lock(&lock);
  error_text[0] = '\0';
  if (!registered && same_series() && dct_shim_resolve(error_text, sizeof error_text) == NULL) {
    libraries made = {.count = 0};
    registered = register_all(&made);
    while (!registered && made.count > 0) {
      dct_torch.aoti_torch_delete_library_object(made.all[--made.count]);
    }
  }
  bool ok = registered;
  pthread_mutex_unlock(&lock);
  return ok ? 0 : -1;
}

const char *dct_error(void) {
  return error_text;
}
