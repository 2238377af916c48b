"""Part of gpu.sh: how long the GPU is idle between the kernels of a decode step.

    gaps.py run MOESERVE FOLDER MODEL [SEQUENCES [ARGUMENT...]]   records a benchmark, and shows its gaps
    gaps.py show CSV                                              shows those of a recording
    gaps.py build LIBRARY                                         builds activity.c alone

The recording is CUPTI's (activity.c, put into the process by CUDA_INJECTION64_PATH): when each
kernel and copy began and ended on the device. A step begins with the kernel embed on the stream that
has most kernels; decode steps are those with the commonest grid of it, and of these the ones with as
many kernels as most have, as the recording of one may be cut off. What lies between the last kernel
of a step and the next step's embed is between steps, all else within. The last table is the critical path of a layer: how
long after the kernel before has ended each one ends.
"""

import collections
import csv
import gzip
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FIRST = "embed"
BOUND = 5000  # ns
EDGES = (0, 500, 1000, 1500, 2000, 3000, 5000, 10000, 50000)


def cupti():
    """Folders of cupti.h, of cuda.h, and of a libcupti.so."""
    site = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    roots = [home / "extras/CUPTI", home, site / "cu13", site / "cuda_cupti", home / "targets/x86_64-linux"]
    if "CUPTI" in os.environ:
        roots.insert(0, pathlib.Path(os.environ["CUPTI"]))
    includes = [r / "include" for r in (*roots, site / "cuda_runtime")]
    header = next((i for i in includes if (i / "cupti.h").exists()), None)
    driver = next((i for i in includes if (i / "cuda.h").exists()), None)
    library = next((lib for r in roots for d in ("lib64", "lib") for lib in sorted((r / d).glob("libcupti.so*"))), None)
    if not (header and driver and library):
        sys.exit(f"no CUPTI: cupti.h in {header}, cuda.h in {driver}, libcupti.so at {library}; install a CUDA toolkit, or name CUPTI's folder by CUPTI")
    return header, driver, library


def build(out):
    header, driver, library = cupti()
    text = (header / "cupti_activity.h").read_text()
    # The newest type of each record is the one that this CUPTI fills.
    types = {
        macro: "CUpti_Activity" + name + str(max(int(n) for n in re.findall(rf"CUpti_Activity{name}(\d+);", text)))
        for macro, name in (("KERNEL", "Kernel"), ("MEMCPY", "Memcpy"), ("MEMSET", "Memset"))
    }
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *(f"-D{m}={t}" for m, t in types.items()), f"-isystem{header}",
         f"-isystem{driver}", str(HERE / "activity.c"), "-o", str(out), str(library), f"-Wl,-rpath,{library.parent}"], check=True)


def run(moeserve, folder, model, sequences="324", *more):
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        library, recording = os.path.join(work, "activity.so"), os.path.join(work, "activity.csv")
        build(library)
        p = subprocess.run(
            [moeserve, "bench", "throughput", "--device", "cuda", "--model", model, "--load-format", "dummy", "--num-prompts", sequences,
             "--input-len", "77", "--output-len", "32", "--warmup-tokens", "4", "--trials", "2", "--prefill-trials", "1", "--max-num-batched-tokens", "8192",
             "--gpu-memory-utilization", "0.98", *more],
            env={**os.environ, "CUDA_INJECTION64_PATH": library, "ACTIVITY_CSV": recording}, capture_output=True, text=True)
        print(p.stdout, p.stderr, sep="", end="")
        if p.returncode:
            sys.exit(p.returncode)
        print(f"\n{model}, {sequences} sequences:")
        with open(recording, "rb") as f, gzip.open(pathlib.Path(folder) / f"gaps-{model}.csv.gz", "wb") as z:
            shutil.copyfileobj(f, z)
        show(recording)


def decode_steps(path):
    """Decode steps as lists of (start, end, kind, grid, name), from embed to the next embed, and how many records are missing."""
    streams, dropped = collections.defaultdict(list), 0
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as f:
        for row in csv.reader(f):
            if len(row) != 6:
                continue  # the last line, cut off
            kind, start, end, stream, grid, name = row
            if kind == "dropped":
                dropped += int(start)
            else:
                streams[int(stream)].append((int(start), int(end), kind, int(grid), name))
    if not streams:
        sys.exit(f"{path} has no records")
    records = sorted(max(streams.values(), key=lambda s: sum(r[2] == "kernel" for r in s)))
    begins = [i for i, r in enumerate(records) if r[4] == FIRST]
    if len(begins) < 2:
        sys.exit(f"{path} has {len(begins)} steps: no kernel is called {FIRST} on the stream with most kernels")
    # What follows the last embed may not be all of a step.
    steps = [records[a : b + 1] for a, b in zip(begins, begins[1:])]
    grid = collections.Counter(s[0][3] for s in steps).most_common(1)[0][0]
    # A step is followed by another of its kind, so that what lies between both is between steps of decoding.
    steps = [s for s in steps if s[0][3] == grid == s[-1][3]]
    kernels = [sum(r[2] == "kernel" for r in s) for s in steps]
    usual = collections.Counter(kernels).most_common(1)
    return [s for s, n in zip(steps, kernels) if n == usual[0][0]], dropped


