"""Regression benchmark of two GPUs: decode steps as shares of what links and model allow in the same run.

    guard.py check RECORD STEPS TRANSFER [MODEL...]   prints the table; fails where a cell is more than TOLERANCE below
                                            RECORD, and where one of RECORD is not measured, which with MODELs must be theirs
    guard.py record RECORD STEPS TRANSFER COMMIT   writes RECORD anew
    guard.py compare BASE STEPS             prints each cell's time beside that of an earlier commit, measured on the same
                                            machine; fails where a cell takes more than TOLERANCE longer

STEPS are lines of TestGPUPresets (-steps), TRANSFER is what `moeserve bench transfer --json` wrote on the same
machine right before, RECORD is tools/cuda/guard.json (of H200) or guard-h100.json. BASE is as STEPS.

A cell is a model, the fraction of its experts that are offloaded, their tier, and the number of sequences that decode.
Experts of the tier peer have copies on the second GPU. Its share is the reference, which is a time, over the measured
time. With everything in HBM the reference is the step's roofline. With experts offloaded it is the longer of two: the
same step with everything in HBM, as measured in this run; and the bytes of the offloaded experts that its tokens are
expected to select, over the sum of both links' rates (tier peer) or the host link's (tier host), as measured in this run.

A cell that RECORD does not have is in the table, with – as recorded, and fails nothing but the comparison with a BASE.
"""

import json
import sys

TOLERANCE = 0.03
LAYERS = {"mixtral-8x7b": 32, "qwen1.5-moe-a2.7b": 24, "qwen3-30b-a3b": 48}
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


def named(s):
    """The name of a cell: what is offloaded has its tier in it, and a preset that is cut its number of layers."""
    cut = f" ({s['layers']} layers)" if s.get("layers", LAYERS.get(s["model"])) != LAYERS.get(s["model"]) else ""
    tier = f" {s['tier']}" if s["fraction"] else ""
    return f"{s['model']}{cut} {100 * s['fraction']:g} %{tier} {s['sequences']}"


def decodes(path):
    """The decode steps of a file: models, and what is offloaded of each, as measured first; these by their sequences."""
    steps = [s for s in lines(path) if s["kind"] == "decode"]
    first = {}
    for at, s in enumerate(steps):
        for group in (s["model"], (s["model"], s["fraction"], s["tier"])):
            first.setdefault(group, at)
    return sorted(steps, key=lambda s: (first[s["model"]], first[s["model"], s["fraction"], s["tier"]], s["sequences"]))


def cells(steps, rates):
    """[(name, seconds of a step, seconds of its reference, what the reference is)], and the cells that have no reference."""
    resident = {(s["model"], s["sequences"]): s["seconds"] for s in steps if s["fraction"] == 0}
    found, alone = [], []
    for s in steps:
        name = named(s)
        if s["fraction"] == 0:
            found.append((name, s["seconds"], s["roofline_s"], "roofline"))
            continue
        own = resident.get((s["model"], s["sequences"]))
        if own is None:
            alone.append(f"{name}: the same step with everything in HBM was not measured")
            continue
        rate, bound = {"peer": (rates[PEER] + rates[HOST], "links"), "host": (rates[HOST], "host link")}[s["tier"]]
        link = s["missing_bytes"] / rate
        found.append((name, s["seconds"], max(own, link), bound if link > own else "own step in HBM"))
    return found, alone


def table(found, record, rates):
    print(f"plain copies in this run: peer {rates[PEER] / 1e9:.1f} GB/s, host {rates[HOST] / 1e9:.1f} GB/s\n")
    print("| model, experts offloaded, sequences | step, ms | tokens/s | reference, ms | reference is | reference / step | recorded |")
    print("|---|---|---|---|---|---|---|")
    for name, took, least, bound in found:
        was = record.get(name)
        print(f"| {name} | {1e3 * took:.2f} | {int(name.split()[-1]) / took:,.0f} | {1e3 * least:.2f} | {bound} | {100 * least / took:.1f} % "
              f"| {'–' if was is None else f'{100 * was:.1f} %'} |")


def check(record_file, steps_file, transfer_file, *models):
    try:
        with open(record_file) as f:
            record = json.load(f)
    except FileNotFoundError:
        record = {"measured_at": "nothing", "shares": {}}
    rates = links(transfer_file)
    found, alone = cells(decodes(steps_file), rates)
    table(found, record["shares"], rates)
    unrecorded = sum(name not in record["shares"] for name, *_ in found)
    bad = [f"{name}: {100 * least / took:.1f} % of what is possible, recorded {100 * record['shares'][name]:.1f} %"
           for name, took, least, _ in found
           if name in record["shares"] and least / took < record["shares"][name] * (1 - TOLERANCE)]
    missing = sorted(set(record["shares"]) - {name for name, *_ in found})
    bad += alone + [f"{name}: recorded and not measured" for name in missing if not models or name.split()[0] in models]
    print(f"\nrecord measured at {record['measured_at']}: {len(found)} cells, {unrecorded} of them unrecorded, "
          f"{len(bad)} worse by more than {100 * TOLERANCE:g} % or not measured")
    for line in bad:
        print("FAILED", line)
    return 1 if bad or not found else 0


def compare(base_file, steps_file):
    base, now = ({named(s): s["seconds"] for s in decodes(path)} for path in (base_file, steps_file))
    print("| model, experts offloaded, sequences | step, ms | step of the base, ms | step / base |")
    print("|---|---|---|---|")
    bad = [f"{name}: measured for the base alone" for name in base if name not in now]
    bad += [f"{name}: not measured for the base" for name in now if name not in base]
    for name in (n for n in now if n in base):
        ratio = now[name] / base[name]
        print(f"| {name} | {1e3 * now[name]:.2f} | {1e3 * base[name]:.2f} | {100 * ratio:.1f} % |")
        if ratio > 1 + TOLERANCE:
            bad.append(f"{name}: {100 * ratio:.1f} % of the base's time")
    print(f"\n{len(now)} cells, {len(bad)} slower than the base by more than {100 * TOLERANCE:g} %")
    for line in bad:
        print("FAILED", line)
    return 1 if bad or not now else 0


def record(record_file, steps_file, transfer_file, commit):
    found, alone = cells(decodes(steps_file), links(transfer_file))
    if alone:
        sys.exit("\n".join(alone))
    shares = {name: round(least / took, 4) for name, took, least, _ in found}
    with open(record_file, "w") as f:
        json.dump({"measured_at": commit, "shares": shares}, f, indent=1)
        f.write("\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) >= 5 and sys.argv[1] == "check":
        sys.exit(check(*sys.argv[2:]))
    if len(sys.argv) == 6 and sys.argv[1] == "record":
        sys.exit(record(*sys.argv[2:]))
    if len(sys.argv) == 4 and sys.argv[1] == "compare":
        sys.exit(compare(*sys.argv[2:]))
    sys.exit(__doc__)
