#!/usr/bin/env bash
# All tests and measurements that need a GPU, in two halves:
#   tools/cuda/gpu.sh build FOLDER [COMMIT]   builds and packs what has to run, without a GPU; of COMMIT what guard compares with
#   tools/cuda/gpu.sh run FOLDER LOGS PART... runs it on a machine with a GPU and this tree, and prints a table
# Without PART: all parts from device to sanitize, except those that name two GPUs, whole-mixtral, cpu-experts, small, beside, gaps, layout, kvcopy, prompts, prefill, latency, policy and load. LOGS gets at most 8 files.
#   device        device/cuda: conformance, NVML, NVRTC; experts, kvcache, pipeline and engine on it
#   kernels       every kernel against its reference, small shapes; those for sm_80; start, cold and warm
#   kernels-full  the same at the shapes of the models
#   exact         fixtures: same routing, own routing compared with transformers in bfloat16, greedy tokens;
#                 equal tokens over fractions, faults, batch sizes, neighbors; a lost device; no memory
#   apart         kernels without overlap (--overlap-kernels=false): same routing and equal tokens as in exact; Qwen1.5-MoE
#                 and Mixtral with all layers generate the same tokens with and without overlap
#   cli           moeserve run on fixtures, the built-in model and a preset; what it says to bad input;
#                 collect-env beside nvidia-smi; run and serve whose device is lost
#   layers        one layer of every preset compared with PyTorch
#   whole         Qwen1.5-MoE with all layers, at 0, 50 and 100 % in host memory
#   whole-mixtral the same of Mixtral: 93 GB, of which host memory must hold up to 84 GiB
#   cpu-experts   experts in host memory computed on the CPU: GB/s of weights read by threads and rows; decode steps of presets with
#                 half of the experts in host memory, of 1 and 8 sequences, with --cpu-experts off, auto (also without dividing experts), 0.5 and 1, whose logits are
#                 compared; fails where auto is 3 % slower than off or a fraction: CPU_EXPERTS are the presets (default: qwen1.5-moe-a2.7b@0.5 mixtral-8x7b@0.5), LAYERS cuts them; CPU_CHOICES are the values of --cpu-experts
#   tiers         two GPUs: devicetest's peer part; fixtures with experts on the second GPU, whose memory is
#                 revoked meanwhile; Qwen1.5-MoE, and Mixtral with half of its experts, in host memory and on the second GPU
#                 (TIERS=tests: without these two)
#   access        decode steps of 1 to 8 sequences of Qwen1.5-MoE, Qwen3-30B-A3B and Mixtral (cut to 16 layers) with half of the
#                 experts in host memory, and with two GPUs on the second one: copied, read in place, and by the model
#                 (--expert-access); equal tokens. ACCESS are models of these (default: all); about 6 minutes on one GPU. LAYERS cuts them
#                 all (0: whole; Mixtral then takes 47 GB of each GPU or of host memory beside it, and 93 GB of the first GPU at 0), ACCESS_CELLS
#                 are other cells of TestGPUPresets than 0,0.5c,0.5d,0.5 and with two GPUs 0.5pc,0.5pd,0.5p, ACCESS_BATCHES other sequences than
#                 1,2,4,8; ACCESS_TEST=off skips the test of equal tokens
#   multipath-tests  two to eight GPUs: copies between the host and each GPU over all their PCIe links, byte for byte, with relays that
#                 are removed meanwhile; rates and processor time by the number of relays; equal tokens of fixtures whose experts come over two links
#   sweep         two GPUs: Mixtral with all layers, 324 and 3,240 sequences, at 0, 50 and 100 % on the host and on the second
#                 GPU; the other plans of a step; a trace of eight layers
#   predicted     two GPUs: memory planned and used; bench transfer, and with the rates that it measures the predictions
#                 for a sweep of Qwen1.5-MoE and for a policy of the planner for Mixtral
#   guard         two GPUs, four minutes: decode steps of 1 to 324 sequences (Mixtral: 3,240) of Mixtral, Qwen1.5-MoE and
#                 Qwen3-30B-A3B in HBM and with half of the experts on the second GPU (Mixtral: all, too), and of 1 and 8 of the
#                 first two with half of them in host memory, as shares of what plain copies and the same step in HBM allow;
#                 fails where a share is less than 97 % of that in guard.json (guard-h100.json on H100; there Mixtral is
#                 cut to 16 layers, as 32 do not fit). Cells that are not recorded are printed and counted.
#                 Where the bundle has a COMMIT, its steps are measured on the same machine too, and a step that takes more
#                 than 3 % longer than its is a failure: twice the time. GUARD_MODELS are some of the presets (default:
#                 mixtral-8x7b qwen1.5-moe-a2.7b qwen3-30b-a3b).
#                 It runs before and after every change of pipeline, experts, transfer, harvest, kvcache, device/cuda
#                 and kernels/cuda; GUARD_RECORD=COMMIT writes all cells as LOGS/recorded.json, too
#   soak          two GPUs: serve under full load for SOAK (default: 1m), with KV tiers, clients that leave, hostile clients, and
#                 a neighbor that takes and returns the second GPU's memory: every answer as alone, and all memory comes back;
#                 SOAK_SEED draws the policies
#   reclaim       two GPUs, PyTorch: a process that knows nothing of moeserve gets borrowed memory of the second GPU in one
#                 call; moeserve reclaim; two moeserve processes on one peer (PARTS='one two', LAYERS, MODEL)
#   preload       two GPUs, PyTorch, transformers, under 4 minutes: programs that know nothing of moeserve copy over the links of
#                 both GPUs (preload/multipath): rates, the same bytes, order, graphs, threads, forks, a relay that is lost or
#                 full; PRELOAD are parts of multipath.py, RATE is the engine's own rate to compare with (GB/s).
#                 PRELOAD=vllm MODEL=FOLDER measures vLLM's sleep mode with and without the library, where vLLM is installed:
#                 FOLDER has a config.json, and weights are dummies; about 2 minutes
#   bench         times of kernels and of the device
#   small         decode steps of 1, 8 and 64 sequences with all experts in GPU memory: time and share of the roofline (SMALL are the
#                 presets, default: Qwen1.5-MoE, Qwen3-30B-A3B, Mixtral, 95 GB); then of one layer and of each of its operations, at
#                 contexts of 100 and 1,000 tokens
#   sanitize      compute-sanitizer over the kernels' small shapes
#   beside        moeserve compared with transformers: BESIDE are arguments for beside.py (--cells, --budget, --resume …),
#                 BESIDE_OUT is the file of results
#   gaps          how long the GPU is idle between the kernels of a decode step, and the critical path of a layer: GAPS are models
#   layout        decode attention over KV blocks that hold all layers, compared with an array per layer; 72 GiB of GPU memory
#   kvcopy        copies of 1,000 scattered blocks from 4 KiB to 16 MiB between host, GPU and, with two GPUs, peer: queued, batched,
#                 and by a kernel; 8 GiB of each memory
#   prompts       attention of prompts of 4K to 128K tokens, of chunks of them and of decode steps, compared with FlashAttention 3 where
#                 vLLM is installed (flash.py; else PyTorch); 24 GiB of GPU memory. PROMPT_TOKENS is the longest prompt
#   prefill       the whole prefill of one prompt of 32,000 tokens (bench prefix), with all experts in GPU memory, with half of them on the
#                 second GPU where there is one, and with half in host memory, in steps of at most 8,192 and 32,768 tokens: whole Mixtral,
#                 on H100 of 80 GB cut to 16 layers (LAYERS; 0: all); 50 GiB of host memory. PREFILL_MODEL, PREFILL_LEN, PREFILL_TOKENS (8192 32768) and
#                 PREFILL_TIERS (none peer host) change what is measured, PREFILL_LIMIT is the seconds of each of the six (default: 95);
#                 LOGS/measured.tar has the results. prefill.py compares whole prompts with vLLM, without this script
#   latency       two GPUs: what one copy of one run takes as the host sees it, by ways to learn of its end; what
#                 small copies and kernels take beside large copies; where the time of a request goes whose prefix is in the GPU's memory
#   kv            two GPUs: loads of KV blocks from the host and the second GPU (bench kv), copies of blocks by size, by copy
#                 engines and by a kernel on KV_THREAD_BLOCKS thread blocks (4 and 64), a calibration by these, and loads with
#                 it; 12 GiB of each memory
#   kvtiers       two GPUs: conversations in a tiny KV cache with tiers on the second GPU, in host memory and in files, where
#                 another process takes the second GPU's memory meanwhile: equal tokens
#   lending       tokens while memory moves between the KV cache and experts at random; then a load that shifts from experts to
#                 KV blocks and back, over fixed splits of the GPU's memory and --kv-experts-share auto: SHIFT are the splits
#                 (default: 160,128,96,auto96, of Mixtral cut to 8 layers; about 2 minutes each); LENDING=GPULending: the tokens alone
#   prefix        two GPUs: time to first token by where the prompt's KV cache is (bench prefix): PREFIX are its arguments
#                 (default: Phi-3.5-MoE cut to 8 layers, 1,024 to 90,000 tokens, all places), NAME that of the files in measured.tar,
#                 FILES the folder of the tier in files (default: /dev/shm where it has 32 GiB, else that for temporary files)
#   hits          two GPUs: throughput by the fraction of prompts that are found, in each place (bench prefix --hits): HITS,
#                 NAME and FILES as above (default: Mixtral cut to 8 layers, 10,000 requests of 512 tokens)
#   fairness      two GPUs: what scheduling policies give each request, by where KV blocks of preempted sequences are kept
#                 (bench fairness): FAIRNESS and NAME as above (default: Mixtral cut to 8 layers)
#   links         two to eight GPUs, half a minute on two: the rates of all links, alone and at once; which share a root; a static split
#                 over 1, 2, … paths, and copies over one relay by chunk size and buffers (bench multipath): LINKS are its arguments, RELAYS the
#                 other GPUs (default: all)
#   host-paths    two GPUs: decode throughput with experts in host memory, over one PCIe link and over those of both GPUs, and on the
#                 second GPU (bench sweep): Qwen1.5-MoE over all fractions, and Mixtral with half of its experts offloaded, 324
#                 sequences each; PATHS_MODELS some of these, HARDWARE a calibrated file (calibrate); about 4 minutes
#   sleep         two GPUs: equal tokens after each level of sleep; sleep and wake of a model by level, with the share of copies,
#                 and switches between two models (bench sleep): SLEEP and NAME as above (default: Qwen1.5-MoE and Mixtral with all layers, with all experts resident
#                 and with half of them offloaded, and switches between Qwen1.5-MoE and Qwen3-30B-A3B); about 8 minutes, and host
#                 memory of twice the weights
#   multipath     two to eight GPUs, about two minutes on two: the figures of the MMA paper with the engine (bench multipath): MULTIPATH are
#                 its arguments, RELAYS as above; FIGURES some of its parts (default: sizes,gpus,traffic,engines,cpu,chunks,threshold,direct)
#   policy        three minutes: bench throughput of Qwen1.5-MoE and Mixtral, cut to 8 layers, half of the experts in host memory, with
#                 --policy auto and with a grid of given policies: the best of them, auto, and the ratio; fails where auto is more than 5 %
#                 slower (policy.py). POLICY are presets (separated by spaces, empty: the built-in model), LAYERS cuts them (0: whole), POLICY_LIMIT are the seconds of all (default: 170)
#   calibrate     two to eight GPUs, about a minute on two: bench transfer --calibrate, into LOGS/machine.json; RELAYS as above
#   figures       two GPUs: the Harvest paper's figures (bench figure), with its batch of 4,536 sequences: PAPER are some of 3, 5, 6 and regime
#                 (default: all): 3 takes 20 s; 5, half of the experts offloaded, 5 trials behind 50 tokens, about 5.5 minutes for Mixtral and
#                 (an estimate) for Phi-3.5-MoE, 1.5 for Qwen1.5-MoE, 1 for Phi-tiny-MoE; 6, three fractions and 2 trials, 7 minutes for Mixtral,
#                 2 for Qwen1.5-MoE, 1 for Phi-tiny-MoE; regime, Mixtral with attention on the CPU and experts per micro-batch as in the
#                 paper, 8 minutes (an estimate). PAPER_MODELS are the models, PAPER_FRACTIONS those of 6, MTBENCH a file of MT-Bench's
#                 prompts, for which the models have to be folders with a tokenizer, PAPER_LIMIT the
#                 seconds of each (default: 580). LOGS/figures.tar has results, figures and finished cells; in a folder that PAPER_RESUME
#                 names, the latter are not measured again
#   harvest       two GPUs, PyTorch, about 5 minutes (estimate): Mixtral with half of its experts on the second GPU, while a PyTorch process takes
#                 memory there in steps (bench harvest): throughput over time, memory released in time, equal tokens, and what that process's
#                 work loses: 324 sequences, and 8 with experts copied and read in place. HARVEST are cells SEQUENCES:ACCESS (default:
#                 324:copy 8:copy 8:direct), HARVEST_MODEL, HARVEST_STEPS and HARVEST_EVERY others of its arguments,
#                 HARVEST_TENANT those of tools/cuda/tenant.py (--piece 2: it allocates 2 GiB at a time)
#   eight         two to eight GPUs, under nine minutes on eight (estimate): what several links and several peers give (links and
#                 multipath, with fewer parts and rounds; sleep and wake of Mixtral over all links), and Mixtral with half of its experts
#                 on all other GPUs, of which one is taken back every second (moeserve reclaim): throughput, equal tokens. EIGHT is the
#                 model, EIGHT_LIMIT the seconds of each piece, EIGHT_LEN the tokens that each of its 324 sequences generates (default: 150), EIGHT_PARTS some of links, copies,
#                 sleep and harvest; RELAYS as above (without GPUs it must be given, and EIGHT_GIB, the GiB that are to be free on each)
#                 EMULATE, a value of --emulate, tries figures, harvest, eight, policy and prefill without GPUs, with PAPER_FLAGS, HARVEST_FLAGS, EIGHT_FLAGS and POLICY_FLAGS as further arguments
#   load          loading a checkpoint of Qwen1.5-MoE's shape, written to LOAD_FOLDER (29 GB), as a share of the disk's
#                 rate; LOAD are arguments for load.py
# HOST_GIB is the host's memory, for machines whose system reports less. With OVERLAP=false the parts that run node's
# tests or moeserve disable the overlap of kernels (--overlap-kernels=false).
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage

