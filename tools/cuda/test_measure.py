"""Tests of beside.py, flash.py, gaps.py, guard.py and its part of gpu.sh, load.py, policy.py, prefill.py and tenant.py as far as they go without a GPU: python3 tools/cuda/test_measure.py"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import unittest.mock

import beside
import flash
import gaps
import guard
import load
import policy
import prefill

HERE = pathlib.Path(__file__).resolve().parent
RECORDED = HERE / "testdata" / "beside.jsonl"


def printed(what, *args):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        what(*args)
    return out.getvalue()


def options(**changed):
    o = dict(moeserve="./moeserve", out="OUT", cells="*", layers=0, input_len=77, output_len=32, trials=3, reference_trials=3, batched_tokens=8192,
             timeout=240, budget=0, resume=False, dry_run=True)
    return argparse.Namespace(**o | changed)


class Beside(unittest.TestCase):
    def test_operations(self):
        # Mixtral goes through 12.88 thousand million weights a token, 0.26 of them embedding and output layer.
        a, b = (beside.prefill_flops(beside.MIXTRAL, 0, 1, n) for n in (100, 101))
        attention = 32 * 4 * 4096 * 101
        self.assertAlmostEqual((b - a - attention) / (2 * 12.617e9), 1, delta=1e-3)
        # Qwen1.5-MoE 2.69, 0.62 of them in these.
        a, b = (beside.prefill_flops(beside.QWEN, 0, 1, n) for n in (100, 101))
        self.assertAlmostEqual((b - a - 24 * 4 * 2048 * 101) / (2 * 2.066e9), 1, delta=1e-2)

    def test_commands(self):
        lines = printed(beside.measure, options(cells="mixtral-8x7b/3240/*,*/1/transformers")).splitlines()
        self.assertEqual(len(lines), 5)
        micro = next(line for line in lines if "micro-batch" in line)
        for want in ("--num-prompts 3240", "--micro-batch-size 324", "--expert-grouping micro-batch", "--output-len 32", "--prefill-trials 1"):
            self.assertIn(want, micro)
        with self.assertRaisesRegex(SystemExit, "no cell is like nothing"):
            beside.measure(options(cells="nothing"))

    def test_resume(self):
        lines = printed(beside.measure, options(cells="qwen*/324/*", resume=True, out=str(RECORDED))).splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("--batch-invariant", lines[0])
        # Of another depth nothing is there.
        self.assertEqual(len(printed(beside.measure, options(cells="qwen*/324/*", resume=True, layers=2, out=str(RECORDED))).splitlines()), 3)

    def test_table(self):
        lines = printed(beside.table, RECORDED).splitlines()
        for want in (
            "| qwen1.5-moe-a2.7b | 324 | merged | 27,936 | 39,534 | 71 % | 3.79 | 18,473 | 3.05 | 123,681 | 513 | 65 % | 60.0 |",
            "| qwen1.5-moe-a2.7b | 324 | transformers | 7,376 | – | – | – | 6,054 | – | 71,127 | 295 | 37 % | 60.0 |",
        ):
            self.assertIn(want, lines)

    def test_cell_that_stands_still(self):
        begin = time.time()
        code, out, err = beside.execute([sys.executable, "-c", "import subprocess\nprint('begun', flush=True)\nsubprocess.run(['sleep', '60'])"], 1)
        self.assertEqual((code, out), (124, "begun\n"))
        self.assertIn("ended after 1 s", err)
        self.assertLess(time.time() - begin, 20)

    def test_failed_cell_is_noted(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out.jsonl")
            code = None

            def run():
                nonlocal code
                code = beside.measure(options(moeserve="/bin/false", out=out, cells="qwen*/1/merged", dry_run=False, timeout=60))

            printed(run)
            found = {r["cell"]: r for r in beside.read(out).values()}
            self.assertEqual(code, 1)
            self.assertTrue(found["qwen1.5-moe-a2.7b/1/merged"]["error"].startswith("exit 1"))


class Gaps(unittest.TestCase):
    # Three decode steps and a prompt's before them; ns.
    STEP = (("kernel", 0, 1000, 324, "embed"), ("kernel", 2000, 3000, 2, "product"), ("kernel", 3500, 9000, 2, "sample"), ("copy", 9900, 10000, 8, "copy of kind 2"))

    def recording(self, *, late=0, cut=False):
        rows = [("kernel", 0, 5000, 1, 8192, "embed"), ("kernel", 5100, 6000, 1, 9, "product"), ("copy", 100, 9000, 2, 8, "copy of kind 1")]
        for i in range(4):
            for kind, start, end, grid, name in self.STEP:
                moved = late if i == 1 and name == "sample" else 0
                if not (cut and i == 2 and name == "product"):
                    rows.append((kind, 100_000 * (i + 1) + start + moved, 100_000 * (i + 1) + end, 1, grid, name))
        return "".join(",".join(map(str, r)) + "\n" for r in reversed(rows)) + "kernel,12,34"

    def steps(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as f:
            f.write(text)
            f.flush()
            return gaps.decode_steps(f.name)[0], printed(gaps.show, f.name)

    def test_within_and_between(self):
        steps, said = self.steps(self.recording(late=2000))
        self.assertEqual(len(steps), 3)
        within, idle = gaps.gaps_of(steps[0])
        self.assertEqual(within, [(1000, "embed", "product"), (500, "product", "sample")])
        self.assertEqual(idle, 900 + 90_000)
        self.assertIn("gaps over 5 us: 0 in 0 of 3 steps", said)
        _, said = self.steps(self.recording(late=5000))
        self.assertIn("gaps over 5 us: 1 in 1 of 3 steps; the largest 5.50 us", said)
        self.assertIn("| 5.50 | product | sample |", said)

    def test_step_cut_off(self):
        steps, _ = self.steps(self.recording(cut=True))
        self.assertEqual(len(steps), 2)

    def test_critical_path(self):
        # Steps of four layers: b begins before a has ended, and takes longer in one layer of one step.
        def step(slow):
            records, at = [(0, 500, "kernel", 8, "embed")], 500
            for layer in range(4):
                records += [(at + 100, at + 1000, "kernel", 9, "a"), (at + 800, at + 3000 + slow * (layer == 2), "kernel", 9, "b")]
                at = records[-1][1]
            return [*records, (at, at + 200, "copy", 1, "copy of kind 2"), (at + 300, at + 400, "kernel", 8, "embed")]

        self.assertEqual(gaps.layer_of(["embed", *"abababab"]), (1, 2, 4))
        self.assertIsNone(gaps.layer_of(list("abcdefgh")))
        rows = gaps.critical_path([step(0), step(600)])
        self.assertEqual([(name, begin) for name, _, _, begin in rows], [("a", 0.1), ("b", -0.2)])
        self.assertAlmostEqual(rows[0][1], 1.0)
        self.assertAlmostEqual(rows[1][1], 2.0)
        self.assertAlmostEqual(rows[1][2], 2.1)  # six, one of which takes 0.6 us longer
        self.assertEqual(gaps.critical_path([[(0, 1, "kernel", 8, n) for n in "abcdefgh"]]), [])

    def test_build(self):
        try:
            gaps.cupti()
        except SystemExit as e:
            self.skipTest(str(e))
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "activity.so")
            gaps.build(out)
            self.assertIn("InitializeInjection", subprocess.run(["nm", "-D", out], capture_output=True, text=True, check=True).stdout)


class Guard(unittest.TestCase):
    def files(self, folder, peer=390e9, base=60e9, **took):
        """A run of one model, 93 ms with everything in HBM, and its record."""
        steps = [dict(model="m", kind="prefill", fraction=0, tier="host", sequences=8, seconds=9.0)]
        for name, fraction, tier, missing, seconds in (
            ("hbm", 0, "host", 0, 0.1), ("half", 0.5, "peer", 10e9, 0.1), ("all", 1, "peer", 90e9, 0.25), ("host", 0.5, "host", 12e9, 0.25),
        ):
            steps.append(dict(model="m", kind="decode", fraction=fraction, tier=tier, sequences=8, seconds=took.get(name, seconds),
                              roofline_s=0.08, missing_bytes=missing))
        rate = [dict(path=p, bytes=n, bytes_per_s=r * n / 100) for p, r in (("peer to gpu", peer), ("host to gpu", base)) for n in (1, 100)]
        names = [os.path.join(folder, n) for n in ("record.json", "steps.json", "transfer.json")]
        pathlib.Path(names[1]).write_text("\n".join(map(json.dumps, steps)) + "\n")
        pathlib.Path(names[2]).write_text(json.dumps(dict(points=rate)))
        return names

    def outcome(self, what, *args):
        code = []
        said = printed(lambda: code.append(what(*args)))
        return code[0], said

    def test_shares(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            self.assertEqual(guard.record(*names, "abc1234"), 0)
            self.assertEqual(json.loads(pathlib.Path(names[0]).read_text()),
                             dict(measured_at="abc1234", shares={"m 0 % 8": 0.8, "m 50 % peer 8": 1.0, "m 100 % peer 8": 0.8, "m 50 % host 8": 0.8}))
            for took, want, says in (
                ({}, 0, "4 cells, 0 of them unrecorded, 0 worse"),
                (dict(all=0.2575), 0, " 0 worse"),
                (dict(all=0.26), 1, "FAILED m 100 % peer 8: 76.9 % of what is possible, recorded 80.0 %"),
                (dict(host=0.2575), 0, " 0 worse"),
                (dict(host=0.26), 1, "FAILED m 50 % host 8: 76.9 % of what is possible, recorded 80.0 %"),
                (dict(hbm=0.11), 1, "FAILED m 0 % 8"),
                # Slower in HBM and from the peer alike: the first says so.
                (dict(hbm=0.11, half=0.11), 1, " 1 worse"),
                # A slower link slows the step down, and the least with it.
                (dict(peer=290e9, all=0.32), 0, " 0 worse"),
                (dict(base=48e9, all=0.257, host=0.31), 0, " 0 worse"),
            ):
                code, said = self.outcome(guard.check, *self.files(folder, **took))
                self.assertEqual(code, want, (took, said))
                self.assertIn(says, said)

    def test_references(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            _, said = self.outcome(guard.check, *names)
            for want in (
                "| m 0 % 8 | 100.00 | 80 | 80.00 | roofline | 80.0 % | – |",
                "| m 50 % peer 8 | 100.00 | 80 | 100.00 | own step in HBM | 100.0 % | – |",
                "| m 100 % peer 8 | 250.00 | 32 | 200.00 | links | 80.0 % | – |",
                "| m 50 % host 8 | 250.00 | 32 | 200.00 | host link | 80.0 % | – |",
            ):
                self.assertIn(want, said.splitlines())
            # Without the step in HBM, the others have nothing to compare with.
            kept = [line for line in pathlib.Path(names[1]).read_text().splitlines() if '"fraction": 0,' not in line]
            pathlib.Path(names[1]).write_text("\n".join(kept))
            code, said = self.outcome(guard.check, *names)
            self.assertEqual(code, 1)
            self.assertIn("FAILED m 50 % host 8: the same step with everything in HBM was not measured", said)
            with self.assertRaisesRegex(SystemExit, "m 50 % peer 8: the same step"):
                guard.record(*names, "abc1234")
            self.assertFalse(os.path.exists(names[0]))

    def test_unrecorded_cells(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            guard.record(*names, "abc1234")
            old = json.loads(pathlib.Path(names[0]).read_text())
            del old["shares"]["m 50 % host 8"]
            pathlib.Path(names[0]).write_text(json.dumps(old))
            # However slow, it is not held to anything, and another cell still is.
            code, said = self.outcome(guard.check, *self.files(folder, host=9))
            self.assertEqual(code, 0, said)
            self.assertIn("| m 50 % host 8 | 9000.00 |", said)
            self.assertIn("| 2.2 % | – |", said)
            self.assertIn("4 cells, 1 of them unrecorded, 0 worse", said)
            code, said = self.outcome(guard.check, *self.files(folder, host=9, all=0.26))
            self.assertEqual(code, 1, said)
            self.assertIn("4 cells, 1 of them unrecorded, 1 worse", said)

    def test_missing_cell(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            guard.record(*names, "abc1234")
            kept = [line for line in pathlib.Path(names[1]).read_text().splitlines() if '"fraction": 1,' not in line]
            pathlib.Path(names[1]).write_text("\n".join(kept))
            for models, want in (((), 1), (("m",), 1), (("another",), 0)):
                code, said = self.outcome(guard.check, *names, *models)
                self.assertEqual(code, want, said)
                self.assertEqual("FAILED m 100 % peer 8: recorded and not measured" in said, want == 1, said)

    def test_compare(self):
        with tempfile.TemporaryDirectory() as folder:
            base = pathlib.Path(folder, "base.json")
            base.write_text(pathlib.Path(self.files(folder)[1]).read_text())
            for took, want, says in (
                (dict(all=0.2575), 0, "| m 100 % peer 8 | 257.50 | 250.00 | 103.0 % |"),
                (dict(all=0.26), 1, "FAILED m 100 % peer 8: 104.0 % of the base's time"),
                (dict(host=0.26), 1, "FAILED m 50 % host 8: 104.0 % of the base's time"),
            ):
                code, said = self.outcome(guard.compare, base, self.files(folder, **took)[1])
                self.assertEqual(code, want, (took, said))
                self.assertIn(says, said)
            base.write_text("")
            self.assertIn("m 0 % 8: not measured for the base", printed(guard.compare, base, self.files(folder)[1]))

    def test_names(self):
        for cell, want in (
            (dict(layers=32, fraction=0.5, tier="peer"), "mixtral-8x7b 50 % peer 324"),
            (dict(layers=32, fraction=0.5, tier="host"), "mixtral-8x7b 50 % host 324"),
            (dict(layers=16, fraction=0.5, tier="peer"), "mixtral-8x7b (16 layers) 50 % peer 324"),
            (dict(layers=16, fraction=0, tier="host"), "mixtral-8x7b (16 layers) 0 % 324"),
        ):
            self.assertEqual(guard.named(dict(model="mixtral-8x7b", sequences=324, **cell)), want)

    def test_order(self):
        """A table has a model's cells together, by sequences, whatever was measured between them."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            for model, fraction, tier, sequences in (("b", 0, "host", 32), ("b", 0, "host", 1), ("b", 1, "peer", 8), ("a", 0, "host", 1), ("b", 1, "host", 8)):
                f.write(json.dumps(dict(model=model, kind="decode", fraction=fraction, tier=tier, sequences=sequences)) + "\n")
            f.flush()
            self.assertEqual([guard.named(s) for s in guard.decodes(f.name)], ["b 0 % 1", "b 0 % 32", "b 100 % peer 8", "b 100 % host 8", "a 0 % 1"])


