"""Part of gpu.sh: a checkpoint is loaded at the rate at which the disk can be read.

    load.py MOESERVE BIGCHECKPOINT FOLDER [--preset P] [--layers N] [--keep]

Writes a checkpoint of the preset's shape to FOLDER (28.6 GB of qwen1.5-moe-a2.7b), takes it out of the
page cache, and measures in turn, so that a disk whose rate drifts hits both alike: reading past the
cache (O_DIRECT, 8 MiB at a time) by 1, 4, 8 and 32 threads, a part of its own for each number, and
`moeserve run --device cuda` with nothing of it in the cache; at last with all of it there. The disk's
own rate is that of the number of threads whose median over the rounds is best. Prints a table and, as
its last line, JSON. Fails where the median of cold loading is below 90 % of the disk's own rate.
"""

import argparse
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PIECE = 8 << 20
THREADS = (1, 4, 8, 32)
SHARE = 0.9


def forget(files):
    """Takes files out of the page cache, once what is in it lies on the disk."""
    for f in files:
        fd = os.open(f, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached():
    """Bytes of all files in the page cache."""
    return next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("Cached:"))


def read_rate(pieces, threads):
    """Bytes a second of reading pieces (file, offset) past the cache."""
    todo, lock = list(reversed(pieces)), threading.Lock()
    failed = []

    def reader():
        buffer = mmap.mmap(-1, PIECE)  # page-aligned, as O_DIRECT wants it
        open_files = {}
        try:
            while True:
                with lock:
                    if not todo:
                        return
                    path, offset = todo.pop()
                if path not in open_files:
                    open_files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                if os.preadv(open_files[path], [buffer], offset) != PIECE:
                    raise OSError(f"{path}: a short read at {offset}")
        except OSError as e:
            failed.append(e)
        finally:
            for fd in open_files.values():
                os.close(fd)

    workers = [threading.Thread(target=reader) for _ in range(threads)]
    begin = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if failed:
        sys.exit(f"reading past the cache: {failed[0]}")
    return len(pieces) * PIECE / (time.perf_counter() - begin)


def read_rates(files):
    """Rates by the number of threads; each reads a part of its own."""
    pieces = [(f, at) for f in files for at in range(0, os.path.getsize(f) - PIECE + 1, PIECE)]
    per = len(pieces) // len(THREADS)
    return {n: read_rate(pieces[i * per : (i + 1) * per], n) for i, n in enumerate(THREADS)}


def load(moeserve, model, result):
    """Seconds of loading as moeserve says them, and of its whole run."""
    begin = time.perf_counter()
    p = subprocess.run([moeserve, "run", "--device", "cuda", "--model", str(model), "--prompt-ids", "1,2,3,4", "--max-tokens", "4", "--ignore-eos",
                        "--max-model-len", "256", "--json", str(result), "-q"], capture_output=True, text=True)
    took = time.perf_counter() - begin
    if p.returncode:
        sys.exit(f"moeserve: exit {p.returncode}: {p.stderr.strip()}")
    return json.loads(pathlib.Path(result).read_text())["report"]["load_s"], took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeserve")
    parser.add_argument("bigcheckpoint")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--preset", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--beside", action="append", default=[], help="another moeserve, which loads in turn with it")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint, and take one that is there")
    o = parser.parse_args()
    model = o.folder / "checkpoint"
    said = {"preset": o.preset, "layers": o.layers}
    try:
        if not (o.keep and (model / "config.json").exists()):
            begin = time.perf_counter()
            subprocess.run([o.bigcheckpoint, "-o", str(model), "-preset", o.preset, "-shard-bytes", "4e9", "-tokenizer", str(ROOT / "testdata/fixtures/qwen2_moe"),
                            *(["-layers", str(o.layers)] if o.layers else [])], check=True)
            said["write_s"] = time.perf_counter() - begin
        files = sorted(str(f) for f in model.glob("*.safetensors"))
        size = said["bytes"] = sum(os.path.getsize(f) for f in files)
        full = cached()
        forget(files)
        if "write_s" in said:
            said["write_s"] = time.perf_counter() - begin  # with the bytes on the disk
        said["forgotten_bytes"] = full - cached()
        rates, cold = [], {binary: [] for binary in [o.moeserve, *o.beside]}
        for _ in range(o.rounds):
            rates.append(read_rates(files))
            for binary in cold:
                forget(files)
                before = cached()
                cold[binary].append(load(binary, model, o.folder / "run.json"))
                said["cached_bytes"] = cached() - before
            forget(files)
        load(o.moeserve, model, o.folder / "run.json")
        warm = load(o.moeserve, model, o.folder / "run.json")
    finally:
        if not o.keep:
            shutil.rmtree(model, ignore_errors=True)
    disk = max(statistics.median(r[n] for r in rates) for n in THREADS)
    seconds = statistics.median(s for s, _ in cold[o.moeserve])
    said |= {"disk_bytes_s": rates, "cold": cold, "warm": warm, "share": size / seconds / disk}
    if "write_s" in said:
        print(f"{size / 1e9:.2f} GB written in {said['write_s']:.1f} s, {size / said['write_s'] / 1e9:.2f} GB/s")
    print("\n| what | seconds | GB/s |\n|---|---|---|")
    for n in THREADS:
        print(f"| reading past the cache, {n} threads | | {', '.join(f'{r[n] / 1e9:.2f}' for r in rates)} |")
    for binary, runs in (*cold.items(), (o.moeserve, [warm])):
        what = "warm" if runs == [warm] else "cold" + (f", {binary}" if o.beside else "")
        print(f"| loading, {what} (the whole run {', '.join(f'{whole:.1f}' for _, whole in runs)} s) | {', '.join(f'{s:.2f}' for s, _ in runs)} "
              f"| {', '.join(f'{size / s / 1e9:.2f}' for s, _ in runs)} |")
    print(f"\ncold loading is at {100 * said['share']:.0f} % of the disk's own rate, {disk / 1e9:.2f} GB/s; it left {said['cached_bytes'] / 1e9:.1f} GB in the page cache\n")
    print(json.dumps(said))
    if said["share"] < SHARE:
        sys.exit(f"FAILED: loading is below {100 * SHARE:.0f} % of the disk's rate")


if __name__ == "__main__":
    main()