build() {
  set -e
  out=$(mkdir -p "$1" && cd "$1" && pwd)
  cd "$root"
  work=$(mktemp -d)
  trap 'rm -rf "$work"; git -C "$root" worktree prune' EXIT
  for package in device/cuda device/cuda/nvml device/cuda/nvrtc transfer kernels/cuda kernels/cuda/internal/cublaslt kernels/cpu kvcache experts pipeline engine node cmd/moeserve; do
    tools/cuda/go.sh test -c -tags cuda -o "$work/${package//\//-}.test" "./$package"
  done
  tools/cuda/go.sh build -tags cuda -trimpath -buildvcs=auto -o "$work/moeserve" ./cmd/moeserve
  CGO_ENABLED=0 "${GO:-go}" build -trimpath -o "$work/bigcheckpoint" ./tools/bigcheckpoint
  if [ -n "${2:-}" ]; then
    git worktree add -q --detach "$work/base" "$2"
    mkdir -p "$work/base/build"
    ln -s "$root/build/cuda" "$work/base/build/cuda"
    (cd "$work/base" && tools/cuda/go.sh test -c -tags cuda -o "$work/node-base.test" ./node)
    git worktree remove --force "$work/base"
  fi
  tools/cuda/check.sh "$work"/*
  strip "$work"/*
  gcc -O1 -Wall -Wextra -Werror -shared -fPIC -o "$work/lose.so" tools/cuda/lose.c -ldl -pthread
  gcc -O2 -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -o "$work/reclaim.so" preload/reclaim.c -ldl
  gcc -O2 -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -pthread -o "$work/multipath.so" preload/multipath/*.c -ldl
  gcc -O2 -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -pthread -o "$work/lose_relay.so" tools/cuda/lose_relay.c preload/multipath/*.c -ldl
  # They have much in common, which one archive with a large dictionary holds once.
  tar -cf - -C "$work" --sort=name . | xz --lzma2=preset="${PRESET:-2}",dict=192MiB >"$out/bundle.tar.xz"
  du -h "$out/bundle.tar.xz"
}

# limit SECONDS PACKAGE-FOLDER LOG NAME COMMAND...: runs in the package's folder, and adds a line to the table. Tests that
# hang end a little sooner, with the stack of every goroutine.
limit() {
  local seconds=$1 folder=$2 log=$logs/$3.log name=$4 begin end code lines arg
  shift 4
  for arg in "$@"; do
    case $arg in */*.test) set -- "$@" "-test.timeout=$((seconds - 3))s" ;; esac
  done
  lines=$(wc -l 2>/dev/null <"$log" || echo 0)
  { echo "=== $name: $*"; } >>"$log"
  begin=$(date +%s.%N)
  (cd "$root/$folder" && exec timeout -k 5 "$seconds" "$@") >>"$log" 2>&1
  code=$?
  end=$(date +%s.%N)
  tail -n +$((lines + 1)) "$log" >"$work/said"
  # A part of which every test has skipped has shown nothing.
  if [ $code = 0 ] && grep -qE '^ *--- SKIP' "$work/said" && ! grep -qE '^ *--- PASS' "$work/said"; then
    code=99
    echo "FAILED: every test of $name skipped" >>"$work/said"
  fi
  printf '%-26s %-7s %5d passed %4d failed %3d skipped %7.1f s\n' "$name" "$([ $code = 0 ] && echo ok || echo "exit $code")" \
    "$(grep -cE '^ *--- PASS' "$work/said")" "$(grep -cE '^ *--- FAIL' "$work/said")" "$(grep -cE '^ *--- SKIP' "$work/said")" \
    "$(echo "$end $begin" | awk '{print $1-$2}')" | tee -a "$logs/table.log"
  if [ $code != 0 ]; then
    failed=1
    grep -E '_test.go:[0-9]+:|^ *--- FAIL|^panic|^fatal|^FAILED|rror' "$work/said" | cut -c1-300 | head -${SHOW:-25}
  fi
}

