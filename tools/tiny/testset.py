"""Writes the test prompts that scores are measured on: gzipped lines of JSON {task, prompt, answer}."""

import argparse
import gzip
import json
import pathlib

from tasks import TASKS, TEST_SEED, unseen
from vocabulary import Vocabulary


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--count", type=int, default=1000, help="prompts per task")
    args = p.parse_args()
    vocabulary = Vocabulary()
    lines = [
        json.dumps({"task": task, "prompt": prompt, "answer": answer}) + "\n"
        for task in TASKS
        for prompt, answer in unseen(vocabulary, task, args.count, TEST_SEED)
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


if __name__ == "__main__":
    main()
