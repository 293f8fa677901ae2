// Three steps of AdamW on four weights, by cgo: prints the bits that step.c prints.
//
//	CGO_CFLAGS=$(pkg-config --cflags dc) CGO_LDFLAGS=$(pkg-config --libs dc) go run step.go
//
// SPDX-License-Identifier: Apache-2.0
package main

/*
#include <dc_api.h>
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"unsafe"
)

const weights, steps = 4, 3

func check(status C.dc_status) {
	if status != C.DC_OK {
		fmt.Fprintf(os.Stderr, "%s: %s\n", C.GoString(C.dc_status_name(status)), C.GoString(C.dc_last_error()))
		os.Exit(1)
	}
}

// A tensor in C's memory, since Go's must not hold pointers to Go's.
func tensor(values []float32) *C.dc_tensor {
	t := (*C.dc_tensor)(C.calloc(1, C.sizeof_dc_tensor))
	shape := (*C.int64_t)(C.calloc(1, 8))
	data := (*[weights]float32)(C.calloc(weights, 4))
	copy(data[:], values)
	*shape = weights
	t.struct_size, t.data, t.shape = C.sizeof_dc_tensor, unsafe.Pointer(data), shape
	t.ndim, t.dtype = 1, C.DC_FLOAT32
	return t
}

func free(t *C.dc_tensor) {
	C.free(t.data)
	C.free(unsafe.Pointer(t.shape))
	C.free(unsafe.Pointer(t))
}

func main() {
	runtime.LockOSThread() // the text of an error belongs to the thread
	var device *C.dc_device
	var linalg *C.dc_linalg
	var adamw *C.dc_optimizer
	var options C.dc_adamw_options
	C.dc_adamw_options_init(&options, C.sizeof_dc_adamw_options)
	options.weight_decay = 0.1
	name := C.CString("cpu")
	defer C.free(unsafe.Pointer(name))
	check(C.dc_device_open(name, nil, &device))
	defer C.dc_device_destroy(device)
	check(C.dc_linalg_create(device, nil, &linalg))
	defer C.dc_linalg_destroy(linalg)
	check(C.dc_adamw_create(linalg, &options, &adamw))
	defer C.dc_optimizer_destroy(adamw)
	check(C.dc_optimizer_set_lr(adamw, 0, 0.01))

	w, g := tensor([]float32{1, -2, 3, 0.5}), tensor([]float32{0.5, 0.25, -1, 0})
	defer free(w)
	defer free(g)
	var index C.int64_t
	check(C.dc_optimizer_add_param(adamw, 0, w.shape, 1, 0, weights, C.DC_FLOAT32, &index))
	for step := 0; step < steps; step++ {
		check(C.dc_optimizer_step(adamw, w, g, C.sizeof_dc_tensor, 1, 1.0))
	}
	for _, weight := range (*[weights]float32)(w.data) {
		fmt.Printf("%08x %.6f\n", math.Float32bits(weight), weight)
	}
}