# measure NAME COMMAND ARGUMENTS...: a bench command, with the second GPU as peer if there is one; prints its table, and adds its
# files to measured.tar.
measure() {
  local name=$1 plot=() peers=()
  [ -z "$(relays)" ] || peers=(--peers 1)
  [ "$2" != prefix ] || plot=(--csv "$work/$name.csv")
  # What misses cost, and what copies cost decodes, are tables alone.
  [[ "$2" != prefix || " $* " == *" --misses "* || " $* " == *" --decodes "* ]] || plot+=(--plot "$work/$name.svg")
  limit "${MEASURE_LIMIT:-570}" . kv "$name" "$work/moeserve" bench "$2" --device cuda "${peers[@]}" --host-memory-gib "$host" "${@:3}" \
    --json "$work/$name.json" "${plot[@]}"
  tee -a "$logs/table.log" <"$work/said"
  (cd "$work" && tar -rf "$logs/measured.tar" "$name".*)
}

# relays are the GPUs whose links copies of the first one may use.
relays() { echo "${RELAYS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tail -n +2 | paste -sd,)}"; }

# paths NAME ARGUMENTS...: bench multipath with RELAYS as relays; prints its table, and adds its files to measured.tar.
paths() {
  local name=$1
  mkdir -p "$work/$name"
  limit "${MEASURE_LIMIT:-570}" . multipath "$name" "$work/moeserve" bench multipath --device cuda --peers "$(relays)" --host-memory-gib "$host" "${@:2}" \
    --json "$work/$name/$name.json" --plots "$work/$name"
  tee -a "$logs/table.log" <"$work/said"
  (cd "$work" && tar -rf "$logs/measured.tar" "$name")
}