# What stands in for the programs of gpu.sh's bundle: steps that take what they are compared with, but the one in SLOW.
STANDS_IN = """#!%s
import json, os, sys
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
value = lambda flag: args[args.index(flag) + 1]
if name == "nvidia-smi":
    print(os.environ["GPU"])
elif name == "moeserve":
    points = [dict(path=p, bytes=336 << 20, bytes_per_s=r) for p, r in (("peer to gpu", 390e9), ("host to gpu", 55e9))]
    with open(value("--json"), "w") as f:
        json.dump(dict(points=points), f)
else:
    layers = {"mixtral-8x7b": 32, "qwen1.5-moe-a2.7b": 24, "qwen3-30b-a3b": 48}
    with open(value("-steps"), "a") as f:
        for model, fractions in (w.split("@") for w in value("-whole").split()):
            cut = int(value("-layers")) if "-layers" in args else layers[model]
            for text in fractions.split(","):
                tier, fraction = "peer" if text.endswith("p") else "host", float(text.rstrip("p"))
                line = dict(model=model, layers=cut, fraction=fraction, tier=tier)
                f.write(json.dumps(dict(line, kind="load", seconds=4)) + "\\n")
                for n in map(int, value("-batches").split(",")):
                    rate = 445e9 if tier == "peer" else 55e9
                    seconds = 0.02 + 0.1 * fraction
                    if f"{model} {fraction:g} {tier} {n}" == os.environ.get("SLOW") and name == "node.test":
                        seconds *= 1.04
                    f.write(json.dumps(dict(line, kind="decode", sequences=n, seconds=seconds, roofline_s=0.02, missing_bytes=(0.02 + 0.1 * fraction) * rate * (fraction > 0))) + "\\n")
    print("--- PASS: TestGPUPresets")
""" % sys.executable


