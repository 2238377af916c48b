#!/usr/bin/env bash
# Fails unless a binary built with the tag cuda needs no driver to start:
#   tools/cuda/check.sh BINARY...
set -euo pipefail
bad=0
for binary in "$@"; do
  if needed=$(readelf -d "$binary" | grep -E 'NEEDED.*lib(cuda|cudart|nvidia-ml|nvrtc|cublas)'); then
    echo "$binary: a driver's library is linked instead of opened at run time:" >&2
    echo "$needed" >&2
    bad=1
  fi
  # go-nvml links with unresolved symbols ignored, which hides a driver call without a trampoline until
  # the call is made.
  if open=$(nm -u "$binary" | grep -oE '\bcu[A-Z][A-Za-z0-9_]*' | sort -u); then
    echo "$binary: driver calls without a trampoline: add them to device/cuda/internal/driver/symbols.txt and run go generate there:" >&2
    echo "$open" >&2
    bad=1
  fi
  if readelf -d "$binary" | grep -qE 'BIND_NOW|FLAGS.*NOW'; then
    echo "$binary: is bound at start (-z now), and go-nvml's symbols are open until NVML is loaded" >&2
    bad=1
  fi
done
exit $bad
