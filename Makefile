# The two commands that matter are `make` and `make train`. Everything lives in .venv and build.
RANKS ?= 2
ARGS ?=
SUITES ?=
PY := .venv/bin/python
sources := $(shell find include src bindings packaging tools -type f -not -name '*.pyc') meson.build meson_options.txt \
  pyproject.toml

build: .venv/package

.venv/package: $(sources) scripts/requirements.txt scripts/setup.sh
	@scripts/setup.sh build
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=build-dir=build/package .
	@touch $@
	@$(PY) -c 'import libdc; print(f"libdc {libdc.__version__} is in .venv; next: make train")'

train: build
	@$(PY) -m libdc.run -n $(RANKS) --grace 60 examples/gpt/train.py $(ARGS)

# A small BERT with the library's transformer layer, without and with its memory flags.
bert: build
	@$(PY) -m libdc.run -n $(RANKS) --grace 60 examples/bert/train.py --compare $(ARGS)

# The same models with SGD, AdamW, Muon, Shampoo, SOAP and K-FAC in turn: a live display, and pictures of the losses.
optimizers: build
	@$(PY) -m libdc.run -n $(RANKS) --grace 60 examples/optimizers/train.py $(ARGS)

test:
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory build
	@$(PY) scripts/run_tests.py $(SUITES)

abi:
	@$(MAKE) --no-print-directory test SUITES="gcc abi"; status=$$?; cat build/logs/abi.log; exit $$status

# Every stage, backend and model with both versions of DeepSpeed: half an hour, and bench/results/deepspeed-DATE.md.
# Then DeepSpeed's own tests, which PyPI does not have: DEEPSPEED_SOURCE is a clone of its repository.
test-deepspeed: build
	@$(PY) tests/deepspeed/run.py
ifdef DEEPSPEED_SOURCE
	@$(PY) tests/deepspeed/upstream.py $(DEEPSPEED_SOURCE)
endif

# Without a card: libdc_cuda.so is built by nvcc, which lies in PATH or CUDA_HOME, or in the wheel nvidia-cuda-nvcc, and
# by ptxas of CUDA 12, which comes as a wheel into .venv; and our prototypes of the driver's functions are compared with
# NVIDIA's. The PTX of some families is kept for the tests.
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda .venv/lib/python3*/site-packages/nvidia/cu1[23]))
CUBLAS_INCLUDE ?= $(patsubst %/cublasLt.h,%,$(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h \
  .venv/lib/python3*/site-packages/nvidia/*/include/cublasLt.h)))
CUSOLVER_INCLUDE ?= $(patsubst %/cusolverDn.h,%,$(firstword $(wildcard $(CUDA_HOME)/include/cusolverDn.h \
  .venv/lib/python3*/site-packages/nvidia/*/include/cusolverDn.h)))
NCCL_INCLUDE ?= $(patsubst %/nccl.h,%,$(firstword $(wildcard /usr/include/nccl.h \
  .venv/lib/python3*/site-packages/nvidia/nccl/include/nccl.h)))
cuda: check-vendor-headers
	@scripts/setup.sh build
	@$(PY) -m pip show --quiet nvidia-cuda-nvcc-cu12 || \
	  $(PY) -m pip install --quiet --no-deps nvidia-cuda-nvcc-cu12==12.9.86
	@$(PY) -m pip show --quiet nvidia-cuda-nvdisasm || \
	  $(PY) -m pip install --quiet --no-deps nvidia-cuda-nvdisasm==13.2.78
	@test -f build/cuda/build.ninja || PATH="$(CURDIR)/.venv/bin:$$PATH:$(CUDA_HOME)/bin" meson setup build/cuda \
	  -Dcuda=enabled -Dtests=false \
	  -Dptxas="$$(echo $(CURDIR)/.venv/lib/python3*/site-packages/nvidia/cuda_nvcc/bin/ptxas)" >/dev/null
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) scripts/record_kernels.py bench/results/gpu/kernels.txt \
	  build/cuda .venv/lib/python3*/site-packages/nvidia/cu13/bin/nvdisasm meson compile -C build/cuda
	@$(PY) scripts/checks/check_image.py
	@$(PY) scripts/ptx_texts.py pack build/cuda
	@build/cuda/tools/libdc/libdc info | grep cuda

# All that scripts/gpu-check needs on a machine with a card, in one archive: there `tar -xf` and `scripts/gpu-check`.
# Its programs are linked for old distributions, as the wheels are.
card-kit: wheel-cuda
	@test -f build/kit/build.ninja || \
	  PATH="$(CURDIR)/.venv/bin:$(CURDIR)/build/cuda-tools/nvidia/cu13/bin:$$PATH" \
	  LDFLAGS="$$($(PY) packaging/make_wheel.py --ldflags build/kit-glibc)" meson setup build/kit \
	  -Dcuda=enabled -Dtests=true >/dev/null
	@PATH="$(CURDIR)/.venv/bin:$$PATH" meson compile -C build/kit card_programs
	@$(PY) scripts/card_kit.py build/kit build/libdc-card-kit.tar.xz

check-vendor-headers:
	@test -f "$(CUDA_HOME)/include/cuda.h" || { \
	  echo "no cuda.h in CUDA_HOME=$(CUDA_HOME); the wheel nvidia-cuda-runtime has it" >&2; exit 1; }
	@$(CXX) -std=c++17 -fsyntax-only -Wall -Wextra -Werror -I"$(CUDA_HOME)/include" -Isrc -Iinclude \
	  tests/cudasim/vendor/check_cuda.cpp
	@echo "the driver's functions are declared as in $(CUDA_HOME)/include/cuda.h"
