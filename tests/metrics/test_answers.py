"""ROUGE-L, by torchmetrics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.text.rouge import rouge_score

from rayfl.metrics.answers import rouge_l, words

TEXTS = st.text(st.sampled_from("aAb0 .,_-\n"), max_size=20)


@given(answer=TEXTS, reference=TEXTS)
def test_it_is_that_of_torchmetrics(answer: str, reference: str) -> None:
    expected = rouge_score(answer, reference, rouge_keys="rougeL")["rougeL_fmeasure"].item()
    assert rouge_l(words(answer), words(reference)) == pytest.approx(expected, abs=1e-6)


def test_special_cases() -> None:
    assert rouge_l(["a", "b"], ["a", "b"]) == 1
    assert rouge_l([], ["a"]) == rouge_l(["a"], []) == rouge_l([], []) == rouge_l(["a"], ["b"]) == 0
    assert rouge_l(["the", "gold", "cup"], ["cup", "the", "cup"]) == pytest.approx(2 / 3)
    assert words("L'été, 2 €!") == ["l", "été", "2"]