@unittest.skipUnless(shutil.which("xz"), "no xz, which gpu.sh unpacks with")
class GuardPart(unittest.TestCase):
    """The part guard of gpu.sh, with programs that stand in for those that need GPUs."""

    def run_part(self, record=None, *, gpu="NVIDIA H200", base=False, **variables):
        """The exit code, what is said, and the shares that are recorded; record are those that there were."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            for name in ("bin", "tree/node", "tree/tools/cuda"):
                (path / name).mkdir(parents=True)
            for name in ("gpu.sh", "gpu.py", "guard.py"):
                shutil.copy(HERE / name, path / "tree/tools/cuda")
            for name in ("guard.json", "guard-h100.json"):
                (path / "tree/tools/cuda" / name).write_text(json.dumps(dict(measured_at="old", shares=record or {})))
            programs = ["bin/nvidia-smi", "moeserve", "node.test"] + ["node-base.test"] * base
            for name in programs:
                (path / name).write_text(STANDS_IN)
                (path / name).chmod(0o755)
            with tarfile.open(path / "bundle.tar.xz", "w:xz") as bundle:
                for name in programs[1:]:
                    bundle.add(path / name, name)
            env = {k: v for k, v in os.environ.items() if not k.startswith("GUARD_") and k not in ("SLOW", "OVERLAP")}
            env |= dict(PATH=f"{path / 'bin'}:{os.environ['PATH']}", GPU=gpu, **variables)
            script = str(path / "tree/tools/cuda/gpu.sh")
            p = subprocess.run(["bash", script, "run", folder, str(path / "logs"), "guard"], env=env, capture_output=True, text=True, timeout=60)
            recorded = path / "logs" / "recorded.json"
            return p.returncode, p.stdout + p.stderr, json.loads(recorded.read_text())["shares"] if recorded.exists() else None

    def expected(self, mixtral, many, all_of_it):
        def some(model, what, *sequences):
            return [f"{model} {what} {n}" for n in sequences]

        cells = some(mixtral, "0 %", 1, 8, 32, 64, 324, many) + some(mixtral, "50 % peer", 1, 8, 32, 64, 324, many)
        cells += some(mixtral, "100 % peer", 1, 8, 32, 64, 324, many) * all_of_it + some(mixtral, "50 % host", 1, 8)
        for model in ("qwen1.5-moe-a2.7b", "qwen3-30b-a3b"):
            cells += some(model, "0 %", 1, 8, 32, 64, 324) + some(model, "50 % peer", 1, 8, 32, 64, 324)
            cells += some(model, "50 % host", 1, 8) * (model == "qwen1.5-moe-a2.7b")
        return cells

    def test_cells(self):
        for gpu, record, cells in (
            ("NVIDIA H200", "guard.json", self.expected("mixtral-8x7b", 3240, True)),
            ("NVIDIA H100 80GB HBM3", "guard-h100.json", self.expected("mixtral-8x7b (16 layers)", 1620, False)),
        ):
            code, said, recorded = self.run_part(gpu=gpu, GUARD_RECORD="abc1234")
            self.assertEqual(code, 0, said)
            self.assertEqual(list(recorded), cells)
            self.assertIn(f"{len(cells)} cells, {len(cells)} of them unrecorded, 0 worse", said)
            self.assertLessEqual(set(json.loads((HERE / record).read_text())["shares"]), set(cells), f"{record} has cells that are not measured")

    def failed(self, said):
        return [line for line in said.splitlines() if line.startswith("FAILED")]

    def test_slow_cell(self):
        _, _, recorded = self.run_part(GUARD_RECORD="abc1234")
        code, said, _ = self.run_part(recorded, base=True)
        self.assertEqual((code, self.failed(said)), (0, []), said)
        host, peer = ("mixtral-8x7b 0.5 host 8", "mixtral-8x7b 50 % host 8"), ("qwen3-30b-a3b 0.5 peer 64", "qwen3-30b-a3b 50 % peer 64")
        for (slow, name), record, base in ((host, recorded, True), (peer, recorded, False), (peer, {}, True), (host, {}, False)):
            worse, longer = f"FAILED {name}: 96.2 % of what is possible, recorded 100.0 %", f"FAILED {name}: 104.0 % of the base's time"
            want = [worse] * (record != {}) + [longer] * base
            code, said, _ = self.run_part(record, base=base, SLOW=slow)
            self.assertEqual((code, self.failed(said)), (int(want != []), want), said)

    def test_some_models(self):
        record = {"mixtral-8x7b 0 % 1": 0.8, "qwen1.5-moe-a2.7b 50 % host 1": 0.8}
        code, said, _ = self.run_part(record, GUARD_MODELS="qwen1.5-moe-a2.7b")
        self.assertEqual(code, 0, said)
        self.assertIn("12 cells, 11 of them unrecorded, 0 worse", said)
        self.assertNotIn("mixtral-8x7b", said)
        code, said, _ = self.run_part(dict(record, **{"qwen1.5-moe-a2.7b 50 % host 2": 0.8}), GUARD_MODELS="qwen1.5-moe-a2.7b")
        self.assertEqual((code, self.failed(said)), (1, ["FAILED qwen1.5-moe-a2.7b 50 % host 2: recorded and not measured"]), said)
        for variables, says in ((dict(GUARD_MODELS="qwen"), "GUARD_MODELS has qwen"),
                                (dict(GUARD_MODELS="qwen3-30b-a3b", GUARD_RECORD="abc1234"), "without GUARD_MODELS")):
            code, said, recorded = self.run_part(**variables)
            self.assertEqual((code, recorded), (2, None), said)
            self.assertIn(says, said)


class Load(unittest.TestCase):
    def test_read_rates(self):
        # Not in /tmp, which may be in memory and know no reads past the cache.
        with tempfile.TemporaryDirectory(dir=HERE.parents[1] / "build") as folder:
            files = [os.path.join(folder, name) for name in "ab"]
            for f in files:
                pathlib.Path(f).write_bytes(os.urandom(3 * load.PIECE + 17))
            load.forget(files)
            rates = load.read_rates(files)
        self.assertEqual(set(rates), set(load.THREADS))
        self.assertGreater(min(rates.values()), 0)


class Flash(unittest.TestCase):
    def test_shapes_of_presets(self):
        same = {name: name for name in flash.MODELS} | flash.ALIKE
        self.assertIn("phi-3.5-moe", same)
        for name, measured in same.items():
            c = prefill.config_of(name)
            self.assertEqual((c["num_attention_heads"], c["num_key_value_heads"]), flash.MODELS[measured], name)
            self.assertEqual(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"], flash.HEAD, name)

    def test_table(self):
        row = dict(model="mixtral-8x7b", sequences=1, tokens=4096, context=4096, seconds=1e-3, flops_per_s=500e12, bytes_per_s=1e12)
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = (os.path.join(folder, name) for name in ("ours.json", "theirs.json"))
            pathlib.Path(ours).write_text(json.dumps(dict(read_bytes_per_s=4e12, results=[row | dict(kernel="prompt.cu")])))
            pathlib.Path(theirs).write_text(json.dumps(dict(results=[row | dict(kernel="FA3 paged", flops_per_s=400e12)])))
            said = printed(flash.table, ours, theirs)
        self.assertIn("phi-3.5-moe has the attention of mixtral-8x7b", said)
        self.assertIn("| mixtral-8x7b | 1 | 4096 | 4096 | prompt.cu | 1.000 | 500.00 | - | 400.00 | 125 % | - |", said)


# Both engines of prefill.py, played: a token takes 10 us in moeserve and 20 us in vLLM, and 0.1 s more past 4,096 tokens.
MOESERVE = """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "version":
    print("moeserve 1")
    sys.exit()