ifneq ($(CUBLAS_INCLUDE),)
	@$(CXX) -std=c++17 -fsyntax-only -Wall -Wextra -Werror -I"$(CUDA_HOME)/include" -isystem "$(CUBLAS_INCLUDE)" -Isrc \
	  -Iinclude tests/cudasim/vendor/check_cublaslt.cpp
	@echo "cuBLASLt's functions are declared as in $(CUBLAS_INCLUDE)/cublasLt.h"
else
	@echo "cuBLASLt's functions were not compared: no cublasLt.h; the wheel nvidia-cublas has it," \
	  "CUBLAS_INCLUDE its folder"
endif
ifneq ($(and $(CUBLAS_INCLUDE),$(CUSOLVER_INCLUDE)),)
	@$(CXX) -std=c++17 -fsyntax-only -Wall -Wextra -Werror -I"$(CUDA_HOME)/include" -isystem "$(CUBLAS_INCLUDE)" \
	  -isystem "$(CUSOLVER_INCLUDE)" -Isrc -Iinclude tests/cudasim/vendor/check_cusolver.cpp
	@echo "cuSOLVER's functions are declared as in $(CUSOLVER_INCLUDE)/cusolverDn.h"
else
	@echo "cuSOLVER's functions were not compared: no cusolverDn.h, or no cublasLt.h beside it; the wheels" \
	  "nvidia-cusolver and nvidia-cublas have them, CUSOLVER_INCLUDE and CUBLAS_INCLUDE their folders"
endif
ifneq ($(NCCL_INCLUDE),)
	@$(CXX) -std=c++17 -fsyntax-only -Wall -Wextra -Werror -I"$(CUDA_HOME)/include" -isystem "$(NCCL_INCLUDE)" -Isrc \
	  -Iinclude tests/cudasim/vendor/check_nccl.cpp
	@echo "NCCL's functions are declared as in $(NCCL_INCLUDE)/nccl.h"
else
	@echo "NCCL's functions were not compared: no nccl.h; the wheel nvidia-nccl has it, NCCL_INCLUDE its folder"
endif

docs: build
	@$(PY) scripts/make_docs.py build/docs
	@echo "build/docs/html/index.html; man -M build/docs/man dc_api; build/docs/dc_api.json"

wheel: build
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) packaging/make_wheel.py build/wheel

# The plug-in for CUDA, by nvcc of PyPI's wheels, as a wheel of its own beside that of the library.
wheel-cuda: wheel
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) packaging/make_cuda_wheel.py build/wheel

# Before a release: one version, the frozen surface, and each package, built and used. Its table has a line for each
# suite. Its chroots need root and Debian's archive.
release-check:
	@$(MAKE) --no-print-directory test SUITES="checks versions gcc abi rust dist sources wheel wheel-cuda crates \
	  install debian conda vcpkg docs addresses"

# The sources as a tarball, which needs no git and no network to be built and tested; pip takes it too.
dist:
	@scripts/setup.sh build
	@$(PY) packaging/make_sdist.py build

# Built for 64-bit ARM, and its C tests run by qemu; ARGS: names of tests. apt-get installs what it needs:
# gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user, and after `dpkg --add-architecture arm64` and an update
# libcmocka-dev:arm64 libopenblas0-pthread:arm64. Those that fork take long there.
arm:
	@scripts/setup.sh build
	@test -f build/arm/build.ninja || PATH="$(CURDIR)/.venv/bin:$$PATH" meson setup build/arm \
	  --cross-file scripts/aarch64.ini -Dwerror=true >/dev/null
	@PATH="$(CURDIR)/.venv/bin:$$PATH" meson compile -C build/arm
	@PATH="$(CURDIR)/.venv/bin:$$PATH" meson test -C build/arm --no-rebuild -t 10 $(ARGS)

mutants:
	@scripts/setup.sh test
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) scripts/mutants.py

coverage:
	@scripts/setup.sh test
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) scripts/coverage.py $(ARGS)

SECONDS ?= 60
fuzz:
	@scripts/setup.sh test
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) tests/fuzz/run.py --seconds $(SECONDS)

spin:
	@scripts/setup.sh test
	@$(PY) tests/models/run.py $(ARGS)

bench: build
	@test -f build/bench/build.ninja || PATH="$(CURDIR)/.venv/bin:$$PATH" meson setup build/bench \
	  -Dbuildtype=release -Dbench=true -Dtests=false >/dev/null
	@PATH="$(CURDIR)/.venv/bin:$$PATH" meson compile -C build/bench >/dev/null
	@for program in $(wildcard bench/bench_*.c); do \
	  build/bench/$${program%.c} || exit 1; done
	@$(PY) bench/bench_collectives.py
	@$(PY) bench/bench_import.py
	@$(PY) bench/optim/bench.py
	@$(PY) bench/gpt/bench.py $(ARGS)
	@$(PY) bench/bench_growth.py

clean:
	rm -rf .venv build

.PHONY: build train bert optimizers test test-deepspeed abi cuda card-kit check-vendor-headers docs wheel wheel-cuda \
  release-check dist arm mutants coverage fuzz spin bench clean
