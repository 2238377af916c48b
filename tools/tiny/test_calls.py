"""Tests of conversations with tools: python3 -m unittest discover tools/tiny

CALLS_FILE=FILE writes the cases that the Go test of the chat template reads.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import jinja2
    import torch

    import calls
    from tasks import HOLE, TASKS, Generator, held_out, texts
    from vocabulary import Vocabulary
except ModuleNotFoundError as e:
    print(f"skipped: the tests of tools/tiny need {e.name}")
    raise unittest.SkipTest(f"no {e.name}")

HERE = pathlib.Path(__file__).parent


def parsed(turns):
    """The messages and tools, as in a request, of which the text of a conversation should come."""
    messages, tools = [], []
    for prompt, answer in turns:
        for mark, text in re.findall(r"(<tool>|<tool_response>|<\|user\|>)([^<]*)", prompt):
            if mark == calls.TOOL:
                name, *keys = text.split(" ")
                function = {"name": name}
                if keys:
                    function["parameters"] = {"type": "object", "properties": {k: {"type": "string"} for k in keys}}
                tools.append({"type": "function", "function": function})
            else:
                messages.append({"role": "user" if mark == "<|user|>" else "tool", "content": text})
        found = [json.loads(c) for c in re.findall(r"<tool_call>\n(.*)\n</tool_call>", answer)]
        message = {"role": "assistant", "content": None if found else answer}
        if found:
            message["tool_calls"] = [{"type": "function", "function": f} for f in found]
        messages.append(message)
    return messages, tools


def rendered(messages, tools):
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers has it
    return environment.from_string(calls.TEMPLATE).render(messages=messages, tools=tools)


class Calls(unittest.TestCase):
    def setUp(self):
        self.draw, self.vocabulary = calls.Draw(3), calls.CallVocabulary()

    def test_the_template_writes_the_texts_that_are_trained(self):
        cases = []
        for what in calls.MIX:
            for _ in range(100):
                turns = self.draw.conversation(what)
                messages, tools = parsed(turns)
                want = "".join(p + "<|assistant|>" + a + "<|endoftext|>" for p, a in turns)
                self.assertEqual(rendered(messages, tools), want)
                cases.append({"messages": messages, "tools": tools, "text": want, "ids": self.vocabulary.encode(want)})
        if at := os.environ.get("CALLS_FILE"):
            pathlib.Path(at).write_text(json.dumps(cases[::25], ensure_ascii=False) + "\n")

    def test_the_five_tasks_keep_their_tokens(self):
        plain = Generator(Vocabulary(), "cpu", 5)
        for task in TASKS:
            for side in plain.draw(task, 500):
                for text in texts(plain.v, side):
                    self.assertEqual(self.vocabulary.encode(text), plain.v.encode(text))

    def test_calls_have_the_arguments_that_were_asked_for(self):
        for draw in (self.draw, calls.Draw(4, test=True)):
            for _ in range(500):
                turns = draw.conversation("call")
                asked = turns[0][0].split("<|user|>")[1]
                call = json.loads(turns[0][1].split("\n")[1])
                numbers = [int(n) for n in re.findall(r"\d+", asked)]
                if "timer" in asked:
                    numbers = [60 * numbers[0] + numbers[1]]
                values = list(call["arguments"].values())
                self.assertEqual([v for v in values if isinstance(v, int)], numbers)
                self.assertTrue(all(v in asked for v in values if isinstance(v, str)), turns)
                if asked != "Answer the next question.":
                    self.assertEqual(held_out(asked), draw.test)
                shown = [t.split("<")[0].split(" ") for t in turns[0][0].split("<tool>")[1:]]
                self.assertIn([call["name"], *call["arguments"]], [[s.split("<")[0] for s in t] for t in shown])

    def test_rows_learn_answers_alone(self):
        ids, target, conversation = (torch.from_numpy(calls.packed((40, 256, 9))).long().unbind(1))
        self.assertEqual(list(ids.shape), [40, 256])
        learned = target[:, :-1] != HOLE
        self.assertTrue(torch.equal(target[:, :-1][learned], ids[:, 1:][learned]))
        self.assertTrue((conversation[:, :-1] == conversation[:, 1:])[learned].all())
        for name in (calls.TOOL, calls.RESPONSE, "<|user|>", "<|assistant|>"):
            self.assertFalse((target == self.vocabulary.id(name)).any(), name)
        self.assertTrue((target == self.vocabulary.id(calls.CALL)).any())

    def test_a_model_that_is_always_right_scores_all_and_one_that_is_not_none(self):
        def right(ids, _):
            return torch.nn.functional.one_hot(ids.roll(-1, 1), len(self.vocabulary)), 0, []

        def wrong(ids, _):
            return torch.nn.functional.one_hot(ids, len(self.vocabulary)), 0, []

        self.assertEqual(set(calls.scores(right, 20, 1, "cpu").values()), {20})
        self.assertEqual(set(calls.scores(wrong, 20, 1, "cpu").values()), {0})

    def test_training_writes_a_checkpoint_that_moeserve_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "checkpoint"
            small = "--tools --steps 2 --rows 2 --tool-rows 2 --tool-pool 8 --test-prompts 8 --no-compile".split()
            train = [sys.executable, HERE / "train.py", *small, "--out", out, "--report", out.parent / "report.json"]
            done = subprocess.run(train, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stderr)  # below the bounds, after two steps
            self.assertIn("below_bounds", done.stdout.splitlines()[-1])
            self.assertIn("call", json.loads((out.parent / "report.json").read_text())["calls"])
            self.assertIn("| call |", (out.parent / "checkpoint-card.md").read_text())
            if not shutil.which("go"):
                print("skipped: running the checkpoint needs go")
                return
            moeserve = ["go", "run", "./cmd/moeserve"]
            for arguments in (["inspect", out], ["run", "--model", out, "-n", "4", "Where is Ann?"]):
                ran = subprocess.run(moeserve + arguments, cwd=HERE.parent.parent, capture_output=True, text=True)
                self.assertEqual(ran.returncode, 0, ran.stderr)


if __name__ == "__main__":
    unittest.main()