def gaps_of(step):
    """Gaps within a step and the idle time behind it, in ns; gaps as (ns, before, after)."""
    last = max(i for i, r in enumerate(step[:-1]) if r[2] == "kernel")
    within, idle, until, before = [], 0, step[0][1], step[0][4]
    for i, (start, end, _, _, name) in enumerate(step[1:], 1):
        gap = max(0, start - until)
        if i <= last:
            within.append((gap, before, name))
        else:
            idle += gap
        if end >= until:
            until, before = end, name
    return within, idle


def layer_of(names):
    """The kernels of a layer, as (first, number of them, layers): the shortest sequence that most of a step repeats."""
    for period in range(2, len(names) // 3 + 1):
        same = [a == b for a, b in zip(names, names[period:])]
        first = best = 0
        at = 0
        while at < len(same):
            end = at
            while end < len(same) and same[end]:
                end += 1
            if end - at > best:
                first, best = at, end - at
            at = end + 1
        if best + period > len(names) / 2:
            return first, period, (best + period) // period
    return None


def critical_path(steps):
    """For each kernel of a layer: its name, and how long after the one before it ended it ends (median and mean over layers and
    steps) and begins (median), in us. The first layer is left out. Empty where steps differ, or repeat nothing."""
    steps = [[r for r in s[:-1] if r[2] == "kernel"] for s in steps]
    names = [r[4] for r in steps[0]]
    steps = [s for s in steps if [r[4] for r in s] == names]
    layer = layer_of(names)
    if not layer:
        return []
    first, period, layers = layer
    rows = []
    for at in range(first, first + period):
        ends, begins = [], []
        for i in range(at + period, at + layers * period, period):
            for s in steps:
                ends.append((s[i][1] - s[i - 1][1]) / 1e3)
                begins.append((s[i][0] - s[i - 1][1]) / 1e3)
        rows.append((names[at], statistics.median(ends), sum(ends) / len(ends), statistics.median(begins)))
    return rows


def show(path):
    steps, dropped = decode_steps(path)
    if not steps:
        sys.exit(f"{path} has no two decode steps one after the other")
    if dropped:
        print(f"{dropped} records are missing")
    within, idle = zip(*(gaps_of(s) for s in steps))
    every = sorted((g for w in within for g in w), reverse=True)
    count = len(steps)
    length = [s[-1][0] - s[0][0] for s in steps]
    print(f"{count} decode steps of {sum(length) / count / 1e6:.3f} ms (recorded), {len(every) / count:.0f} kernels and copies each; between them "
          f"{sum(g for g, _, _ in every) / count / 1e6:.3f} ms a step; between steps {sum(idle) / count / 1e6:.3f} ms (least {min(idle) / 1e6:.3f}, most {max(idle) / 1e6:.3f})")
    over = [g for g in every if g[0] > BOUND]
    print(f"gaps over {BOUND / 1e3:.0f} us: {len(over)} in {sum(any(g > BOUND for g, _, _ in w) for w in within)} of {count} steps; the largest {every[0][0] / 1e3:.2f} us, "
          f"the median {every[len(every) // 2][0] / 1e3:.2f} us")
    print("\n| gap, us | gaps a step |\n|---|---|")
    for low, high in zip(EDGES, (*EDGES[1:], float("inf"))):
        n = sum(low <= g < high for g, _, _ in every)
        if n:
            print(f"| {low / 1e3:g} to {high / 1e3:g} | {n / count:.1f} |" if high < float("inf") else f"| from {low / 1e3:g} | {n / count:.2f} |")
    print("\n| the largest, us | behind | before |\n|---|---|---|")
    for g, before, after in every[:20]:
        print(f"| {g / 1e3:.2f} | {before} | {after} |")
    pairs = collections.defaultdict(list)
    for g, before, after in every:
        pairs[before, after].append(g)
    print("\n| behind | before | gaps a step | mean, us | most, us |\n|---|---|---|---|---|")
    for (before, after), g in sorted(pairs.items(), key=lambda p: -sum(p[1]))[:20]:
        print(f"| {before} | {after} | {len(g) / count:.1f} | {sum(g) / len(g) / 1e3:.2f} | {max(g) / 1e3:.2f} |")
    if rows := critical_path(steps):
        print("\n| kernel of a layer | ends behind the one before, us | mean | begins |\n|---|---|---|---|")
        for name, end, mean, begin in rows:
            print(f"| {name} | {end:.2f} | {mean:.2f} | {begin:.2f} |")
        print(f"| sum | {sum(r[1] for r in rows):.2f} | {sum(r[2] for r in rows):.2f} | |")


if __name__ == "__main__":
    {"run": run, "show": show, "build": build}[sys.argv[1]](*sys.argv[2:])