a = dict(zip(sys.argv[4::2], sys.argv[5::2]))
assert a["--places"] == "nowhere" and a["--device"] == "cuda" and a["--load-format"] == "dummy", sys.argv
if a["--num-hidden-layers"] == "99":
    sys.exit("no such depth")
rows = []
for i, n in enumerate(map(int, a["--lengths"].split(","))):
    t = (n + 1) * 1e-5 if a["--max-num-batched-tokens"] == "8192" else (n + 1) * 0.9e-5
    rows.append({"prefix_tokens": n, "ttft_s": t, "decode_step_s": 0.001 + (0.1 / 7 if n + 1 <= 4096 < n + 8 else 0)})
rows[0]["ttft_s"] = 1000.0
json.dump({"device": "a GPU", "model": sys.argv[3], "prefix_ttft": rows}, open(a["--json"], "w"))
"""
TORCH = """
__version__ = "2"
class cuda:
    synchronize = empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda i: "a GPU")
    mem_get_info = staticmethod(lambda: (1 << 30, 3 << 30))
"""
VLLM_PLAYED = """
import json, os, time, types
__version__ = "0.26"
print("what vLLM says")
class SamplingParams:
    def __init__(self, **k): assert k["max_tokens"] == 1
class LLM:
    def __init__(self, **k):
        c = json.load(open(k["model"] + "/config.json"))
        assert not c.get("sliding_window") and k["max_model_len"] == 32768 and not k["enable_prefix_caching"], (c, k)
        if c["num_hidden_layers"] == 7:
            time.sleep(60)
        if c["num_hidden_layers"] == 6:
            os._exit(3)
        self.s = types.SimpleNamespace(max_num_scheduled_tokens=k["max_num_batched_tokens"], schedule=self.schedule)
        self.llm_engine = self
        self.engine_core = types.SimpleNamespace(engine_core=types.SimpleNamespace(scheduler=self.s))
    def schedule(self):
        n = min(self.left, self.s.max_num_scheduled_tokens)
        self.left -= n
        return types.SimpleNamespace(total_num_scheduled_tokens=n)
    def add_request(self, name, prompt, params):
        self.left, self.done = len(prompt["prompt_token_ids"]), False
    def has_unfinished_requests(self): return not self.done
    def step(self):
        time.sleep(2e-5 * self.s.schedule().total_num_scheduled_tokens)
        self.done = self.left == 0
        return [types.SimpleNamespace(finished=True, outputs=[types.SimpleNamespace(token_ids=[1])])] if self.done else []
