#!/usr/bin/env bash
# Builds the tests of the tag cuda as stripped, compressed binaries into a folder, to be carried to a
# machine with GPUs and run there by tools/cuda/run.sh:
#   tools/cuda/pack.sh FOLDER [PACKAGE...]
set -euo pipefail
out=${1:?the folder to pack into}
shift
out=$(mkdir -p "$out" && cd "$out" && pwd)
cd "$(dirname "$0")/../.."
if [ $# = 0 ]; then
  set -- ./device/cuda ./device/cuda/nvml ./device/cuda/nvrtc
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for package in "$@"; do
  name=$(echo "${package#./}" | tr / -)
  tools/cuda/go.sh test -c -tags cuda -o "$work/$name.test" "$package"
  tools/cuda/check.sh "$work/$name.test"
  strip "$work/$name.test"
  xz -T0 -6 -c "$work/$name.test" >"$out/$name.test.xz"
done
ls -l "$out"
