#!/usr/bin/env python3
"""The whole prefill of long prompts, moeserve beside vLLM on one GPU, with random weights in bfloat16.

    prefill.py run MOESERVE OUT.json [--models mixtral-8x7b:8,qwen3-30b-a3b:24,phi-3.5-moe:8] [...]
    prefill.py table OUT.json            prints what was measured as Markdown
    prefill.py offload FOLDER            prints what part prefill of gpu.sh measured: experts offloaded and not

A model is a preset or a folder with config.json, and the number of its layers that are left. What is measured is the time to
the first token of one prompt of --length tokens and one more, in steps of at most each of --batched-tokens: moeserve by `bench prefix`
with its KV cache nowhere, vLLM by its engine in the same process (prefix cache off, one token). Of a model vLLM is opened once, for the largest
of --batched-tokens; its scheduler is then told how many tokens a step may have, as max_num_batched_tokens would. It stays
open, and idle, while moeserve runs. The two take turns, and change places each round; each time the first prompt of
each length is not counted. Figures are medians of all others.

Of a model with longrope (Phi-3.5-MoE) prompts just below and just above its original maximum position are measured, too, and what it costs
moeserve when a sequence grows past that: it is computed again with the long factors. vLLM has the long factors for all
sequences, since its maximum length is more than that position.

A piece that fails or takes longer than its limit is reported and left out, as is what --budget seconds have no time for; OUT.json has what
was measured so far after every piece. Where vLLM is not installed moeserve is measured alone.
"""

import argparse
import gc
import json
import os
import pathlib
import queue
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRESETS = ROOT / "configs" / "presets"
NEW_TOKENS = 8  # that bench prefix generates
MAX_LENGTH = 32768  # of vLLM's sequences, where the prompt is no longer
KV_GIB = 3  # of vLLM's KV cache: 48 KiB a token of Qwen3-30B-A3B cut to 24 layers


class Failed(Exception):
    pass


def config_of(model):
    path = pathlib.Path(model, "config.json") if os.path.isdir(model) else PRESETS / f"{model}.json"
    return json.loads(path.read_text())


def boundary(config):
    """The position after which longrope has other factors; 0: no longrope."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type")) != "longrope":
        return 0
    return rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]


def lengths_of(config, length):
    """Prefixes that are measured by name; those beside long are of longrope."""
    at = boundary(config)
    found = {"long": length}
    if at:
        margin = max(16, at // 64)
        found |= {"short factors": at - margin, "grows past": at - NEW_TOKENS + 2, "long factors": at + margin}
    return found


def vllm_config(config, layers):
    """The config of a folder for vLLM: the model's own but for the depth. No window where it is as long as the context."""
    c = dict(config, num_hidden_layers=layers, torch_dtype="bfloat16")
    if (c.get("sliding_window") or 0) >= c["max_position_embeddings"]:
        c["sliding_window"] = None
    if "num_local_experts" in c and c["model_type"] == "mixtral":
        c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return c


def environment():
    """That of both engines, with what moeserve loads of CUDA where this Python has it."""
    env = dict(os.environ)
    if not env.get("MOESERVE_CUDA_LIBRARIES"):
        site = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
        folders = [site / "cu13" / "lib", *sorted(site.glob("*/lib")), pathlib.Path("/usr/local/cuda/lib64")]
        env["MOESERVE_CUDA_LIBRARIES"] = ":".join(str(f) for f in folders if f.is_dir())
        if not env["MOESERVE_CUDA_LIBRARIES"]:
            del env["MOESERVE_CUDA_LIBRARIES"]
    for key, value in dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
                           VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_CACHE_ROOT=os.path.join(tempfile.gettempdir(), "vllm-cache")).items():
        env.setdefault(key, value)
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is in this process
    return env