# hardware is the profile of this machine's GPUs, or that which HARDWARE names.
hardware() {
  if [ -n "${HARDWARE:-}" ]; then echo "$HARDWARE"; elif [[ $gpu == *H100* ]]; then echo h100-80; else echo h200; fi
}

# devices PEERS are the flags that name what figures, harvest, eight, policy and prefill run on; PEERS is 1 by default.
devices() {
  local peers=${1:-1}
  if [ -n "${EMULATE:-}" ]; then echo "--device cpu --peers $peers --emulate $EMULATE"; else echo "--device cuda --peers $peers --host-memory-gib $host --hardware $(hardware)"; fi
}

# figure NUMBER NAME ARGUMENTS...: a figure of the Harvest paper, with its results and finished cells, in $work/paper.
figure() {
  local number=$1 name=figure-$2 model=()
  shift 2
  [ "$number" = 3 ] || model=(--load-format dummy --max-num-batched-tokens 32768 --resume "$paper/$name.cells")
  limit "${PAPER_LIMIT:-580}" . cli "$name" "$work/moeserve" bench figure "$number" "$@" $(devices) "${model[@]}" ${PAPER_FLAGS:-} \
    --json "$work/paper/$name.json" --plot "$work/paper/$name.svg"
  tee -a "$logs/table.log" <"$work/said"
}

# files is a folder for the tier in files, in memory where there is room.
files() {
  local free
  free=$(df -BG --output=avail /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9)
  if [ -n "${FILES:-}" ]; then echo "$FILES"; elif [ "${free:-0}" -ge 32 ]; then echo /dev/shm; else echo "${TMPDIR:-/tmp}"; fi
}

