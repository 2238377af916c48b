#!/usr/bin/env bash
# Holds the build scripts to what they promise: they say what is missing, keep all but cuda.h off the
# include path, see another header, and find a driver call without a trampoline and a linked driver;
# and runs the tests of the scripts that measure.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
expect() { # WHAT WANTED COMMAND...: the command fails and says WANTED
  local what=$1 wanted=$2 said
  shift 2
  if said=$("$@" 2>&1); then
    echo "$what: no failure" >&2
    bad=1
  elif ! grep -qF -- "$wanted" <<<"$said"; then
    echo "$what: says '$said', not '$wanted'" >&2
    bad=1
  fi
}
expect "no header" "no cuda.h in CUDA_INCLUDE=$work" env CUDA_INCLUDE="$work" bash -c '. tools/cuda/env.sh'
expect "no compiler" "no C compiler" env CC=no-such-compiler bash -c '. tools/cuda/env.sh'

. tools/cuda/env.sh
mkdir "$work/include"
{ cat "$MOESERVE_CUDA_INCLUDE/cuda.h"; echo '/* another */'; } >"$work/include/cuda.h"
echo '#error "the folder beside cuda.h is on the include path"' >"$work/include/nvml.h"
flags=$CGO_CFLAGS
other=$(CUDA_INCLUDE="$work/include" bash -c '. tools/cuda/env.sh && echo "$CGO_CFLAGS"')
[ "$flags" != "$other" ] || { echo "another header gives the same flags" >&2; bad=1; }
if printf '#include <nvml.h>\n' | gcc -E $other -x c - -o /dev/null 2>&1 | grep -q 'is on the include path'; then
  echo "nvml.h beside cuda.h is found" >&2
  bad=1
fi
# The calls whose signatures CUDA 13 changed, as package cu makes them.
cat >"$work/calls.c" <<'C'
#include <cuda.h>
CUresult calls(CUcontext *context, CUdevice device, CUdeviceptr at, CUstream stream, CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *n) {
  CUresult r = cuCtxCreate(context, 0u, device);
  r |= cuMemAdvise(at, *n, CU_MEM_ADVISE_SET_READ_MOSTLY, device);
  r |= cuMemPrefetchAsync(at, *n, device, stream);
  r |= cuGraphAddDependencies(graph, from, to, *n);
  return r | cuGraphGetEdges(graph, from, to, n);
}
C
gcc -fsyntax-only -Wall -Werror $flags "$work/calls.c" || { echo "the shim does not give cu's signatures" >&2; bad=1; }

echo 'int cuNoSuchCall(void); int main(void) { return cuNoSuchCall(); }' >"$work/open.c"
gcc -no-pie -Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files -o "$work/open" "$work/open.c"
expect "a call without a trampoline" "cuNoSuchCall" tools/cuda/check.sh "$work/open"
echo 'int cuInit(unsigned f) { return f; }' | gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -x c - -o "$work/libcuda.so"
echo 'int cuInit(unsigned); int main(void) { return cuInit(0); }' | gcc -x c - -L"$work" -lcuda -o "$work/linked"
expect "a linked driver" "libcuda.so.1" tools/cuda/check.sh "$work/linked"
echo 'int main(void) { return 0; }' | gcc -x c - -Wl,-z,now -o "$work/now"
expect "bound at start" "bound at start" tools/cuda/check.sh "$work/now"
for script in tools/cuda/*.sh; do
  bash -n "$script" || bad=1
done
expect "a part that there is not" "gpu.sh run FOLDER LOGS" bash tools/cuda/gpu.sh run "$work" "$work/logs" no-such-part
if command -v python3 >/dev/null; then
  python3 -B tools/cuda/test_measure.py -q || bad=1
else
  echo "no python3: what measures is not tested"
fi
[ $bad = 0 ] && echo "the build scripts hold"
exit $bad