def end(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# vLLM, in a process of its own.


def worker():
    """Answers requests, a line of JSON each: open, then run."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    here = str(pathlib.Path(__file__).resolve().parent)
    sys.path[:] = [p for p in sys.path if p != here]  # whose files have names of modules

    def say(**what):
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        import torch
        import vllm
        from vllm import LLM, SamplingParams
    except Exception as e:  # an import of a cut-down vLLM fails in many ways
        say(error=f"{type(e).__name__}: {e}")
        return
    say(vllm=vllm.__version__, torch=torch.__version__)
    llm, number = None, 0
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "open" in request:
                began = time.perf_counter()
                llm = LLM(**request["open"])
                gc.collect()
                torch.cuda.empty_cache()  # moeserve may be next
                say(seconds=time.perf_counter() - began, device=torch.cuda.get_device_name(0), used_gib=used(torch))
                continue
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            scheduler.max_num_scheduled_tokens = request["batched_tokens"]
            params = SamplingParams(temperature=0.0, max_tokens=1, min_tokens=1, ignore_eos=True, detokenize=False)
            steps, schedule = [], scheduler.schedule

            def counted(*args, **kwargs):
                step = schedule(*args, **kwargs)
                if step.total_num_scheduled_tokens:
                    steps.append(step.total_num_scheduled_tokens)
                return step

            scheduler.schedule = counted
            times = []
            try:
                for _ in range(request["repetitions"] + 1):
                    prompt = {"prompt_token_ids": [random.randrange(10, request["vocab"] - 10) for _ in range(request["tokens"])]}
                    steps.clear()
                    torch.cuda.synchronize()
                    began, number = time.perf_counter(), number + 1
                    llm.llm_engine.add_request(f"p{number}", prompt, params)
                    got = 0
                    while llm.llm_engine.has_unfinished_requests():
                        got += sum(len(o.outputs[0].token_ids) for o in llm.llm_engine.step() if o.finished)
                    times.append(time.perf_counter() - began)
                    if got != 1:
                        raise RuntimeError(f"{got} tokens, not 1")
                    if max(steps) > request["batched_tokens"] or sum(steps) < request["tokens"]:
                        raise RuntimeError(f"steps of {steps} tokens")
            finally:
                scheduler.schedule = schedule
            torch.cuda.empty_cache()  # moeserve is next
            say(seconds=times[1:], steps=steps)
        except Exception as e:
            traceback.print_exc()
            say(error=f"{type(e).__name__}: {e}"[:2000])


def used(torch):
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 1)


class VLLM:
    """vLLM of one model. It imports at once, and opens the model when it is asked to."""

    def __init__(self, log):
        self.log = log
        with open(log, "w") as f:
            self.process = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).resolve()), "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f,
                                            text=True, env=environment(), start_new_session=True)
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.imported = None

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def answer(self, seconds):
        try:
            line = self.lines.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.end()
            raise Failed(f"no answer in {seconds:.0f} s: see {self.log}") from None
        if line is None:
            self.end()
            raise Failed(f"it ended: see {self.log}")
        got = json.loads(line)
        if "error" in got:
            raise Failed(got["error"])
        return got

    def ask(self, seconds, **request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as e:
            raise Failed(f"it has ended ({e}): see {self.log}") from e
        return self.answer(seconds)

    def open(self, seconds, **how):
        began = time.time()
        self.imported = self.answer(seconds)
        return self.ask(seconds - (time.time() - began), open=how)

    def end(self):
        end(self.process)
        self.reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:
                pass

    def said(self):
        """The last of what it wrote."""
        return "\n".join(pathlib.Path(self.log).read_text(errors="replace").splitlines()[-12:])

    def untuned(self):
        """Whether vLLM says that its MoE kernel has no tuned configuration for this GPU."""
        return "Using default MoE config" in pathlib.Path(self.log).read_text(errors="replace")


# moeserve


def moeserve(o, model, layers, batched_tokens, lengths, seconds):
    """Times to first token by prefix, and mean times of a later token; the first of each is left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        args = [o.moeserve, "bench", "prefix", model, "--load-format", "dummy", "--num-hidden-layers", str(layers), "--places", "nowhere",
                "--lengths", ",".join(str(n) for n in lengths for _ in range(o.repetitions + 1)), "--max-num-batched-tokens", str(batched_tokens),
                "--max-num-seqs", "8", "--gpu-memory-utilization", "0.95", "--log-level", "error", "--json", path, *o.flags.split()]
        p = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        try:
            _, err = p.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(p)
            raise Failed(f"not done in {seconds:.0f} s: {' '.join(args)}") from None
        if p.returncode:
            raise Failed(f"exit {p.returncode}: {err.strip()[-800:]}")
        return times_of(json.loads(pathlib.Path(path).read_text()))


def times_of(result):
    """The times of a result of bench prefix by prefix: (to the first token, mean of a later one), but for the first of each."""
    found = {}
    for x in result["prefix_ttft"]:
        found.setdefault(x["prefix_tokens"], []).append((x["ttft_s"], x["decode_step_s"]))
    return result["device"], {n: (rows[1:] or rows) for n, rows in found.items()}


# The measurement


def measure(o):
    began = time.time()
    batched = [int(x) for x in o.batched_tokens.split(",")]
    models = []
    for text in o.models.split(","):
        name, _, layers = text.rpartition(":")
        if not name or not layers.isdigit():
            sys.exit(f"--models has {text}: must be MODEL:LAYERS")
        models.append((name, int(layers)))
    results = []
    record = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "length": o.length, "repetitions": o.repetitions, "results": results, "failed": [],
              "moeserve": version(o)}
    failed = record["failed"]

    def left():
        return o.budget - (time.time() - began)

    def save():
        temporary = o.out + ".tmp"
        pathlib.Path(temporary).write_text(json.dumps(record, indent=1))
        os.replace(temporary, o.out)

    def fail(model, what, why):
        failed.append({"model": model, "what": what, "error": str(why)})
        print(f"{model}, {what}: {why}", flush=True)
        save()

    def add(model, layers, engine, tokens, n, name, seconds, step=()):
        for r in results:
            if (r["model"], r["engine"], r["batched_tokens"], r["name"]) == (model, engine, tokens, name):
                break
        else:
            r = {"model": model, "layers": layers, "engine": engine, "batched_tokens": tokens, "prompt_tokens": n + 1, "name": name, "seconds": [], "later_token_s": []}
            results.append(r)
        r["seconds"] += seconds
        r["later_token_s"] += step

    workers = {}
    logs = pathlib.Path(o.out).resolve().parent
    logs.mkdir(parents=True, exist_ok=True)
    try:
        if not o.without_vllm:
            for name, _ in models:  # all import now, side by side
                workers[name] = VLLM(str(logs / f"vllm-{os.path.basename(name.rstrip('/'))}.log"))
        for i, (name, layers) in enumerate(models):
            share = time.time() + left() / (len(models) - i)
            config = config_of(name)
            lengths = lengths_of(config, o.length)
            other = workers.get(name)
            if other and left() < 5:
                fail(name, "vLLM", "no time left")
                other = None
            if other:
                with tempfile.TemporaryDirectory(prefix="vllm-model-") as folder:
                    pathlib.Path(folder, "config.json").write_text(json.dumps(vllm_config(config, layers)))
                    longest = max(lengths.values()) + 2
                    try:
                        how = dict(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_num_seqs=8,
                                   max_model_len=min(max(MAX_LENGTH, longest), config["max_position_embeddings"]), max_num_batched_tokens=max(batched),
                                   enable_prefix_caching=False, disable_log_stats=True, gpu_memory_utilization=0.8, kv_cache_memory_bytes=KV_GIB << 30,
                                   compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]})
                        got = other.open(min(o.start_limit, left()), **(how | json.loads(o.vllm)))
                        record.setdefault("vllm", other.imported["vllm"])
                        print(f"{name}: vLLM {other.imported['vllm']} open after {got['seconds']:.0f} s, {got['used_gib']} GiB of {got['device']}", flush=True)
                    except Failed as e:
                        other.end()
                        fail(name, "vLLM", f"did not open: {e}")
                        print(other.said(), flush=True)
                        other = None
            for turn in range(o.rounds):
                start = time.time()
                for at, tokens in enumerate(batched if turn % 2 == 0 else batched[::-1]):
                    # What longrope costs needs no large steps.
                    chosen = {k: n for k, n in lengths.items() if k == "long" or tokens == batched[0]}
                    for engine in ("moeserve", "vLLM") if (at + turn) % 2 == 0 else ("vLLM", "moeserve"):
                        what = f"{engine}, steps of {tokens}"
                        if engine == "vLLM" and not other:
                            continue
                        if left() < 5:
                            fail(name, what, "no time left")
                            continue
                        piece, said = time.time(), []
                        try:
                            if engine == "moeserve":
                                record["device"], times = moeserve(o, name, layers, tokens, list(dict.fromkeys(chosen.values())), min(o.limit, left()))
                                for k, n in chosen.items():
                                    add(name, layers, engine, tokens, n, k, [t for t, _ in times[n]], [t for _, t in times[n]])
                                    said.append(f"{n + 1} tokens {1e3 * statistics.median(t for t, _ in times[n]):.1f} ms")
                            else:
                                for k, n in chosen.items():
                                    if k == "grows past":
                                        continue
                                    got = other.ask(min(o.limit, left()), tokens=n + 1, batched_tokens=tokens, repetitions=o.repetitions, vocab=config["vocab_size"])
                                    add(name, layers, engine, tokens, n, k, got["seconds"])
                                    said.append(f"{n + 1} tokens {1e3 * statistics.median(got['seconds']):.1f} ms in {len(got['steps'])} steps")
                        except (Failed, ValueError, KeyError, OSError) as e:
                            fail(name, what, e if isinstance(e, Failed) else f"{type(e).__name__}: {e}")
                            if engine == "vLLM":
                                print(other.said(), flush=True)
                                if other.process.poll() is not None:
                                    other = None
                        print(f"{name}, {what}: {', '.join(said) or 'nothing'}; {time.time() - piece:.1f} s", flush=True)
                        save()
                if time.time() + (time.time() - start) > share and turn + 1 < o.rounds:
                    print(f"{name}: no time for more than {turn + 1} of {o.rounds} rounds", flush=True)
                    break
            if name in workers:
                if other and other.untuned():
                    record.setdefault("untuned", []).append(name)
                workers[name].end()
            save()
    finally:
        for w in workers.values():
            w.end()
    print(f"\n{time.time() - began:.0f} s\n")
    table(o.out)
    return 1 if failed else 0