"""


class Prefill(unittest.TestCase):
    def measured(self, **changed):
        with tempfile.TemporaryDirectory() as folder:
            where = pathlib.Path(folder)
            (where / "moeserve").write_text(MOESERVE)
            (where / "moeserve").chmod(0o755)
            for name, text in (("torch", TORCH), ("vllm", VLLM_PLAYED)):
                (where / name).mkdir()
                (where / name / "__init__.py").write_text(text)
            o = dict(moeserve=str(where / "moeserve"), out=str(where / "out" / "out.json"), models="mixtral-8x7b:8,phi-3.5-moe:8", length=32000, batched_tokens="8192,32768",
                     rounds=2, repetitions=1, budget=100, start_limit=20, limit=20, flags="--device cuda", vllm="{}", without_vllm=False) | changed
            code = None

            def run():
                nonlocal code
                code = prefill.measure(argparse.Namespace(**o))

            with unittest.mock.patch.dict(os.environ, {"PYTHONPATH": folder}):
                said = printed(run)
            return code, said, json.loads(pathlib.Path(o["out"]).read_text())

    def test_both(self):
        code, said, record = self.measured()
        self.assertEqual((code, record["failed"], record["vllm"], record["moeserve"]), (0, [], "0.26", "moeserve 1"), said)
        rows = {(r["model"], r["engine"], r["batched_tokens"], r["name"]): r for r in record["results"]}
        self.assertEqual(len(rows), 2 * 2 * 2 + 3 + 2, said)
        for r in rows.values():
            self.assertEqual(len(r["seconds"]), 2)
        self.assertEqual(rows["mixtral-8x7b", "moeserve", 8192, "long"]["seconds"], [0.32001] * 2)
        self.assertAlmostEqual(rows["mixtral-8x7b", "vLLM", 8192, "long"]["seconds"][0], 0.64, delta=0.2)
        self.assertEqual([rows["phi-3.5-moe", "moeserve", 8192, k]["prompt_tokens"] for k in ("short factors", "grows past", "long factors")], [4033, 4091, 4161])
        lines = said.splitlines()
        for want in ("| mixtral-8x7b | 8 | 32,001 | 8,192 | 320.0 | 0.0 % | ", "| mixtral-8x7b | 8 | 32,001 | the best | 288.0 |", "| phi-3.5-moe | 8 | 4,161, long factors | 8,192 | 41.6 |",
                     "phi-3.5-moe: a sequence that grows past longrope's original maximum position is computed again with the long factors, once: 100.0 ms"):
            self.assertTrue(any(line.startswith(want) for line in lines), (want, said))
        # Both take the first place in turn.
        order = [line.split(", ")[1] for line in lines if line.startswith("mixtral-8x7b, ")]
        self.assertEqual(order, ["moeserve", "vLLM", "vLLM", "moeserve", "vLLM", "moeserve", "moeserve", "vLLM"], said)
        self.assertIn("vLLM, steps of 8192: 32001 tokens", said)
        self.assertIn("in 4 steps", said)

    def test_failures(self):
        began = time.time()
        code, said, record = self.measured(models="mixtral-8x7b:6,qwen3-30b-a3b:7,mixtral-8x7b:99", start_limit=2, rounds=1)
        self.assertEqual(code, 1)
        for want in ("mixtral-8x7b, vLLM: did not open: it ended", "qwen3-30b-a3b, vLLM: did not open: no answer in 2 s", "exit 1: no such depth",
                     "| qwen3-30b-a3b | 7 | 32,001 | 8,192 | 320.0 | 0.0 % | – | – | – |"):
            self.assertIn(want, said)
        self.assertLess(time.time() - began, 30)
        code, said, record = self.measured(models="mixtral-8x7b:8", budget=0)
        self.assertEqual((code, record["results"]), (1, []))
        self.assertIn("no time left", said)
        code, said, record = self.measured(models="mixtral-8x7b:8", without_vllm=True, rounds=1)
        self.assertEqual((code, len(record["results"])), (0, 2), said)

    def test_offload(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, t in (("none-8192", 2.0), ("peer-8192", 2.1), ("host-8192", 3.0), ("host-32768", 1.0)):
                rows = [dict(prefix_tokens=32000, ttft_s=x, decode_step_s=0.01) for x in (9 * t, t, t)]
                pathlib.Path(folder, name + ".json").write_text(json.dumps(dict(device="a GPU", model="mixtral", prefix_ttft=rows)))
            pathlib.Path(folder, "peer-32768.json").write_text("")
            lines = printed(prefill.offload, folder).splitlines()
        self.assertEqual(lines[2:], [
            "| mixtral | 32,001 | 8,192 | in HBM, as all | 2000.0 | 0.0 % | 1.00 |",
            "| mixtral | 32,001 | 8,192 | on a peer | 2100.0 | 0.0 % | 1.05 |",
            "| mixtral | 32,001 | 8,192 | in host memory | 3000.0 | 0.0 % | 1.50 |",
            "| mixtral | 32,001 | 32,768 | in host memory | 1000.0 | 0.0 % | – |",
        ])
class Policy(unittest.TestCase):
    def test_compare(self):
        cells = {"a": 100.0, "b": 90.0, "c": 80.0, "d": "does not fit"}
        for auto, passes, says in ((95.1, True, "ratio 0.951"), (200.0, True, "ratio 2.000"), (94.9, False, "auto is 5.1 % slower"), ("not done in time", False, "was not measured")):
            lines, near = policy.compare("m", {"--policy auto": auto} | cells)
            self.assertEqual(near, passes, lines)
            self.assertIn(says, lines[-1])
            self.assertIn("m: d: does not fit", lines)
        lines, near = policy.compare("m", {"--policy auto": 9.0, "a": 1.0, "b": 1.0, "c": "does not fit"})
        self.assertFalse(near)
        self.assertIn("2 policies were measured", lines[-1])

    def test_run(self):
        # A moeserve for which auto is as good as told, that has no memory for one cell, and hangs at another.
        with tempfile.TemporaryDirectory() as folder:
            stub = os.path.join(folder, "moeserve")
            pathlib.Path(stub).write_text("""#!/bin/sh
