"""Regression benchmark of two GPUs: decode steps as shares of what links and model allow in the same run.

    guard.py check RECORD STEPS TRANSFER    prints the table; fails where a cell is more than TOLERANCE below RECORD
    guard.py record RECORD STEPS TRANSFER COMMIT   writes RECORD anew

STEPS are lines of TestGPUPresets (-steps), TRANSFER is what `moeserve bench transfer --json` wrote on the same
machine right before, RECORD is tools/cuda/guard.json.

A cell is a model, the fraction of its experts that have copies on the peer, and the number of sequences that decode.
Its share is the limit, the shortest time that its step could take, over the measured time. With everything in HBM the
limit is the step's roofline. With experts on the peer it is the longer of two: the same step with everything in HBM,
as measured in this run; and the bytes of the offloaded experts that its tokens are expected to select, over the sum of
both links' rates, as measured in this run.
"""

import json
import sys

TOLERANCE = 0.03
PEER, HOST = "peer to gpu", "host to gpu"


def lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f if line.strip()]


def links(path):
    """Bytes per second of the largest copies, queued on a stream without the engine: {path: rate}."""
    with open(path) as f:
        points = json.load(f)["points"]
    largest = max(p["bytes"] for p in points)
    rates = {p["path"]: p["bytes_per_s"] for p in points if p["bytes"] == largest}
    for want in (PEER, HOST):
        if want not in rates:
            sys.exit(f"{path} has no rate of {want}: run bench transfer with --peers")
    return rates


def cells(steps, rates):
    """[(name, seconds of a step, least seconds, what binds)], in the order in which they were measured."""
    steps = [s for s in steps if s["kind"] == "decode"]
    resident = {(s["model"], s["sequences"]): s["seconds"] for s in steps if s["fraction"] == 0}
    found = []
    for s in steps:
        name = f"{s['model']} {100 * s['fraction']:g} % {s['sequences']}"
        if s["fraction"] == 0:
            found.append((name, s["seconds"], s["roofline_s"], "roofline"))
            continue
        own = resident.get((s["model"], s["sequences"]))
        if own is None:
            sys.exit(f"{name}: the same step with everything in HBM was not measured")
        link = s["missing_bytes"] / (rates[PEER] + rates[HOST])
        found.append((name, s["seconds"], max(own, link), "links" if link > own else "own step in HBM"))
    return found


def table(found, record, rates):
    print(f"plain copies in this run: peer {rates[PEER] / 1e9:.1f} GB/s, host {rates[HOST] / 1e9:.1f} GB/s\n")
    print("| model, experts on the peer, sequences | step, ms | tokens/s | reference, ms | reference is | reference / step | recorded |")
    print("|---|---|---|---|---|---|---|")
    for name, took, least, bound in found:
        was = record.get(name)
        print(f"| {name} | {1e3 * took:.2f} | {int(name.split()[-1]) / took:,.0f} | {1e3 * least:.2f} | {bound} | {100 * least / took:.1f} % "
              f"| {'–' if was is None else f'{100 * was:.1f} %'} |")


def check(record_file, steps_file, transfer_file):
    try:
        with open(record_file) as f:
            record = json.load(f)
    except FileNotFoundError:
        record = {"measured_at": "nothing", "shares": {}}
    rates = links(transfer_file)
    found = cells(lines(steps_file), rates)
    table(found, record["shares"], rates)
    bad = [f"{name}: {100 * least / took:.1f} % of what is possible, recorded {100 * record['shares'][name]:.1f} %"
           for name, took, least, _ in found
           if name in record["shares"] and least / took < record["shares"][name] * (1 - TOLERANCE)]
    missing = sorted(set(record["shares"]) - {name for name, *_ in found})
    bad += [f"{name}: recorded and not measured" for name in missing]
    print(f"\nrecord measured at {record['measured_at']}: {len(found)} cells, {len(bad)} worse by more than {100 * TOLERANCE:g} %")
    for line in bad:
        print("FAILED", line)
    return 1 if bad or not found else 0


def record(record_file, steps_file, transfer_file, commit):
    shares = {name: round(least / took, 4) for name, took, least, _ in cells(lines(steps_file), links(transfer_file))}
    with open(record_file, "w") as f:
        json.dump({"measured_at": commit, "shares": shares}, f, indent=1)
        f.write("\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "check":
        sys.exit(check(*sys.argv[2:]))
    if len(sys.argv) == 6 and sys.argv[1] == "record":
        sys.exit(record(*sys.argv[2:]))
    sys.exit(__doc__)
