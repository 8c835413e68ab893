"""A small CLIP with random weights and its tokenizer, as files of transformers, and networks over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Algorithm
from rayfl.engine.updates.settings import TrainConfig
from rayfl.models.pretrained.clip import ClipNetwork
from rayfl.models.pretrained.making_clip import NAMES, clip
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.tasks.classification import Classification
from tests.support.bases import IMAGES, transformers
from tests.support.toys import ListDataset, Toy, assert_close

PROMPT: dict[str, Any] = {"classes": list(NAMES)}
NO_HEAD: dict[str, Any] = {"train": False}
ADAPTER: dict[str, Any] = {"r": 2, "alpha": 4}

_FOLDERS: list[TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def write_clip(folder: Path, seed: int = 0, eos_token_id: int | None = None) -> Path:
    """Writes a base with random weights, and its tokenizer.

    Args:
        folder: is made.
        seed: of the weights.
        eos_token_id: of its configuration; None: the tokenizer's.
    """
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made, *_ = clip(transformers, torch.zeros(1, 1, 8, 8), torch.tensor([9]))
        for parameter in made.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    if eos_token_id is not None:
        made.model.config.text_config.eos_token_id = eos_token_id
    made.save_pretrained(folder)
    return folder


@cache
def clip_base() -> Path:
    """A base that all tests of this process share, and none writes to."""
    _FOLDERS.append(TemporaryDirectory(prefix="rayfl-clip-"))
    return write_clip(Path(_FOLDERS[-1].name))


def clip_section(prompt: dict[str, Any] | None = None, **options: Any) -> PretrainedModel:
    """The section of a configuration; without adapters unless others are named."""
    given = {"folder": str(clip_base()), "adapter": "none", "head": NO_HEAD, "prompt": {**PROMPT, **(prompt or {})}}
    return PretrainedModel.model_validate({**given, **options})


def clip_network(prompt: dict[str, Any] | None = None, **options: Any) -> ClipNetwork:
    """A network over the shared base."""
    found = clip_section(prompt, **options).network(IMAGES)
    assert isinstance(found, ClipNetwork)
    return found


def reference(folder: Path | None = None) -> tuple[Any, Any]:
    """transformers' own model and tokenizer."""
    place = folder or clip_base()
    model = transformers.CLIPModel.from_pretrained(place, local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)


def expected(texts: list[str], x: torch.Tensor, folder: Path | None = None) -> Any:
    """What transformers' own model computes."""
    model, tokenizer = reference(folder)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.to(x.dtype)(input_ids=tokens, pixel_values=x)


@cache
def wide_reference() -> tuple[Any, Any]:
    """The same in float64, frozen, which all tests of this process share."""
    model, tokenizer = reference()
    return model.double().requires_grad_(False), tokenizer


def texts_with(context: Tensor, names: list[str], behind: str, model: Any = None) -> Tensor:
    """Features of texts with a context, by transformers' own modules, one class after the other; shape (C, D).

    Its text tower takes tokens alone: a hook puts embeddings in the place of those that it looks up.

    Args:
        context: shape (M, d), or (C, M, d).
        names: of the classes.
        behind: what is said after a name.
        model: transformers' own; None for that of :func:`wide_reference`.
    """
    wide, tokenizer = wide_reference()
    tower = wide if model is None else model
    rows = []
    for number, name in enumerate(names):
        own = context if context.dim() == 2 else context[number]
        begin, *rest = tokenizer(f"{name}{behind}")["input_ids"]
        tokens = torch.tensor([[begin, *[0] * len(own), *rest]])

        def put(_: Any, __: Any, found: Tensor, own: Tensor = own) -> Tensor:
            return torch.cat([found[:, :1], own[None], found[:, 1 + len(own) :]], 1)

        hook = tower.text_model.embeddings.token_embedding.register_forward_hook(put)
        rows.append(tower.get_text_features(input_ids=tokens).pooler_output[0])
        hook.remove()
    found = torch.stack(rows)
    return found / found.norm(dim=-1, keepdim=True)


class WideClip(ClipNetwork):
    """A network whose trees and whose base are float64."""

    def initialize(self, seed: int) -> dict[str, Tensor]:
        return {name: leaf.double() for name, leaf in super().initialize(seed).items()}


def wide_network(prompt: dict[str, Any] | None = None, **options: Any) -> WideClip:
    """A network over the shared base, in float64."""
    found = clip_network(prompt, **options)
    found.__class__ = WideClip
    found.compute_in(torch.float64)
    assert isinstance(found, WideClip)
    return found


SIZES = (5, 1, 9, 6)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.02, momentum=0.5)


def clip_toy(
    algorithm: Algorithm, mode: str = "looped", prompt: dict[str, Any] | None = None, model: Any = None, **options: Any
) -> Toy:
    """The method on four clients with random images, one of which has a single sample, in float64.

    Args:
        algorithm: the method.
        mode: of the engine.
        prompt: the section ``model.prompt``, by default with a context of two vectors.
        model: further options of the section ``model``.
        **options: of :class:`tests.support.toys.Toy`.
    """
    net = wide_network({"length": 2} if prompt is None else prompt, **(model or {}))
    return Toy(algorithm, task=Classification(net), mode=mode, **{"dataset": clip_images(), "train": TRAIN, **options})


def assert_alike(one: Toy, other: Toy, cohorts: Iterable[Sequence[int]]) -> None:
    """Both have the same models, states and losses after these rounds, but for rounding."""
    for cohort in cohorts:
        assert_close(one.step(cohort), other.step(cohort), 1e-11)
    assert_close(one.states(), other.states(), 1e-11)
    found, known = one.scores(), other.scores()
    for client in found:
        for row in found[client]:
            assert abs(found[client][row].loss - known[client][row].loss) < 1e-10


def clip_images(sizes: tuple[int, ...] = SIZES, classes: int = 10) -> ListDataset:
    """Clients with random images of random classes, of the first few classes alone where there are fewer."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(n, 1, 8, 8, generator=generator, dtype=torch.float64) for n in sizes]
    return ListDataset([(x, torch.randint(0, classes, (len(x),), generator=generator)) for x in made], classes=10)
