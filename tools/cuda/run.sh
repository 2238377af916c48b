#!/usr/bin/env bash
# Runs packed tests (tools/cuda/pack.sh) on a machine with GPUs and prints a table:
#   tools/cuda/run.sh FOLDER [LOGS]
# BENCH=1 adds the benchmarks of device/cuda; RUN is a pattern for -test.run.
set -uo pipefail
folder=$(cd "${1:?the folder that pack.sh filled}" && pwd)
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export MOESERVE_CUDA_TEST=gpu
# A python3 that is a wrapper hides where its packages lie.
if [ -z "${MOESERVE_CUDA_LIBRARIES:-}" ]; then
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
  for dir in /usr/local/cuda/lib64 ${site:+"$site"/nvidia/cu13/lib "$site"/nvidia/*/lib}; do
    [ -d "$dir" ] && MOESERVE_CUDA_LIBRARIES=${MOESERVE_CUDA_LIBRARIES:+$MOESERVE_CUDA_LIBRARIES:}$dir
  done
  export MOESERVE_CUDA_LIBRARIES
fi
nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader || true
nvidia-smi topo -m 2>/dev/null | head -20 || true
failed=0
table=""
for packed in "$folder"/*.test.xz; do
  name=$(basename "$packed" .test.xz)
  xz -dc "$packed" >"$name.test" && chmod +x "$name.test" || { failed=1; continue; }
  begin=$(date +%s)
  timeout 300 "./$name.test" -test.v -test.timeout 280s ${RUN:+-test.run "$RUN"} >"$logs/$name.log" 2>&1
  code=$?
  grep -E '^\s*--- FAIL|^panic|^fatal|_test.go:[0-9]+:' "$logs/$name.log" | head -60
  table+=$(printf '%-24s exit %d  %3d passed  %3d failed  %3d skipped  %d s' "$name" $code \
    "$(grep -cE '^\s*--- PASS' "$logs/$name.log")" "$(grep -cE '^\s*--- FAIL' "$logs/$name.log")" \
    "$(grep -cE '^\s*--- SKIP' "$logs/$name.log")" $(($(date +%s) - begin)))$'\n'
  [ $code = 0 ] || failed=1
done
if [ -n "${BENCH:-}" ] && [ -x device-cuda.test ]; then
  timeout 240 ./device-cuda.test -test.run '^$' -test.bench . -test.benchtime 300ms 2>&1 | tee "$logs/bench.log"
fi
echo
printf '%s' "$table"
exit $failed
