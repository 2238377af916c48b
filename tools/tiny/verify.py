"""Checks a written checkpoint with transformers: tokenizer, chat template, and greedy answers to the test prompts."""

import argparse
import gzip
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks import TASKS, unseen
from vocabulary import Vocabulary


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--checkpoint", type=pathlib.Path, required=True)
    p.add_argument("--tests", type=pathlib.Path, required=True, help="what testset.py wrote")
    p.add_argument("--report", type=pathlib.Path, help="train.py's report, whose wrong answers must be the same")
    p.add_argument("--batch", type=int, default=500)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).to(device).eval()
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters())} parameters, on {device}")
    check_tokenizer(tokenizer)

    tests = [json.loads(line) for line in gzip.decompress(args.tests.read_bytes()).splitlines()]
    report = json.loads(args.report.read_text()) if args.report else None
    differ = 0
    for task in TASKS:
        rows = [t for t in tests if t["task"] == task]
        for form in ("bare", "chat"):
            given = [t["prompt"] if form == "bare" else chat(tokenizer, t["prompt"]) for t in rows]
            out = generate(model, tokenizer, given, args.batch, device)
            wrong = {t["prompt"]: o for t, o in zip(rows, out) if t["answer"] != o}
            print(f"{task:10} {form} {len(rows) - len(wrong)} of {len(rows)} exact", flush=True)
            for prompt, o in list(wrong.items())[:3]:
                print(f"           {prompt!r} -> {o!r}")
            if report and form == "bare":
                unlike = set(wrong) ^ set(report["scores"][task]["wrong"])
                differ += len(unlike)
    if report:
        print(f"{differ} of {len(tests)} prompts are answered right by only one of train.py and transformers")


def check_tokenizer(tokenizer):
    vocabulary = Vocabulary()
    for task in TASKS:
        for pair in unseen(vocabulary, task, 200, seed=7):
            for text in pair:
                ids = tokenizer.encode(text)
                if ids != vocabulary.encode(text) or tokenizer.decode(ids) != text:
                    raise AssertionError(f"{text!r} is tokenized as {ids}")
    every = "".join(map(chr, range(128))) + "é日本🙂"
    if tokenizer.decode(tokenizer.encode(every)) != every:
        raise AssertionError("some bytes do not come back")


def chat(tokenizer, prompt):
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def generate(model, tokenizer, prompts, batch, device):
    out = []
    for at in range(0, len(prompts), batch):
        inputs = tokenizer(prompts[at : at + batch], return_tensors="pt", padding=True).to(device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)
        out += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return out


if __name__ == "__main__":
    main()
