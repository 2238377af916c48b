"""Tests of the tasks: python3 -m unittest discover tools/tiny"""

import unittest

import torch

from tasks import HOLE, TASKS, Generator, Packer, answer_to, held_out, texts
from vocabulary import END, SPECIALS, Vocabulary


class Tasks(unittest.TestCase):
    def setUp(self):
        self.vocabulary = Vocabulary()
        self.generator = Generator(self.vocabulary, "cpu", seed=5)

    def test_generators_agree_with_their_texts(self):
        for task in TASKS:
            prompt, answer = self.generator.draw(task, 4000)
            split = self.generator.held_out(prompt).tolist()
            for p, a, test in zip(texts(self.vocabulary, prompt), texts(self.vocabulary, answer), split):
                self.assertEqual(a, answer_to(p), p)
                self.assertEqual(test, held_out(p), p)
            self.assertTrue(0.04 < sum(split) / len(split) < 0.09, task)

    def test_texts_encode_to_the_generated_ids(self):
        for task in TASKS:
            for side in self.generator.draw(task, 1000):
                for row, text in zip(side.tolist(), texts(self.vocabulary, side)):
                    self.assertEqual([i for i in row if i != HOLE], self.vocabulary.encode(text))

    def test_training_rows_hold_no_test_prompt_and_only_true_answers(self):
        packer = Packer(self.generator, 256, dict.fromkeys(TASKS, 1))
        ids, target, conversation = packer.rows(400)
        checked, ends = 0, self.vocabulary.id(END)
        for row, learned, filled in zip(ids.tolist(), target.tolist(), (conversation > 0).tolist()):
            begin = 0
            for at, (token, used) in enumerate(zip(row, filled)):
                if not used or token != ends:
                    continue
                first = next(i for i in range(begin, at) if learned[i] != HOLE) + 1
                prompt = self.vocabulary.text([i for i in row[begin:first] if i >= len(SPECIALS)])
                answer = self.vocabulary.text(row[first:at])
                self.assertEqual(learned[at - 1], ends)
                self.assertEqual(answer, answer_to(closed(prompt)))
                self.assertFalse(held_out(closed(prompt)), prompt)
                begin, checked = at + 1, checked + 1
        self.assertGreater(checked, 4000)

    def test_attention_stays_inside_a_conversation(self):
        _, _, conversation = Packer(self.generator, 256, dict.fromkeys(TASKS, 1)).rows(50)
        step = conversation[:, 1:] - conversation[:, :-1]
        filled = conversation[:, 1:] > 0
        self.assertTrue(((step == 0) | (step == 1))[filled].all())
        self.assertTrue(torch.equal(conversation[:, 0], torch.ones(50, dtype=torch.int64)))


def closed(prompt):
    """A prompt with the closing "=" that a chat may leave out."""
    if prompt[-1] in "=?":
        return prompt
    return prompt + (" =" if prompt.startswith(("sort", "reverse")) else "=")


if __name__ == "__main__":
    unittest.main()