def version(o):
    r = subprocess.run([o.moeserve, "version"], capture_output=True, text=True)
    return r.stdout.strip().splitlines()[0] if r.returncode == 0 and r.stdout.strip() else "unknown"


def spread(times):
    return f"{100 * (max(times) - min(times)) / statistics.median(times):.1f} %"


def table(path):
    with open(path) as f:
        record = json.load(f)
    engines = record["moeserve"] + (f"; vLLM {record['vllm']}" if "vllm" in record else "; without vLLM")
    print(f"{record.get('device', 'no device')}; {engines}. Medians of {record['repetitions']} prompts in each of the rounds.\n")
    rows = {}
    for r in record["results"]:
        if r["name"] != "grows past":
            rows.setdefault((r["model"], r["layers"], r["name"], r["prompt_tokens"]), {}).setdefault(r["batched_tokens"], {})[r["engine"]] = r["seconds"]
    print("| model | layers | prompt, tokens | step, tokens | moeserve, ms | spread | vLLM, ms | spread | moeserve's speed / vLLM's |")
    print("|---" * 9 + "|")
    for (model, layers, name, tokens), by in rows.items():
        best = {}
        for batched, times in by.items():
            for engine, t in times.items():
                best[engine] = min(best.get(engine, t), t, key=statistics.median)
        for what, times in [*((f"{b:,}", t) for b, t in by.items()), *([("the best", best)] if len(by) > 1 else [])]:
            ours, theirs = times.get("moeserve"), times.get("vLLM")
            cells = [f"{1e3 * statistics.median(t):.1f} | {spread(t)}" if t else "– | –" for t in (ours, theirs)]
            ratio = f"{statistics.median(theirs) / statistics.median(ours):.2f}" if ours and theirs else "–"
            print(f"| {model} | {layers} | {tokens:,}{'' if name == 'long' else ', ' + name} | {what} | {cells[0]} | {cells[1]} | {ratio} |")
    print()
    named = {(r["model"], r["name"]): r for r in record["results"] if r["engine"] == "moeserve" and r["name"] != "long"}
    for (model, name), r in named.items():
        below = named.get((model, "short factors"))
        if name == "grows past" and below:
            cost = (NEW_TOKENS - 1) * (statistics.median(r["later_token_s"]) - statistics.median(below["later_token_s"]))
            print(f"{model}: a sequence that grows past longrope's original maximum position is computed again with the long factors, once: {1e3 * cost:.1f} ms "
                  f"(a prompt of {r['prompt_tokens']:,} tokens takes {1e3 * statistics.median(r['seconds']):.1f}); vLLM has the long factors from the start.")
    for model in record.get("untuned", []):
        print(f"{model}: vLLM has no tuned configuration of its MoE kernel for this GPU and model.")
    for f in record["failed"]:
        print(f"FAILED {f['model']}, {f['what']}: {f['error'][:300]}")


