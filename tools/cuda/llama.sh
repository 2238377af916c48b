#!/usr/bin/env bash
# Experts on the CPU beside llama.cpp's, both with 16-bit weights of Mixtral's shape, on a machine with one GPU:
#   tools/cuda/llama.sh MOESERVE LLAMA-SOURCE FOLDER
# MOESERVE is the command built with the tag cuda, LLAMA-SOURCE a folder with llama.cpp's source (or ik_llama.cpp's). It is built in
# FOLDER/build for this GPU alone and without its FlashAttention, which needs cmake, nvcc and some minutes. FOLDER gets a
# file of random weights: 46 GB of 16 layers; in /dev/shm where it should not be read from a disk.
# LAYERS (default: 16) cuts the model, DEPTH (128) is the prompt's length, TOKENS (64) are decoded by one sequence, THREADS are
# llama.cpp's (several are separated by commas; default: all but an eighth), CHOICES those of --cpu-experts (default: off auto 1),
# HOST_GIB is the host's memory where the system says less. Where FOLDER/build/bin/llama-bench exists, nothing is built.
# Of both: tokens/s of decoding with half of the experts in host memory, and with all. llama.cpp has whole layers of experts there
# (--n-cpu-moe), moeserve a part of each layer's.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# = 3 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
moeserve=$(realpath "$1") source=$(realpath "$2")
mkdir -p "$3"
folder=$(realpath "$3")
layers=${LAYERS:-16} depth=${DEPTH:-128} tokens=${TOKENS:-64} cores=$(nproc)
threads=${THREADS:-$((cores - (cores + 7) / 8))}
command -v cmake >/dev/null || { echo "cmake is missing: install it to build llama.cpp" >&2; exit 2; }

bench=$folder/build/bin/llama-bench
if [ ! -x "$bench" ]; then
  start=$SECONDS
  cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_CUDA=ON -DGGML_CUDA_FA=OFF -DGGML_CUDA_NCCL=OFF \
    -DCMAKE_CUDA_ARCHITECTURES=90-real -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF >"$folder/build.log"
  cmake --build "$folder/build" --target llama-bench -j "$cores" >>"$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; exit 1; }
  echo "llama.cpp built in $((SECONDS - start)) s"
fi
model=$folder/mixtral-$layers.gguf
[ -e "$model" ] || { python3 "$root/tools/cuda/llama_gguf.py" "$source/gguf-py" "$root/configs/presets/mixtral-8x7b.json" "$layers" "$model.part" && mv "$model.part" "$model"; }

"$bench" -m "$model" -ngl 99 -ncmoe "$((layers / 2)),$layers" -t "$threads" -fa 0 -p 0 -n "$tokens" -d "$depth" -r 3 -o md
rm "$model" # moeserve makes its own weights, and needs the memory
for fraction in 0.5 1; do
  for choice in ${CHOICES:-off auto 1}; do
    echo "moeserve, $fraction of the experts in host memory, --cpu-experts $choice:"
    "$moeserve" bench throughput --device cuda --model mixtral-8x7b --load-format dummy --num-hidden-layers "$layers" --host-memory-gib "${HOST_GIB:-0}" \
      --offload-fraction "$fraction" --offload-tier host --cpu-experts "$choice" --num-prompts 1 --input-len "$depth" --output-len "$tokens" --trials 3
  done
done
