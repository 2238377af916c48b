# Sourced, not run: finds gcc and a cuda.h, prepares build/cuda, and exports the flags under which
# the tag cuda builds. Says what is missing and returns 1 where it cannot.
#
# CUDA_INCLUDE names the folder that holds cuda.h; else it is looked for in CUDA_HOME, CUDA_PATH, the
# usual places, and in the folders of NVIDIA's Python wheels (pip install nvidia-cuda-runtime-cu12).

moeserve_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

moeserve_cuda_include() {
  local site dir
  if [ -n "${CUDA_INCLUDE:-}" ]; then
    [ -f "$CUDA_INCLUDE/cuda.h" ] && echo "$CUDA_INCLUDE"
    return
  fi
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
  for dir in ${CUDA_HOME:+"$CUDA_HOME/include"} ${CUDA_PATH:+"$CUDA_PATH/include"} \
    /usr/local/cuda/include /opt/cuda/include /usr/include \
    ${site:+"$site/nvidia/cu13/include" "$site/nvidia/cuda_runtime/include"} \
    "$moeserve_root"/build/cuda/wheels/nvidia/cu13/include \
    "$moeserve_root"/build/cuda/wheels/nvidia/cuda_runtime/include; do
    if [ -f "$dir/cuda.h" ]; then
      echo "$dir"
      return
    fi
  done
}

moeserve_cuda_env() {
  local include dir sum cc=${CC:-gcc}
  if ! command -v "${cc%% *}" >/dev/null; then
    echo "no C compiler: install gcc, or name one by CC" >&2
    return 1
  fi
  include=$(moeserve_cuda_include)
  if [ -z "$include" ]; then
    echo "no cuda.h${CUDA_INCLUDE:+ in CUDA_INCLUDE=$CUDA_INCLUDE}: install a CUDA toolkit of version 12 or 13, or the headers alone by" >&2
    echo "  pip install --target build/cuda/wheels nvidia-cuda-runtime-cu12" >&2
    return 1
  fi
  sum=$(cat "$moeserve_root/device/cuda/internal/driver/shim/cuda.h" "$include/cuda.h" | cksum | cut -d' ' -f1)
  # A folder for each header, so that builds against several do not disturb each other. Its include/
  # holds a link to cuda.h alone: the toolkit's own folder has an nvml.h that would take the place of
  # go-nvml's, since these flags reach every cgo package.
  dir=$moeserve_root/build/cuda/$sum
  if [ ! -e "$dir/lib/libcuda.a" ]; then
    mkdir -p "$dir/include" "$dir/lib"
    ln -sfn "$include/cuda.h" "$dir/include/cuda.h"
    # An empty archive answers package cu's -lcuda; package driver has the symbols.
    printf '!<arch>\n' >"$dir/lib/libcuda.a.$$"
    mv "$dir/lib/libcuda.a.$$" "$dir/lib/libcuda.a"
  fi
  export CGO_ENABLED=1
  # The shim comes before the toolkit's header. Go's build cache looks at flags and not into the folders
  # behind them: the checksum makes it see another header.
  export CGO_CFLAGS="-O2 -g -I$moeserve_root/device/cuda/internal/driver/shim -I$dir/include -DMOESERVE_CUDA_HEADERS=$sum -Wno-deprecated-declarations"
  # Before the folders that package cu adds, in which a libcuda.so may lie. Lazy: go-nvml leaves its
  # symbols open until NVML is loaded, and a compiler that binds at start would end the program there.
  export CGO_LDFLAGS="-O2 -g -L$dir/lib -Wl,-z,lazy"
  export MOESERVE_CUDA_INCLUDE=$include
}

moeserve_cuda_env
