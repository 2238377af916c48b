"""Tests of beside.py, gaps.py, guard.py, load.py, policy.py and tenant.py as far as they go without a GPU: python3 tools/cuda/test_measure.py"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import beside
import gaps
import guard
import load
import policy

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
    def files(self, folder, peer=390e9, **took):
        """A run of one model, 93 ms with everything in HBM, and its record."""
        steps = [dict(model="m", kind="prefill", fraction=0, sequences=8, seconds=9.0)]
        for name, fraction, missing in (("hbm", 0, 0), ("half", 0.5, 10e9), ("all", 1, 90e9)):
            steps.append(dict(model="m", kind="decode", fraction=fraction, sequences=8, seconds=took.get(name, 0.1 if name != "all" else 0.25),
                              roofline_s=0.08, missing_bytes=missing))
        rate = [dict(path=p, bytes=n, bytes_per_s=r * n / 100) for p, r in (("peer to gpu", peer), ("host to gpu", 60e9)) for n in (1, 100)]
        names = [os.path.join(folder, n) for n in ("record.json", "steps.json", "transfer.json")]
        pathlib.Path(names[1]).write_text("\n".join(map(json.dumps, steps)) + "\n")
        pathlib.Path(names[2]).write_text(json.dumps(dict(points=rate)))
        return names

    def test_shares(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            self.assertEqual(guard.record(*names, "abc1234"), 0)
            self.assertEqual(json.loads(pathlib.Path(names[0]).read_text()),
                             dict(measured_at="abc1234", shares={"m 0 % 8": 0.8, "m 50 % 8": 1.0, "m 100 % 8": 0.8}))
            for took, want, says in (
                ({}, 0, "3 cells, 0 worse"),
                (dict(all=0.2575), 0, "0 worse"),
                (dict(all=0.26), 1, "FAILED m 100 % 8: 76.9 % of what is possible, recorded 80.0 %"),
                (dict(hbm=0.11), 1, "FAILED m 0 % 8"),
                # Slower in HBM and from the peer alike: the first says so.
                (dict(hbm=0.11, half=0.11), 1, "1 worse"),
                # A slower link slows the step down, and the least with it.
                (dict(peer=290e9, all=0.32), 0, "0 worse"),
            ):
                code = None

                def checked():
                    nonlocal code
                    code = guard.check(*self.files(folder, **took))

                said = printed(checked)
                self.assertEqual(code, want, (took, said))
                self.assertIn(says, said)

    def test_missing_cell(self):
        with tempfile.TemporaryDirectory() as folder:
            names = self.files(folder)
            guard.record(*names, "abc1234")
            kept = [line for line in pathlib.Path(names[1]).read_text().splitlines() if '"fraction": 1' not in line]
            pathlib.Path(names[1]).write_text("\n".join(kept))
            self.assertIn("m 100 % 8: recorded and not measured", printed(guard.check, *names))

    def test_compare(self):
        with tempfile.TemporaryDirectory() as folder:
            base = pathlib.Path(folder, "base.json")
            base.write_text(pathlib.Path(self.files(folder)[1]).read_text())
            for took, want, says in (
                (dict(all=0.2575), 0, "| m 100 % 8 | 257.50 | 250.00 | 103.0 % |"),
                (dict(all=0.26), 1, "FAILED m 100 % 8: 104.0 % of the base's time"),
            ):
                code = None

                def compared():
                    nonlocal code
                    code = guard.compare(base, self.files(folder, **took)[1])

                said = printed(compared)
                self.assertEqual(code, want, (took, said))
                self.assertIn(says, said)
            base.write_text("")
            self.assertIn("m 0 % 8: not measured for the base", printed(compared))

    def test_cut_presets(self):
        for layers, want in ((32, "mixtral-8x7b 50 % 324"), (16, "mixtral-8x7b (16 layers) 50 % 324")):
            self.assertEqual(guard.named(dict(model="mixtral-8x7b", layers=layers, fraction=0.5, sequences=324)), want)


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


if __name__ == "__main__":
    os.makedirs(HERE.parents[1] / "build", exist_ok=True)
    unittest.main()
