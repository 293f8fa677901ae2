#!/usr/bin/env bash
# Installs what is missing: setup.sh build | test. As root by apt-get; otherwise says what to install and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

missing=()
want() { # want PACKAGE test…: PACKAGE is missing unless the test succeeds
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
have_python() { [ -n "$python" ] && "$python" "$@"; }
new_enough() { have_python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }
refuse_python() { echo "setup: Python 3.11 or later is needed, not ${python:-none}; PYTHON=path names one" >&2; }

want gcc command -v gcc
want make command -v make
want libc6-dev test -e /usr/include/pthread.h
want pkg-config command -v pkg-config
want python3 new_enough
want python3-venv have_python -c 'import ensurepip, venv'
want python3-dev have_python -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
if [ "${1:-build}" = test ]; then
  want g++ command -v g++
  want ccache command -v ccache # meson finds it: packages build the same library again and again
  want git command -v git
  want libcmocka-dev pkg-config --exists cmocka
  want clang-14 command -v clang-14
  want libclang-rt-14-dev sh -c 'test -e "$(clang-14 -print-file-name=libclang_rt.asan-x86_64.a)"'
  want lld-14 command -v ld.lld-14
  want clang-format-14 command -v clang-format-14
  want clang-tidy-14 command -v run-clang-tidy-14
  want llvm-14 command -v llvm-cov-14
  want spin command -v spin
  want valgrind command -v valgrind
  want libopenblas0-pthread sh -c '/sbin/ldconfig -p | grep -q libopenblas.so.0'
  want binutils command -v nm
  want abigail-tools command -v abidw
  want patch command -v patch
  want man-db command -v man
  want cargo command -v cargo
  want rustfmt cargo fmt --version
  want rust-clippy cargo clippy --version
  want bindgen command -v bindgen
  want luajit command -v luajit
  want libffi-platypus-perl perl -MFFI::Platypus -e 1
  want default-jdk-headless command -v javac
  want libjna-java test -e /usr/share/java/jna.jar
  want golang-go command -v go
  want fp-compiler command -v fpc
  want ocaml-findlib command -v ocamlfind
  want libctypes-ocaml-dev ocamlfind query ctypes.foreign
  want dpkg-dev command -v dpkg-buildpackage
  want debhelper command -v dh
  want lintian command -v lintian
  want mmdebstrap command -v mmdebstrap
  want cmake command -v cmake
  want groff-base command -v groff
  want zsh command -v zsh
  want fish command -v fish
  want libffi-dev pkg-config --exists libffi
  want iproute2 command -v ip
  want chromium command -v chromium
  want mpich command -v mpirun.mpich
  want openmpi-bin command -v mpirun.openmpi
fi

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    python=${PYTHON:-$(command -v python3.11 || command -v python3)}
  else
    echo "setup: please install: sudo apt-get install ${missing[*]}" >&2
    new_enough || refuse_python
    exit 1
  fi
  new_enough || { refuse_python; exit 1; } # the distribution's own may be older
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  rm -rf .venv
  "$python" -m venv .venv
fi
if ! cmp -s scripts/requirements.txt .venv/requirements.txt; then
  echo "setup: installing scripts/requirements.txt into .venv"
  .venv/bin/python -m pip install --quiet -r scripts/requirements.txt
  cp scripts/requirements.txt .venv/requirements.txt
fi
