"""Writes what scores are measured on, as gzipped lines of JSON: the test prompts {task, prompt, answer}, and --calls the test
conversations with tools {task, turns}, a turn being [prompt, answer] as calls.py has them.
"""

import argparse
import gzip
import json
import pathlib

from tasks import TASKS, TEST_SEED, unseen
from vocabulary import Vocabulary


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--calls", type=pathlib.Path, help="where conversations with tools go; needs tokenizers")
    p.add_argument("--count", type=int, default=1000, help="prompts per task, and conversations of each kind")
    args = p.parse_args()
    vocabulary = Vocabulary()
    write(
        args.out,
        (
            {"task": task, "prompt": prompt, "answer": answer}
            for task in TASKS
            for prompt, answer in unseen(vocabulary, task, args.count, TEST_SEED)
        ),
    )
    if args.calls:
        import calls

        draw = calls.Draw(TEST_SEED, test=True)
        kinds = (what for what in calls.MIX for _ in range(args.count))
        write(args.calls, ({"task": what, "turns": draw.conversation(what)} for what in kinds))


def write(at, rows):
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))


if __name__ == "__main__":
    main()