run() {
  folder=$(cd "$1" && pwd)
  logs=$(mkdir -p "$2" && cd "$2" && pwd)
  shift 2
  [ $# -gt 0 ] || set -- device kernels exact cli layers kernels-full whole bench sanitize
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  for part in "$@"; do
    [[ " device kernels kernels-full exact apart cli layers whole whole-mixtral cpu-experts tiers access multipath-tests sweep predicted guard soak reclaim preload bench small sanitize beside gaps layout kvcopy prompts prefill latency kv kvtiers lending prefix hits fairness links host-paths sleep multipath policy calibrate figures harvest eight load " == *" $part "* ]] || usage
  done
  [ -e "$folder/bundle.tar.xz" ] || { echo "there is no $folder/bundle.tar.xz: tools/cuda/gpu.sh build makes it" >&2; exit 2; }
  xz -dc "$folder/bundle.tar.xz" | tar -xf - -C "$work" || exit 1
  export MOESERVE_CUDA_TEST=gpu
  if [ -z "${MOESERVE_CUDA_LIBRARIES:-}" ]; then
    # A python3 that is a wrapper hides where its packages lie.
    site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
    for dir in ${site:+"$site"/nvidia/cu13/lib "$site"/nvidia/*/lib} /usr/local/cuda/lib64; do
      [ -d "$dir" ] && MOESERVE_CUDA_LIBRARIES=${MOESERVE_CUDA_LIBRARIES:+$MOESERVE_CUDA_LIBRARIES:}$dir
    done
    export MOESERVE_CUDA_LIBRARIES
  fi
  { nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv,noheader; free -g | sed -n 2p; nproc; } 2>&1 | tee -a "$logs/table.log"
  # A driver without a client puts the GPU to sleep, and every process then waits for it to wake.
  [ -r /dev/nvidia0 ] && exec 9</dev/nvidia0
  failed=0
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)
  host=${HOST_GIB:-0}
  overlap=()
  if [ -n "${OVERLAP:-}" ]; then
    overlap=(-overlap="$OVERLAP")
    export MOESERVE_OVERLAP_KERNELS=$OVERLAP
  fi
  if [[ " $* " == *" exact "* ]] && python3 -c 'import torch, transformers' 2>/dev/null; then
    # It takes a while to start: beside the other tests.
    python3 "$root/tools/cuda/reference_bf16.py" "$work/reference.json" >>"$logs/node.log" 2>&1 &
    reference=$!
  fi
  for part in "$@"; do
    case $part in
      device)
        limit 120 device/cuda device device "$work/device-cuda.test" -test.v
        limit 60 device/cuda/nvml device nvml "$work/device-cuda-nvml.test" -test.v
        limit 60 device/cuda/nvrtc device nvrtc "$work/device-cuda-nvrtc.test" -test.v
        limit 60 kernels/cuda/internal/cublaslt device cublaslt "$work/kernels-cuda-internal-cublaslt.test" -test.v
        for package in experts kvcache pipeline engine; do
          limit 60 $package device $package "$work/$package.test" -test.v -test.run GPU
        done ;;
      kernels) limit 200 kernels/cuda kernels kernels "$work/kernels-cuda.test" -test.v -test.run 'GPU|NewRefuses' ;;
      kernels-full) limit 200 kernels/cuda kernels kernels-full "$work/kernels-cuda.test" -test.v -test.run 'TestGPU$' -full ;;
      exact)
        compare=()
        if [ -n "${reference:-}" ] && wait "$reference"; then compare=(-reference "$work/reference.json"); fi
        limit 60 node node same-routing "$work/node.test" "${overlap[@]}" -test.v -test.run GPUSameRouting
        limit 60 node node own-routing "$work/node.test" "${overlap[@]}" -test.v -test.run GPUOwnRouting "${compare[@]}"
        [ ${#compare[@]} -gt 0 ] || echo "not compared with transformers: no torch here" | tee -a "$logs/table.log"
        limit 60 node node same-tokens "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUSameTokens|GPUBatchInvariant|GPUGraphs|GPUNoGarbage'
        limit 60 node node lost-memory-built-in "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPULost|GPUOutOfMemory|GPUBuiltIn' ;;
      apart)
        limit 60 node node apart-same-routing "$work/node.test" -overlap=false -test.v -test.run GPUSameRouting
        limit 60 node node apart-same-tokens "$work/node.test" -overlap=false -test.v -test.run 'GPUSameTokens|GPUBatchInvariant|GPUGraphs|GPUNoGarbage'
        limit 180 node presets apart-whole "$work/node.test" -test.v -test.run GPUPresets -whole 'qwen1.5-moe-a2.7b@0,0a mixtral-8x7b@0,0a' \
          -batches 1,324 -host-gib "$host" -steps "$logs/presets.json" ;;
      cli) limit 300 . cli cli python3 "$root/tools/cuda/gpu.py" cli "$work/moeserve" "$work/lose.so" ;;
      layers) limit 180 node node layers env TMPDIR="$work" "$work/node.test" "${overlap[@]}" -test.v -test.run GPULayers -python python3 ;;
      whole) limit 150 node presets whole-qwen "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -whole 'qwen1.5-moe-a2.7b@0,0.5,1' -host-gib "$host" -steps "$logs/presets.json" ;;
      whole-mixtral) limit 280 node presets whole-mixtral "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -whole 'mixtral-8x7b@0,0.5,1' -host-gib "$host" -steps "$logs/presets.json" ;;
      cpu-experts)
        limit 240 kernels/cpu bench cpu-experts-kernel "$work/kernels-cpu.test" -test.run '^$' -test.bench Experts -test.benchtime 30x
        grep '^Benchmark' "$work/said" | tee -a "$logs/table.log"
        for preset in ${CPU_EXPERTS:-qwen1.5-moe-a2.7b@0.5 mixtral-8x7b@0.5}; do
          limit 400 node presets "cpu-experts-${preset%%-*}" "$work/node.test" -test.v -test.run GPUCPUExperts -whole "$preset" \
            -cpu-experts "${CPU_CHOICES:-off auto auto-whole 0.5 1}" -batches 1,8 -layers "${LAYERS:-0}" -host-gib "$host"
          grep -o -- '--cpu-experts .*' "$work/said" | tee -a "$logs/table.log"
        done ;;
      tiers)
        limit 120 device/cuda device device-peers "$work/device-cuda.test" -test.v -test.run 'Conformance|SideBySide|PeerAccess'
        limit 120 node node tiers "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUTiers' -peer 1
        [ "${TIERS:-}" != tests ] || continue
        limit 200 node presets tiers-qwen "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -peer 1 -whole 'qwen1.5-moe-a2.7b@0,0.5,0.5p,1,1p' -host-gib "$host" -steps "$logs/presets.json"
        limit 280 node presets tiers-mixtral "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -peer 1 -whole 'mixtral-8x7b@0.5,0.5p' -host-gib "$host" -steps "$logs/presets.json" ;;
      access)
        peers=() more=
        if [ "$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)" -gt 1 ]; then peers=(-peer 1) more=,0.5pc,0.5pd,0.5p; fi
        [ "${ACCESS_TEST:-}" = off ] || limit 300 node node in-place "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUInPlace' "${peers[@]}"
        for model in ${ACCESS:-qwen1.5-moe-a2.7b qwen3-30b-a3b mixtral-8x7b}; do
          layers=()
          [ "$model" != mixtral-8x7b ] || layers=(-layers 16)
          [ -z "${LAYERS:-}" ] || layers=(-layers "$LAYERS")
          limit 400 node presets "access-$model" "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets "${peers[@]}" "${layers[@]}" \
            -batches "${ACCESS_BATCHES:-1,2,4,8}" -whole "$model@${ACCESS_CELLS:-0,0.5c,0.5d,0.5$more}" -host-gib "$host" -steps "$logs/presets.json"
          grep -E 'decode of' "$work/said" | sed 's/.*_test.go:[0-9]*: //' | tee -a "$logs/table.log"
        done ;;
      multipath-tests)
        limit 180 transfer multipath multipath-tests "$work/transfer.test" -test.v -test.run GPU
        limit 120 node node host-paths "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUHostPaths' -peer 1 ;;
      sweep)
        limit 60 pipeline device orders "$work/pipeline.test" -test.v -test.run GPUOrders
        limit 90 . cli trace "$work/moeserve" bench throughput --device cuda --model mixtral-8x7b --load-format dummy --num-hidden-layers 8 \
          --host-memory-gib "$host" --offload-fraction 0.5 --offload-tier peer --peers 1 --num-prompts 324 --input-len 77 --output-len 6 \
          --warmup-tokens 1 --trials 1 --trace "$work/trace.json" --json "$logs/throughput.json"
        gzip -c "$work/trace.json" >"$logs/trace.json.gz"
        limit 340 node presets sweep-mixtral "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -peer 1 -batches 324,3240 \
          -whole 'mixtral-8x7b@0,0.5p,0.5,1p,1' -host-gib "$host" -steps "$logs/presets.json" ;;
      predicted)
        limit 60 node cli planned-memory "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPlanned
        limit 150 . cli bench-transfer "$work/moeserve" bench transfer --device cuda --peers 1 --hardware "$(hardware)" --host-memory-gib "$host" \
          --calibrate "$work/here.json" --json "$work/transfer.json"
        limit 150 . cli bench-sweep "$work/moeserve" bench sweep --device cuda --peers 1 --hardware "$work/here.json" --host-memory-gib "$host" \
          --model qwen1.5-moe-a2.7b --load-format dummy --num-prompts 324 --input-len 77 --output-len 12 --warmup-tokens 2 --trials 3 \
          --prefill-trials 1 --max-num-batched-tokens 8192 --json "$work/sweep.json" --csv "$work/sweep.csv" --plot "$work/sweep.svg" --plot-gains "$work/gains.svg"
        limit 90 . cli policy-auto "$work/moeserve" bench throughput --device cuda --peers 1 --hardware "$work/here.json" --host-memory-gib "$host" \
          --model mixtral-8x7b --load-format dummy --policy auto --gpu-memory-utilization 0.5 --num-prompts 1000 --input-len 77 --output-len 12 \
          --warmup-tokens 1 --trials 1 --json "$work/policy.json"
        tar -czf "$logs/predicted.tar.gz" -C "$work" here.json transfer.json sweep.json sweep.csv sweep.svg gains.svg policy.json ;;
      guard)
        all="mixtral-8x7b qwen1.5-moe-a2.7b qwen3-30b-a3b" models=${GUARD_MODELS:-}
        for model in $models; do
          [[ " $all " == *" $model "* ]] || { echo "GUARD_MODELS has $model: guard measures $all" >&2; exit 2; }
        done
        [ -z "${GUARD_RECORD:-}" ] || [ -z "$models" ] || { echo "GUARD_RECORD records all cells: without GUARD_MODELS" >&2; exit 2; }
        rm -f "$logs"/guard.json "$logs"/guard-base.json # of an earlier run, to which lines would be added
        limit 40 . guard links "$work/moeserve" bench transfer --device cuda --peers 1 --host-memory-gib "$host" --largest-mib 336 --json "$work/transfer.json"
        record=guard.json layers=() mixtral=(mixtral-8x7b@0,0.5p,1p 324,3240,1,8,32,64)
        if [[ $gpu == *H100* ]]; then record=guard-h100.json layers=(-layers 16) mixtral=(mixtral-8x7b@0,0.5p 324,1620,1,8,32,64); fi
        # Loading takes longest, so a load decodes all of its batches; the host's are few, as each of its steps waits for its link.
        for group in "mixtral 220 ${mixtral[*]}" "qwen1.5 80 qwen1.5-moe-a2.7b@0,0.5p 1,32,324,8,64" "qwen3 100 qwen3-30b-a3b@0,0.5p 1,32,324,8,64" \
          "mixtral-host 120 mixtral-8x7b@0.5 1,8" "qwen1.5-host 60 qwen1.5-moe-a2.7b@0.5 1,8"; do
          read -r name most whole batches <<<"$group"
          [[ " ${models:-$all} " == *" ${whole%@*} "* ]] || continue
          cells=(-batches "$batches" -whole "$whole")
          [ "${whole%@*}" != mixtral-8x7b ] || cells+=("${layers[@]}")
          # Builds take turns, so that what else runs on the machine hits both alike.
          for build in "" -base; do
            [ -x "$work/node$build.test" ] || continue
            limit "$most" node guard "guard-$name$build" "$work/node$build.test" "${overlap[@]}" -test.v -test.run GPUPresets -peer 1 \
              "${cells[@]}" -host-gib "$host" -steps "$logs/guard$build.json"
          done
        done
        if [ -n "${GUARD_RECORD:-}" ]; then
          python3 "$root/tools/cuda/guard.py" record "$logs/recorded.json" "$logs/guard.json" "$work/transfer.json" "$GUARD_RECORD" || failed=1
        fi
        python3 "$root/tools/cuda/guard.py" check "$root/tools/cuda/$record" "$logs/guard.json" "$work/transfer.json" $models 2>&1 | tee -a "$logs/table.log"
        [ "${PIPESTATUS[0]}" = 0 ] || failed=1
        if [ -x "$work/node-base.test" ]; then
          python3 "$root/tools/cuda/guard.py" compare "$logs/guard-base.json" "$logs/guard.json" 2>&1 | tee -a "$logs/table.log"
          [ "${PIPESTATUS[0]}" = 0 ] || failed=1
        fi ;;
      soak) limit ${SOAK_LIMIT:-900} cmd/moeserve soak soak env MOESERVE_SOAK_DEVICE=cuda MOESERVE_SOAK_FOR="${SOAK:-1m}" MOESERVE_SOAK_SEED="${SOAK_SEED:-1}" "$work/cmd-moeserve.test" -test.v -test.run TestSoak
        sed -n '/^ *| what/,$p' "$work/said" ;;
      reclaim)
        limit 540 . reclaim reclaim python3 -u "$root/tools/cuda/reclaim.py" "$work/moeserve" "$work/reclaim.so" "$host"
        cat "$work/said" | tee -a "$logs/table.log" ;;
      preload)
        limit 300 . preload preload python3 -u "$root/tools/cuda/multipath.py" "$work/multipath.so" "$work/lose_relay.so" ${PRELOAD:-}
        tee -a "$logs/table.log" <"$work/said" ;;
      bench)
        limit 190 kernels/cuda bench bench-kernels "$work/kernels-cuda.test" -test.run '^$' -test.bench Kernels -test.benchtime 50x
        limit 90 device/cuda bench bench-device "$work/device-cuda.test" -test.run '^$' -test.bench . -test.benchtime 200ms ;;
      small)
        for preset in ${SMALL:-qwen1.5-moe-a2.7b qwen3-30b-a3b mixtral-8x7b}; do
          limit 150 node presets "small-$preset" "$work/node.test" "${overlap[@]}" -test.v -test.run GPUPresets -whole "$preset@0" \
            -batches 1,8,64 -host-gib "$host" -steps "$logs/presets.json"
          sed -n "s/.*: decode of \([0-9]*\) sequences.*: \([0-9.]*\) ms, roofline \([0-9.]*\) ms.*/\1 \2 \3/p" "$work/said" |
            awk -v name="$preset" '{printf "  %s, %d sequences: %.2f ms, roofline %.2f ms: %.0f %%\n", name, $1, $2, $3, 100*$3/$2}' | tee -a "$logs/table.log"
        done
        limit 300 kernels/cuda bench small-layers "$work/kernels-cuda.test" -test.run '^$' -test.bench 'DecodeLayers/model=(qwen|mixtral)' -test.benchtime 200x
        sed -n 's/^BenchmarkDecodeLayers.\(model=[^ \t]*\)[ \t]*[0-9]*[ \t]*\(.*\)/  \1  \2/p' "$work/said" | tee -a "$logs/table.log" ;;
      sanitize)
        for tool in memcheck racecheck initcheck; do
          # What the driver itself does is not ours: an error is one that a kernel made.
          limit ${SANITIZE:-100} kernels/cuda kernels "$tool" compute-sanitizer --tool $tool --error-exitcode 9 "$work/kernels-cuda.test" \
            -test.v -test.run 'TestGPU$/bfloat16/batch-invariant=true' -seed 1
          grep -E '(ERROR|RACECHECK) SUMMARY' "$work/said" | tail -1 | tee -a "$logs/table.log"
        done ;;
      beside)
        results=${BESIDE_OUT:-$logs/beside.jsonl}
        limit 580 . beside beside python3 -u "$root/tools/cuda/beside.py" run "$work/moeserve" "$results" ${BESIDE:-}
        cat "$work/said"
        python3 "$root/tools/cuda/beside.py" table "$results" | tee -a "$logs/table.log" ;;
      gaps)
        for model in ${GAPS:-qwen1.5-moe-a2.7b mixtral-8x7b}; do
          limit 120 . gaps "gaps-$model" python3 "$root/tools/cuda/gaps.py" run "$work/moeserve" "$logs" "$model"
          cat "$work/said"
        done ;;
      layout)
        limit 60 kernels/cuda layout layout "$work/kernels-cuda.test" -test.v -test.run 'TestMeasureLayout$' -measure "$logs/layout.json" -measure-for 30s
        grep '^|' "$work/said" | tee -a "$logs/table.log" ;;
      kvcopy)
        limit 90 kernels/cuda kvcopy kvcopy "$work/kernels-cuda.test" -test.v -test.run 'TestMeasureCopies$' -measure "$logs/kvcopy.json" -measure-for 60s
        grep -E '^([|]|GB/s)' "$work/said" | tee -a "$logs/table.log" ;;
      prompts)
        limit 90 kernels/cuda prompts prompts "$work/kernels-cuda.test" -test.v -test.run 'TestMeasurePrompts$' -measure "$logs/prompts.json" -prompt-tokens "${PROMPT_TOKENS:-131072}"
        limit 90 . prompts flash python3 "$root/tools/cuda/flash.py" run "$logs/flash.json"
        python3 "$root/tools/cuda/flash.py" table "$logs/prompts.json" "$logs/flash.json" | tee -a "$logs/table.log" ;;
      prefill)
        mkdir -p "$work/prefill"
        peer=$(relays | cut -d, -f1) layers=${LAYERS:-0}
        if [[ -z "${LAYERS:-}" && $gpu == *H100* ]]; then layers=16; fi
        for tokens in ${PREFILL_TOKENS:-8192 32768}; do
          for tier in ${PREFILL_TIERS:-none peer host}; do
            [ $tier != peer ] || [ -n "$peer" ] || continue
            offload=()
            [ $tier = none ] || offload=(--offload-fraction 0.5 --offload-tier $tier)
            length=${PREFILL_LEN:-32000} # the first of them warms up
            limit "${PREFILL_LIMIT:-95}" . prefill "prefill-$tier-$tokens" "$work/moeserve" bench prefix ${PREFILL_MODEL-mixtral-8x7b --load-format dummy} \
              --num-hidden-layers "$layers" $(devices "${peer:-auto}") --places nowhere --lengths "$length,$length,$length,$length" --max-num-batched-tokens "$tokens" \
              --max-num-seqs 8 --gpu-memory-utilization 0.95 "${offload[@]}" --json "$work/prefill/$tier-$tokens.json"
          done
        done
        python3 "$root/tools/cuda/prefill.py" offload "$work/prefill" | tee -a "$logs/table.log"
        (cd "$work" && tar -rf "$logs/measured.tar" prefill) ;;
      latency)
        limit 90 device/cuda latency latency "$work/device-cuda.test" -test.v -test.run 'TestMeasure' -measure
        grep -E '^( *[|]|us)' "$work/said" | tee -a "$logs/table.log"
        limit 90 node latency hit "$work/node.test" "${overlap[@]}" -test.v -test.run GPUHit -hits 20
        grep '^us' "$work/said" | tee -a "$logs/table.log" ;;
      kv)
        limit 120 . kv kv-loads "$work/moeserve" bench kv --device cuda --peers 1 --host-memory-gib "$host" \
          --json "$work/reload.json" --csv "$work/reload.csv" --plot "$work/reload.svg"
        cat "$work/said"
        base=$(hardware)
        for blocks in ${KV_THREAD_BLOCKS:-4 64}; do # each calibration adds to the one before
          limit 180 . kv "kv-copies-$blocks" "$work/moeserve" bench kv --device cuda --peers 1 --host-memory-gib "$host" --copy-method all --repetitions 5 \
            --copy-thread-blocks "$blocks" --hardware "$base" --calibrate "$work/kv.json" --json "$work/copies-$blocks.json" --plot "$work/copies-$blocks.svg"
          cat "$work/said"
          base=$work/kv.json
        done
        limit 120 . kv kv-kernel "$work/moeserve" bench kv --device cuda --peers 1 --host-memory-gib "$host" --hardware "$work/kv.json" --json "$work/reload-kernel.json"
        cat "$work/said"
        (cd "$work" && tar -czf "$logs/kv.tar.gz" reload*.json reload.csv reload.svg kv.json copies-*) ;;
      lending) limit 900 node node lending "$work/node.test" "${overlap[@]}" -test.v -test.run "${LENDING:-GPULending|GPUShift}" ${SHIFT:+-shift "$SHIFT"} ;;
      kvtiers) limit 240 node node kvtiers "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUKVTiers' -peer 1 ;;
      prefix) measure "${NAME:-prefix}" prefix --file-directory "$(files)" ${PREFIX:-phi-3.5-moe --load-format dummy --num-hidden-layers 8 --max-num-batched-tokens 8192} ;;
      hits) measure "${NAME:-hits}" prefix --file-directory "$(files)" ${HITS:-mixtral-8x7b --load-format dummy --num-hidden-layers 8 --max-num-batched-tokens 8192 --max-num-seqs 256
          --places hbm,peer,host,file --hits 0,0.5,1} ;;
      fairness)
        measure "${NAME:-fairness}" fairness ${FAIRNESS:-mixtral-8x7b --load-format dummy --num-hidden-layers 8 --kv-tiers none,host,peer --fair-granularity 16,64
          --long-requests 48 --input-len 4096 --long-output-len 256 --short-requests 48 --short-output-len 16 --interval 100ms} ;;
      links) paths "${NAME:-links}" --parts links,roots,static,relay ${LINKS:-} ;;
      host-paths)
        mkdir -p "$work/sweeps"
        for model in ${PATHS_MODELS:-qwen1.5-moe-a2.7b mixtral-8x7b}; do
          cells=(--fractions 0,0.25,0.5,0.75,1 --output-len 12 --trials 3)
          [ "$model" != mixtral-8x7b ] || cells=(--fractions 0.5 --output-len 6 --trials 1)
          limit 300 . cli "host-paths-$model" "$work/moeserve" bench sweep "$model" --device cuda --peers 1 --host-paths 2 --host-memory-gib "$host" \
            --hardware "$(hardware)" --load-format dummy --num-prompts 324 --input-len 77 --warmup-tokens 2 --prefill-trials 1 --max-num-batched-tokens 8192 \
            "${cells[@]}" --json "$work/sweeps/$model.json" --csv "$work/sweeps/$model.csv" --plot "$work/sweeps/$model.svg"
          tee -a "$logs/table.log" <"$work/said"
        done
        tar -cf "$logs/sweeps.tar" -C "$work/sweeps" . ;;
      sleep)
        if [ -n "${SLEEP:-}" ]; then
          measure "${NAME:-sleep}" sleep $SLEEP
        else
          limit 120 node node sleep "$work/node.test" "${overlap[@]}" -test.v -test.run 'GPUSleep' -peer 1
          for fraction in 0 0.5; do
            MEASURE_LIMIT=150 measure "sleep-qwen-$fraction" sleep qwen1.5-moe-a2.7b --load-format dummy --offload-fraction $fraction --repetitions 3 --asleep 1s
            MEASURE_LIMIT=240 measure "sleep-mixtral-$fraction" sleep mixtral-8x7b --load-format dummy --offload-fraction $fraction --levels 1 --repetitions 3 --asleep 1s
          done
          MEASURE_LIMIT=240 measure sleep-switch sleep qwen1.5-moe-a2.7b qwen3-30b-a3b --load-format dummy --levels 1 --repetitions 3
        fi ;;
      multipath) paths "${NAME:-multipath}" --parts "${FIGURES:-sizes,gpus,traffic,engines,cpu,chunks,threshold,direct}" ${MULTIPATH:-} ;;
      policy)
        limit $((${POLICY_LIMIT:-170} + 10)) . cli policy python3 -u "$root/tools/cuda/policy.py" "$work/moeserve" "$work/policy" "${POLICY_LIMIT:-170}" "${LAYERS:-8}" \
          "$(tr -s ' ' , <<<"${POLICY-qwen1.5-moe-a2.7b mixtral-8x7b}")" $(devices none) ${POLICY_FLAGS:-}
        tee -a "$logs/table.log" <"$work/said"
        tar -cf "$logs/policy.tar" -C "$work/policy" . ;;
      calibrate)
        limit 300 . multipath calibrate "$work/moeserve" bench transfer --device cuda --peers "$(relays)" --host-memory-gib "$host" --hardware "$(hardware)" \
          --calibrate "$logs/machine.json"
        tee -a "$logs/table.log" <"$work/said" ;;
      figures)
        paper=${PAPER_RESUME:-$work/paper}
        mkdir -p "$paper" "$work/paper"
        prompts=()
        [ -z "${MTBENCH:-}" ] || prompts=(--dataset-path "$MTBENCH")
        for number in ${PAPER:-3 5 6 regime}; do
          case $number in
            3) PAPER_LIMIT=120 figure 3 3 ;;
            5) figure 5 5 ${PAPER_MODELS:-mixtral-8x7b phi-3.5-moe phi-tiny-moe qwen1.5-moe-a2.7b} "${prompts[@]}" --prefill-trials 1 ;;
            6) figure 6 6 ${PAPER_MODELS:-mixtral-8x7b phi-tiny-moe qwen1.5-moe-a2.7b} "${prompts[@]}" --prefill-trials 1 --trials 2 --warmup-tokens 8 \
              --fractions "${PAPER_FRACTIONS:-0,0.5,1}" ;;
            regime) figure 6 regime ${PAPER_MODELS:-mixtral-8x7b} "${prompts[@]}" --attention cpu --expert-grouping micro-batch --prefill-trials 1 --trials 2 \
              --warmup-tokens 2 --output-len 4 --fractions "${PAPER_FRACTIONS:-0,0.5,1}" ;;
            *) usage ;;
          esac
        done
        cp "$paper"/*.cells* "$work/paper" 2>/dev/null # of a folder that PAPER_RESUME names
        tar -cf "$logs/figures.tar" -C "$work/paper" . ;;
      harvest)
        mkdir -p "$work/harvest" "$work/run"
        chmod 700 "$work/run"
        tenant="exec env LD_PRELOAD=$work/reclaim.so MOESERVE_RUNTIME_DIR=$work/run MOESERVE_RECLAIM_DEADLINE_MS=500 CUDA_VISIBLE_DEVICES=1 python3 -u $root/tools/cuda/tenant.py ${HARVEST_TENANT:-}"
        [ -z "${EMULATE:-}" ] || tenant=
        for cell in ${HARVEST:-324:copy 8:copy 8:direct}; do
          name=harvest-${cell/:/-}
          limit ${HARVEST_LIMIT:-240} . cli "$name" "$work/moeserve" bench harvest ${HARVEST_MODEL---model mixtral-8x7b --load-format dummy} $(devices) --runtime-dir "$work/run" \
            --num-prompts "${cell%:*}" --expert-access "${cell#*:}" --steps "${HARVEST_STEPS:-25%,50%,free+1GiB,free+10GiB,90%,50%,0,0}" --every "${HARVEST_EVERY:-3s}" \
            --tenant "$tenant" ${HARVEST_FLAGS:-} --json "$work/harvest/$name.json" --plot "$work/harvest/$name.svg"
          tee -a "$logs/table.log" <"$work/said"
        done
        tar -cf "$logs/harvest.tar" -C "$work/harvest" . ;;
      eight)
        others=$(relays)
        links=$(($(tr -cd , <<<"$others" | wc -c) + 2)) # the other GPUs', and the computing one's
        model=${EIGHT:-mixtral-8x7b --load-format dummy}
        total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1)
        most=${EIGHT_GIB:-$((${total:-0} / 1024 - 2))} # GiB of a GPU: less than that are left to moeserve
        mkdir -p "$work/eight" "$work/run"
        chmod 700 "$work/run"
        for piece in ${EIGHT_PARTS:-links copies sleep harvest}; do
          case $piece in
            links) limit ${EIGHT_LIMIT:-120} . multipath eight-links "$work/moeserve" bench multipath $(devices "$others") --parts links,roots,static --rounds 3 \
              ${EIGHT_FLAGS:-} --json "$work/eight/links.json" --plots "$work/eight" ;;
            copies) limit ${EIGHT_LIMIT:-200} . multipath eight-copies "$work/moeserve" bench multipath $(devices "$others") --parts sizes,gpus,traffic,cpu --rounds 3 \
              ${EIGHT_FLAGS:-} --json "$work/eight/copies.json" --plots "$work/eight" ;;
            sleep) limit ${EIGHT_LIMIT:-200} . kv eight-sleep "$work/moeserve" bench sleep $model $(devices "$others") --host-paths "$links" --levels 1 --repetitions 2 \
              ${EIGHT_FLAGS:-} --json "$work/eight/sleep.json" ;;
            harvest)
              for taken in quiet taken; do
                if [ $taken = taken ]; then
                  ( # each of the others in turn, every second, until it is told to end
                    while sleep 1 && [ ! -e "$work/run/end" ]; do
                      gpu=${others%%,*} others=${others#*,},${others%%,*}
                      "$work/moeserve" reclaim --device "$gpu" --gib "$most" --deadline 500ms --runtime-dir "$work/run"
                    done
                  ) >"$logs/reclaim.log" 2>&1 &
                  taking=$!
                fi
                limit ${EIGHT_LIMIT:-200} . cli "eight-$taken" "$work/moeserve" bench throughput $model $(devices "$others") --offload-fraction 0.5 --offload-tier peer \
                  --runtime-dir "$work/run" --harvest-cooldown 2s --num-prompts 324 --input-len 77 --output-len "${EIGHT_LEN:-150}" --warmup-tokens 2 --trials 1 \
                  ${EIGHT_FLAGS:-} --json "$work/eight/$taken.json"
                tee -a "$logs/table.log" <"$work/said"
              done
              touch "$work/run/end"
              wait "$taking"
              tail -4 "$logs/reclaim.log" | tee -a "$logs/table.log"
              if [ "$(grep -o '"tokens_sha256": "[0-9a-f]*"' "$work/eight/quiet.json" "$work/eight/taken.json" | cut -d: -f3 | sort | uniq -c | awk '{print $1}')" = 2 ]; then
                echo "the same tokens while GPUs are taken back" | tee -a "$logs/table.log"
              else
                echo "FAILED: other tokens while GPUs are taken back" | tee -a "$logs/table.log"
                failed=1
              fi ;;
            *) usage ;;
          esac
          [ "$piece" = harvest ] || tee -a "$logs/table.log" <"$work/said"
        done
        tar -cf "$logs/eight.tar" -C "$work/eight" . ;;
      load)
        limit 400 . load load python3 "$root/tools/cuda/load.py" "$work/moeserve" "$work/bigcheckpoint" "${LOAD_FOLDER:-$work}" ${LOAD:-}
        cat "$work/said" ;;
    esac
  done
  python3 "$root/tools/cuda/gpu.py" table "$logs" 2>/dev/null >>"$logs/table.log"
  exit $failed
}

case $1 in
  build) build "$2" "${3:-}" ;;
  run) shift; run "$@" ;;
  *) usage ;;
esac
