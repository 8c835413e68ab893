"""(IA)^3 and virtual tokens in runs: what travels, stacks, files, options, and which methods refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained.mixing import SHARES, blended, mixed_by_rows, side_by_side, update_product
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.params import leaves
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_adapter, export_merged, export_model
from rayfl.runs.folder import open_run
from tests.models.pretrained.test_language_runs import experiment as of_language
from tests.support import exact
from tests.support.adapter_runs import experiment
from tests.support.bases import inputs, network, trained, transformers
from tests.support.experiments import outcome
from tests.support.toys import assert_close

KINDS: dict[str, tuple[Any, int]] = {
    "ia3": ("ia3", 2 * (32 + 32 + 64)),
    "vpt": ({"name": "prompt", "tokens": 3}, 3 * 32),
    "vpt-deep": ({"name": "prompt", "tokens": 3, "depth": "deep"}, 2 * 3 * 32),
}
"""By kind, the section ``model.adapter`` and how many scalars are trained in the small vision transformer."""
HEAD = 32 * 10 + 10


METHODS: dict[str, tuple[Any, bool]] = {
    "fedavg": ("fedavg", True),
    "fedper": ("fedper", False),
    "fedper-adapters": ({"name": "fedper", "head_group": "adapters"}, True),
    "ditto": ("ditto", True),
    "superfed": ({"name": "superfed", "start": 0.25}, True),
    "fedrep": ("fedrep", False),
    "apfl": ("apfl", True),
    "scaffold": ("scaffold", True),
    "fedphp": ("fedphp", True),
}
"""By name, a method, and whether the head travels."""
QUICK = {("fedavg", "ia3"), ("superfed", "vpt-deep")}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=[] if (method, kind) in QUICK else [pytest.mark.slow])
        for method in METHODS
        for kind in KINDS
    ],
)
@pytest.mark.first_case
def test_messages_are_what_is_trained_and_stacks_are_looped_clients(method: str, kind: str, tmp_path: Path) -> None:
    (given, headed), (adapter, scalars) = METHODS[method], KINDS[kind]
    options: dict[str, Any] = {"train": {"optimizer": "sgd"}} if method == "scaffold" else {}
    for mode in ("looped", "vectorized"):
        rayfl.run(experiment(tmp_path, mode, given, model={"adapter": adapter}, engine={"mode": mode}, **options))
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 2e-4)
    assert one.states.keys() == other.states.keys()
    for client in one.states:
        assert_close(one.states[client], other.states[client], 2e-4)
    sent = [row for row in one.clients.to_pylist() if row["bytes_down"] is not None and row["cohort"] == "selected"]
    size = 4 * ((0 if method == "fedper-adapters" else scalars) + HEAD * headed)
    expected = {size, 2 * size} if method == "scaffold" else {size}
    assert sent and {count for row in sent for count in (row["bytes_down"], row["bytes_up"])} <= expected
    names = {path.rpartition("/")[2] for path, leaf in leaves(one.server) if isinstance(leaf, torch.Tensor)}
    assert all(name.endswith(".ia3_l") or name.startswith("prompts.") or ".classifier." in name for name in names)


REFUSING = [
    *("feddpa", "fedalt", "hetlora", "flora", "flexlora", "fedex_lora", "rolora", "lora_fair"),
    {"name": "superfed", "adapters": "products"},
    {"name": "floco", "simplex_dimension": 2, "simplex_over": "adapters"},
    *({"name": "fedper", "head_group": group} for group in ("lora_a", "lora_b", "lora_b_and_head")),
    {"name": "lg_fedavg", "head_group": "lora_b"},
]


@pytest.mark.parametrize("kind", ["ia3", "vpt"])
@pytest.mark.parametrize("method", REFUSING, ids=str)
def test_methods_of_factors_refuse_them_before_the_run(method: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs model\.adapter\.name=lora: it is about the factors A and B"
    ) as refused:
        rayfl.run(experiment(tmp_path, "run", method, model={"adapter": KINDS[kind][0]}))
    assert ("ia3" if kind == "ia3" else "prompt") in str(refused.value)


@pytest.mark.parametrize("kind", ["ia3", "vpt"])
def test_models_without_factors_are_not_laid_side_by_side(kind: str) -> None:
    net = network("vit", adapter=KINDS[kind][0])
    one, other, shares = trained(net, 0), trained(net, 1), torch.tensor([[0.5, 0.5]])
    for call in (
        lambda: side_by_side([one, other], shares),
        lambda: mixed_by_rows(one, other, {}),
        lambda: blended([one, other], dict.fromkeys(one, (0.5, 0.5))),
        lambda: update_product(one, other, 1.0),
        lambda: net.logits({**one, SHARES: shares}, inputs("vit", 2, 0)),
    ):
        with pytest.raises(ModelError, match=r"set model\.adapter\.name=lora"):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_what_a_run_has_trained_leaves_as_files(tmp_path: Path) -> None:
    x = inputs("vit", 5, 0)
    for kind in ("ia3", "vpt-deep"):
        rayfl.run(experiment(tmp_path, kind, "fedper", model={"adapter": KINDS[kind][0]}))
        models = CommittedModels(open_run(str(tmp_path / kind), Experiment))
        net, tree = models.parts.task.network, models.predictor(1, "personalized").built()[0]
        start = net.initialize(0)
        assert all(not torch.equal(tree[name], start[name]) for name in net.groups["adapters"])
        export_model(models, 1, None, tmp_path / f"{kind}.safetensors")
        assert load_file(tmp_path / f"{kind}.safetensors").keys() == tree.keys()
        if kind == "ia3":
            export_adapter(models, 1, None, tmp_path / "adapter")
            again = network("vit", adapter={"name": "ia3", "start": str(tmp_path / "adapter")})
            torch.testing.assert_close(again.logits(again.initialize(0), x), net.logits(tree, x), rtol=1e-6, atol=1e-6)
            export_merged(models, 1, None, tmp_path / "merged")
            whole = transformers.ViTForImageClassification.from_pretrained(tmp_path / "merged", local_files_only=True)
            with torch.no_grad():
                torch.testing.assert_close(whole(pixel_values=x).logits, net.logits(tree, x), rtol=2e-5, atol=2e-5)
        else:
            with pytest.raises(ConfigError, match="--format peft: peft has no virtual tokens of images: leave"):
                export_adapter(models, 1, None, tmp_path / "adapter-of-tokens")
            with pytest.raises(ConfigError, match="--format transformers: 'personalized' reads virtual tokens"):
                export_merged(models, 1, None, tmp_path / "merged-tokens")


@pytest.mark.parametrize("adapter", ["ia3", {"name": "prompt", "tokens": 3}], ids=["ia3", "prompt"])
@pytest.mark.first_case
def test_language_models_send_what_is_trained_and_leave_as_files_of_peft(adapter: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for mode in ("looped", "vectorized"):
        rayfl.run(of_language(tmp_path, mode, "fedavg", model={"adapter": adapter}, engine={"mode": mode}))
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 2e-4)
    sent = {row["bytes_up"] for row in one.clients.to_pylist() if row["bytes_up"] is not None}
    assert sent == {4 * (2 * (16 + 16 + 48) if adapter == "ia3" else 3 * 32)}
    models = CommittedModels(open_run(str(tmp_path / "looped"), Experiment))
    net, tree, x = models.parts.task.network, models.predictor(1, "global").built()[0], inputs("llama", 3, 0)
    export_adapter(models, 1, None, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(exact.plain("llama", None).float(), tmp_path / "adapter").eval()
    with torch.no_grad():
        found = theirs(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, -x.shape[1] :]
        torch.testing.assert_close(found, net.logits(tree, x), rtol=2e-6, atol=2e-6)


def given(**adapter: Any) -> PretrainedModel:
    return PretrainedModel.model_validate({"folder": "base", "adapter": adapter})


def test_a_kind_alone_is_a_section_and_no_kind_is_lora() -> None:
    assert given(name="ia3") == PretrainedModel.model_validate({"folder": "base", "adapter": "ia3"})
    assert given(r=4).adapter.name == given().adapter.name == "lora"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            "{name: ia3, r: 4}",
            r"model\.adapter\.r: unknown; allowed: feedforward, layers, name, sha256, start, targets",
        ),
        ("{name: ia3, use_dora: true}", r"model\.adapter\.use_dora: unknown"),
        (
            "{name: prompt, alpha: 4, trains: [b]}",
            r"model\.adapter\.alpha: unknown(.|\n)*model\.adapter\.trains: unknown",
        ),
        ("{name: prompt, layers: [0]}", r"model\.adapter\.layers: unknown"),
        ("{tokens: 4}", r"model\.adapter\.tokens: unknown"),
        ("{name: adalora}", r"'adalora' does not exist.*; allowed: lora, ia3, prompt"),
        ("{name: prompt, tokenizer: bytes}", "tokenizer need text"),
        ("{name: prompt, text: a, init: random}", "leave init out, or text"),
        ("{name: prompt, start: a, init: random}", "leave init and text out, or start"),
        (f"{{name: ia3, sha256: {'0' * 64}}}", "sha256 needs start"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(adapter: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, experiment(tmp_path, "run", "fedavg"), [f"model.adapter={adapter}"])


def test_a_text_counts_by_its_tokens_wherever_its_tokenizer_is(tmp_path: Path) -> None:
    def printed(**adapter: Any) -> str:
        content = experiment(tmp_path, "run", "fedavg", model={"adapter": {"name": "prompt", **adapter}})
        return load_config(Experiment, content, []).fingerprint()

    known = {"text": "a", "text_tokens": [5, 6]}
    assert printed(**known, tokenizer="one") == printed(**known, tokenizer="other") != printed(text="a")
    assert printed(**{**known, "text_tokens": [5, 7]}) != printed(**known)
    assert len({printed(), printed(tokens=9), printed(depth="deep"), printed(init="random")}) == 4
