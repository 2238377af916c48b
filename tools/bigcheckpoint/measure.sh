#!/usr/bin/env bash
# Loads a checkpoint of 1.2 GB, generates one token, and says how much anonymous memory that
# took at its peak, beside the size of the weights: until the weights were in their places, and
# until the end (with the expert cache, KV cache and activations touched as well): bash tools/bigcheckpoint/measure.sh [OFFLOAD_FRACTION...]
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
go build -o "$dir/moeserve" ./cmd/moeserve
go run ./tools/bigcheckpoint -o "$dir/model" -bytes 1.2e9
weights=$(cat "$dir"/model/*.safetensors | wc -c)
printf '%-9s %16s %16s %7s %16s %7s %8s\n' offloaded 'weights (bytes)' 'loading (bytes)' ratio 'run (bytes)' ratio seconds
for f in "${@:-0 0.5 1}"; do for fraction in $f; do
  start=$(date +%s.%N)
  "$dir/moeserve" run --model "$dir/model" --offload-fraction "$fraction" --max-tokens 1 --max-model-len 64 \
    --max-num-batched-tokens 64 --ignore-eos --quiet --log-level info "the expert" >/dev/null 2>"$dir/log" &
  pid=$! peak=0 loading=0
  while [ -r /proc/$pid/status ]; do
    now=$(awk '/^RssAnon/{print $2*1024}' /proc/$pid/status 2>/dev/null || true)
    [ -n "$now" ] && [ "$now" -gt "$peak" ] && peak=$now
    grep -q 'model loaded' "$dir/log" || loading=$peak
    sleep 0.005
  done
  wait $pid
  end=$(date +%s.%N)
  awk -v f="$fraction" -v w="$weights" -v l="$loading" -v p="$peak" -v s="$start" -v e="$end" \
    'BEGIN{printf "%-9s %16d %16d %7.3f %16d %7.3f %8.1f\n", f, w, l, l/w, p, p/w, e-s}'
done; done
