"""Trains the built-in model and writes its checkpoint. See README.md beside this."""

import argparse
import json
import math
import pathlib
import os
import random
import sys
import time

import torch
import torch.nn.functional as F

import calls
from model import Model, Shape
from tasks import HOLE, TASKS, TEST_SEED, Generator, Packer, padded, unseen
from vocabulary import Vocabulary


def main():
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.monotonic()
    torch.manual_seed(args.seed)
    vocabulary = calls.CallVocabulary() if args.tools else Vocabulary()
    model = Model(shape(args, vocabulary)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {len(vocabulary)} tokens, on {device}", flush=True)

    steps, tokens = train(model, vocabulary, args, device, begun)
    trained = time.monotonic() - begun
    model.write(args.out, vocabulary)

    # From here on: the weights as written, in bf16, computed in float32.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    scores, activation = {}, {}
    for task in TASKS:
        rows = unseen(vocabulary, task, args.test_prompts, TEST_SEED)
        right, activation[task] = check(model, vocabulary, rows, device)
        in_chat, _ = check(model, vocabulary, rows, device, chat=True)
        wrong = [prompt for (prompt, _), fine in zip(rows, right) if not fine]
        scores[task] = {"exact": sum(right), "exact_in_chat": sum(in_chat), "of": len(rows), "wrong": wrong}
        print(f"{task:10} {sum(right)} of {len(rows)} exact, {sum(in_chat)} in a chat", flush=True)
    chats = long_chats(model, vocabulary, args.test_prompts, args.seed, device)
    print("in long chats, by the token where the answer ends:", chats, flush=True)
    with_tools = {}
    if args.tools:
        with_tools = calls.scores(model, args.test_prompts, TEST_SEED, device)
        print(json.dumps({"of": args.test_prompts, "right": with_tools}), flush=True)
    report = {
        "parameters": parameters,
        "steps": steps,
        "tokens": tokens,
        "train_seconds": round(trained, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "arguments": {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()},
        "scores": scores,
        "long_chats": chats,
        "calls": with_tools,
        "activation": activation,
    }
    if args.report:
        args.report.write_text(json.dumps(report) + "\n")
    if args.tools:
        low = below(report, args.test_prompts)
        (args.out.parent / (args.out.name + "-card.md")).write_text(card(report, args.test_prompts))
        print(json.dumps({"below_bounds": low}), flush=True)
        sys.exit(1 if low else 0)


def below(report, count):
    """Scores below their bounds. The card of the model without tools has all answers of the five tasks right."""
    shares = {f"{t} {form}": s[form] / s["of"] for t, s in report["scores"].items() for form in ("exact", "exact_in_chat")}
    low = {name: share for name, share in shares.items() if share < 0.99}
    return low | {name: right / count for name, right in report["calls"].items() if right / count < 0.9}


def card(report, count):
    """The tables of the model's card that a training with tools changes, as Markdown."""
    lines = [f"{report['parameters']:,} parameters; {report['steps']:,} steps, {report['train_seconds']} s on {report['device']}.", ""]
    lines += ["| task | train.py, bare | train.py, in a chat |", "|---|---|---|"]
    lines += [f"| {t} | {s['exact']} | {s['exact_in_chat']} |" for t, s in report["scores"].items()]
    lines += ["", f"| with tools | right, of {count} |", "|---|---|"]
    lines += [f"| {name} | {right} |" for name, right in report["calls"].items()]
    lines += ["", "| layer | task | " + " | ".join(f"e{e}" for e in range(Shape.experts)) + " |", "|---|---|" + "---|" * Shape.experts]
    for layer in range(len(next(iter(report["activation"].values())))):
        for task, counts in report["activation"].items():
            shares = [f"{100 * c / sum(counts[layer]):.1f}" for c in counts[layer]]
            lines.append(f"| {layer} | {task} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True, help="folder for the checkpoint")
    p.add_argument("--report", type=pathlib.Path, help="file for scores and expert activation (JSON)")
    p.add_argument("--steps", type=int, default=8000)
    p.add_argument("--max-seconds", type=float, default=math.inf, help="shortens the schedule to end in this time")
    p.add_argument("--rows", type=int, default=512, help="rows in a step")
    p.add_argument("--length", type=int, default=256, help="tokens in a row")
    p.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--warmup", type=int, default=300, help="steps up to the peak")
    p.add_argument("--decay", type=float, default=0.05, help="weight decay")
    p.add_argument("--balance", type=float, default=0.01, help="weight of the loss that keeps experts evenly used")
    p.add_argument("--mix", default="6,6,4,3,3", help=f"shares of {', '.join(TASKS)}")
    p.add_argument("--hidden", type=int, default=Shape.hidden)
    p.add_argument("--layers", type=int, default=Shape.layers)
    p.add_argument("--heads", type=int, default=Shape.heads)
    p.add_argument("--intermediate", type=int, default=Shape.intermediate)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--test-prompts", type=int, default=1000, help="unseen prompts per task")
    p.add_argument("--log-every", type=int, default=1000, help="steps between reports")
    p.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    p.add_argument("--tools", action="store_true", help="train calls of tools and answers in JSON as well")
    p.add_argument("--tool-rows", type=int, default=160, help="rows with tools in a step, besides --rows")
    p.add_argument("--tool-pool", type=int, default=100_000, help="different rows with tools")
    return p.parse_args()


def shape(args, vocabulary):
    return Shape(
        vocabulary=len(vocabulary),
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        intermediate=args.intermediate,
    )


def train(model, vocabulary, args, device, begun):
    """Runs the schedule. Returns the steps made and the tokens seen."""
    mix = dict(zip(TASKS, map(float, args.mix.split(","))))
    packer = Packer(Generator(vocabulary, device, args.seed), args.length, mix)
    pool = None
    if args.tools:
        pool = calls.Rows(args.tool_pool, args.length, args.seed, device, os.cpu_count())
        print(f"{time.monotonic() - begun:6.1f} s  {args.tool_pool} rows with tools are made", flush=True)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": args.decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=args.rate,
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )

    def losses(ids, target, conversation):
        with torch.autocast(device, torch.bfloat16):
            logits, balance, _ = model(ids, conversation)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=HOLE), balance

    run = losses if args.no_compile else torch.compile(losses)
    ahead = 8  # steps whose rows are drawn at once
    for step in range(args.steps):
        progress = max(step / args.steps, (time.monotonic() - begun) / args.max_seconds)
        if progress >= 1:
            break
        if step % ahead == 0:
            drawn = [t.split(args.rows) for t in packer.rows(ahead * args.rows)]
        rows = [t[step % ahead] for t in drawn]
        if pool:
            rows = [torch.cat(both) for both in zip(rows, pool.draw(args.tool_rows))]
        loss, balance = run(*rows)
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / args.warmup) * (0.01 + 0.99 * cosine)
        optimizer.step()
        optimizer.zero_grad()
        if step < 3 or (step + 1) % args.log_every == 0:
            exact = monitor(model, vocabulary, args.seed + 1000 + step, device, min(512, args.test_prompts))
            spent = time.monotonic() - begun
            losses_now = f"loss {loss:.4f}  balance {balance:.3f}"
            print(f"{spent:6.1f} s  step {step + 1:6}  {losses_now}  exact {exact}", flush=True)
    else:
        step += 1
    return step, step * (args.rows + (args.tool_rows if args.tools else 0)) * args.length


