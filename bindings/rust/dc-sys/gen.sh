#!/bin/sh
# Makes src/bindings.rs from include/dc_api.h with bindgen: gen.sh [--check]. --check compares instead of writing.
set -eu
cd "$(dirname "$0")"
header=../../../include/dc_api.h
target=src/bindings.rs
made=$(mktemp)
trap 'rm -f "$made"' EXIT
bindgen "$header" --allowlist-function 'dc_.*' --allowlist-type 'dc_.*' --allowlist-var 'DC_.*' --no-doc-comments \
  --with-derive-default --size_t-is-usize --default-enum-style consts --no-prepend-enum-name --rust-target 1.47 \
  --disable-header-comment --raw-line '// Made by gen.sh from dc_api.h.' -- -std=c11 >"$made"
# Fields and arguments that hold an enum's value are int32_t; an enum without negative members is unsigned in C.
sed -i 's/^pub type \(dc_[a-z_]*\) = ::std::os::raw::c_u\{0,1\}int;/pub type \1 = i32;/' "$made"
if [ "${1:-}" = --check ]; then
  diff -u "$target" "$made" && echo "dc-sys/$target is what bindgen makes of dc_api.h"
else
  cp "$made" "$target"
fi
