"""Times answers of a language model that reads each token once, and of one that reads the whole text for each token.

    rayfl model make tiny-lm --out BASE
    OMP_NUM_THREADS=1 python scripts/bench/answer_times.py BASE [--prompt TOKENS] [--answer TOKENS] [--texts N]

Prompts are random tokens, adapters are new, and both give the same answers or the script ends with an error. Prints a
Markdown table with the least processor time of three, in seconds.
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import torch

from rayfl.examples import InputSpec
from rayfl.models.pretrained.language import LanguageNetwork
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.tasks.further_tasks import LanguageModel
from rayfl.tasks.generation import Prompt, answers
from rayfl.tasks.predictor import Predictor

REPEATS = 3


def main(folder: str, prompt: int, answer: int, texts: int) -> None:
    """Prints the table."""
    length = prompt + answer
    section = PretrainedModel.model_validate({"folder": folder, "head": {"train": False}})
    spec = InputSpec("tokens", (length,), 256, 256, "tokens")
    network = section.network(spec)
    task, tree = LanguageModel(network, (), spec), network.initialize(0)
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(256, (prompt,), generator=generator).tolist()), ()) for _ in range(texts)]

    def timed() -> tuple[list[list[int]], float]:
        found, least = list[list[int]](), float("inf")
        for _ in range(REPEATS):
            start = time.process_time()
            found = list(answers(Predictor.of(tree), task, prompts, answer, length, None, torch.device("cpu")))
            least = min(least, time.process_time() - start)
        return found, least

    once, quick = timed()
    with mock.patch.object(LanguageNetwork, "reading", None):
        whole, slow = timed()
    if once != whole:
        raise SystemExit("the answers differ")
    print(f"| {texts} answers of {answer} tokens after {prompt} | seconds |\n|---|---|")
    print(f"| each token is read once | {quick:.2f} |\n| the whole text for each token | {slow:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--texts", type=int, default=16)
    given = parser.parse_args()
    main(given.base, given.prompt, given.answer, given.texts)