def monitor(model, vocabulary, seed, device, count):
    """The share of exact answers per task on prompts drawn afresh from the training split."""
    exact = {}
    generator = Generator(vocabulary, device, seed)
    for task in TASKS:
        prompt, answer = generator.draw(task, count)
        kept = ~generator.held_out(prompt)
        right, _, _ = answered(model, vocabulary, prompt[kept], answer[kept], device)
        exact[task] = round(right.float().mean().item(), 3)
    return exact


@torch.no_grad()
def answered(model, vocabulary, prompt, answer, device, chat=False):
    """Which rows greedy decoding answers exactly: bool [n]; also ids without holes and the chosen experts.

    One pass over prompt and answer shows it: decoding follows the answer as long as each of its tokens is the likeliest.
    """
    mark = lambda text, n=prompt.shape[0]: torch.full((n, 1), vocabulary.id(text), device=device)
    sides = [mark("<|user|>"), prompt, mark("<|assistant|>")] if chat else [prompt]
    told = torch.cat(sides, 1)
    ids = torch.cat([told, answer, mark("<|endoftext|>")], 1)
    expected = torch.cat([torch.full_like(told, HOLE), answer, mark("<|endoftext|>")], 1)
    order = (ids == HOLE).int().argsort(dim=1, stable=True)
    ids, expected = ids.gather(1, order), expected.gather(1, order)
    logits, _, chosen = model(ids.clamp(min=0), (ids != HOLE).long())
    target = expected[:, 1:]
    right = ((logits[:, :-1].argmax(-1) == target) | (target == HOLE)).all(1)
    return right, ids, chosen


def check(model, vocabulary, rows, device, chat=False):
    """Which rows (prompt, answer) are answered exactly, and how often each layer chose each expert in them."""
    tensors = []
    for side in zip(*rows):
        tensors.append(torch.cat(padded([torch.tensor([vocabulary.encode(t)], device=device) for t in side])))
    prompt, answer = tensors
    right, used, chosen = answered(model, vocabulary, prompt, answer, device, chat)
    filled = used[:, :-1] != HOLE
    counts = [torch.bincount(c[:, :-1][filled].flatten(), minlength=model.s.experts).tolist() for c in chosen]
    return right.tolist(), counts


@torch.no_grad()
def long_chats(model, vocabulary, count, seed, device):
    """Fills the context with chats of test prompts of all tasks.

    Returns (exact answers, answers) by the token where they end, in steps of 64.
    """
    context, draw = model.s.context, random.Random(seed)
    asked = [pair for task in TASKS for pair in unseen(vocabulary, task, count, TEST_SEED)]
    user, assistant, end = map(vocabulary.id, ("<|user|>", "<|assistant|>", "<|endoftext|>"))
    found = {}
    chats, answers = [], []
    for row in range(max(1, count // 4)):
        ids = []
        while True:
            prompt, answer = (vocabulary.encode(text) for text in draw.choice(asked))
            turn = [user, *prompt, assistant, *answer, end]
            if len(ids) + len(turn) > context:
                break
            ids += turn
            answers.append((row, len(ids) - len(answer) - 1, len(ids)))
        chats.append(ids + [end] * (context - len(ids)))
    chats = torch.tensor(chats, device=device)
    guess = torch.cat([model(part, torch.ones_like(part))[0].argmax(-1) for part in chats.split(64)])
    same = (guess[:, :-1] == chats[:, 1:]).tolist()
    for row, first, after in answers:
        right, of = found.get(str((after - 1) // 64 * 64), (0, 0))
        found[str((after - 1) // 64 * 64)] = (right + all(same[row][first - 1 : after - 1]), of + 1)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


if __name__ == "__main__":
    main()