def offload(folder):
    """Results of bench prefix named TIER-TOKENS.json: none, peer or host."""
    found = {}
    for path in pathlib.Path(folder).glob("*-*.json"):
        tier, tokens = path.stem.rsplit("-", 1)
        try:
            result = json.loads(path.read_text())
        except json.JSONDecodeError:  # of a command that failed
            continue
        (rows,) = times_of(result)[1].items()
        found[int(tokens), tier] = rows, result["model"]
    print("| model | prompt, tokens | step, tokens | half of the experts | ms | spread | time / all in HBM |")
    print("|---" * 7 + "|")
    order = ("none", "peer", "host")
    for (tokens, tier), ((n, rows), model) in sorted(found.items(), key=lambda x: (x[0][0], order.index(x[0][1]))):
        times = [t for t, _ in rows]
        all_in = found.get((tokens, "none"))
        ratio = f"{statistics.median(times) / statistics.median(t for t, _ in all_in[0][1]):.2f}" if all_in else "–"
        where = {"none": "in HBM, as all", "peer": "on a peer", "host": "in host memory"}[tier]
        print(f"| {model} | {n + 1:,} | {tokens:,} | {where} | {1e3 * statistics.median(times):.1f} | {spread(times)} | {ratio} |")


def main():
    if sys.argv[1:] == ["worker"]:
        return worker()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    r = commands.add_parser("run")
    r.add_argument("moeserve")
    r.add_argument("out")
    r.add_argument("--models", default="mixtral-8x7b:8,qwen3-30b-a3b:24,phi-3.5-moe:8")
    r.add_argument("--length", type=int, default=32000)
    r.add_argument("--batched-tokens", default="8192,32768")
    r.add_argument("--rounds", type=int, default=2)
    r.add_argument("--repetitions", type=int, default=3, help="prompts of a round that count, of each length")
    r.add_argument("--budget", type=float, default=350, help="seconds for everything")
    r.add_argument("--start-limit", type=float, default=150, help="seconds in which vLLM must be open")
    r.add_argument("--limit", type=float, default=60, help="seconds of each other piece")
    r.add_argument("--flags", default="--device cuda", help="further ones of moeserve bench prefix")
    r.add_argument("--vllm", default="{}", help="further arguments of vLLM's LLM, as JSON")
    r.add_argument("--without-vllm", action="store_true")
    for name, what in (("table", "out"), ("offload", "folder")):
        commands.add_parser(name).add_argument(what)
    o = p.parse_args()
    if o.command == "run":
        sys.exit(measure(o))
    if o.command == "table":
        return table(o.out)
    offload(o.folder)


if __name__ == "__main__":
    main()