for last; do :; done
case "$*" in
  *--policy*) rate=$AUTO ;;
  *"attention cpu"*) echo 'moeserve: out of memory on gpu0' >&2; exit 2 ;;
  *2048*) exec sleep 60 ;;
  *) rate=100 ;;
esac
echo "{\\"throughput_tok_s\\": $rate}" >"$last"
""")
            os.chmod(stub, 0o755)
            for auto, code in (("96", 0), ("90", 1)):
                done = subprocess.run([sys.executable, HERE / "policy.py", stub, folder, "4", "8", "mixtral-8x7b", "--device", "cpu"],
                                      capture_output=True, text=True, timeout=30, env=os.environ | {"AUTO": auto}, check=False)
                self.assertEqual(done.returncode, code, done)
                self.assertIn("--attention cpu: does not fit", done.stdout)
                self.assertIn("2048: not done in time", done.stdout)


class Tenant(unittest.TestCase):
    def test_protocol(self):
        """What bench harvest asks and what the tenant answers, with host memory in place of a GPU's."""
        p = subprocess.Popen([sys.executable, str(HERE / "tenant.py"), "--host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        def ask(**request):
            p.stdin.write(json.dumps(request) + "\n")
            p.stdin.flush()
            return json.loads(p.stdout.readline())

        self.assertEqual(json.loads(p.stdout.readline()), {"ready": True})
        for held in (1000, 3000, 2000, 0):
            said = ask(hold=held)
            self.assertEqual((said["held"], said["refused"]), (held, False))
        ask(hold=500)
        said = ask(hold=1 << 40)
        self.assertEqual((said["held"], said["refused"]), (500, True))
        for kind in ("bf16 product", "HBM loop"):
            self.assertGreater(ask(work=kind, seconds=0.01)["rate"], 0)
        self.assertIn("KeyError", ask(work="nothing", seconds=0.01)["error"])
        _, said = p.communicate(timeout=10)
        self.assertEqual(p.returncode, 0)
        self.assertIn("tenant: refused", said)

    def test_pieces(self):
        """Memory in allocations of some size; one that is refused gives back those before it."""
        sys.path.insert(0, str(HERE))
        import tenant

        t = tenant.Tenant(tenant.Host(), 30 << 20)
        for held, pieces in ((70 << 20, 3), (20 << 20, 1), (50 << 20, 2)):
            self.assertEqual(t.hold(held)["held"], held)
            self.assertEqual(len(t.blocks), pieces)
        t.device.LIMIT = 10 << 20
        t.piece = 0
        said = t.hold(60 << 20)
        self.assertEqual((said["held"], said["refused"]), (60 << 20, False))
        t.piece = 20 << 20
        said = t.hold(75 << 20)
        self.assertEqual((said["held"], said["refused"]), (60 << 20, True))


if __name__ == "__main__":
    os.makedirs(HERE.parents[1] / "build", exist_ok=True)
    unittest.main()
