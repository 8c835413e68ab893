"""(IA)^3 against transformers' own models with hooks, in float64, and against peft; stacks, bases and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.errors import ModelError
from rayfl.models.pretrained.merging import merge
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.peft_files import write_adapter
from tests.models.pretrained.test_network import check_gradients, cross_entropy
from tests.support import exact
from tests.support.bases import CONFIGS, IMAGES, TOKENS, inputs, language_network, network, section, trained
from tests.support.toys import assert_equal

IA3 = {"name": "ia3"}
FAMILIES = ["vit", "llama", "gpt2", "bert", "roberta"]


def hooked(family: str, tree: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of transformers' own model, of which hooks multiply what the paper multiplies."""
    model = exact.plain(family, len(tree[next(name for name in tree if name.endswith(".weight"))]))
    for name, leaf in tree.items():
        if not name.endswith(".ia3_l"):
            continue
        layer = model.get_submodule(name.removeprefix("model.").removesuffix(".ia3_l"))
        factors = leaf.flatten()
        if any(name.endswith(f"{end}.ia3_l") for end in ("fc2", "down_proj", "c_proj", ".output.dense")):
            layer.register_forward_pre_hook(lambda _, args, factors=factors: (args[0] * factors,))
        else:
            layer.register_forward_hook(lambda _, args, out, factors=factors: out * factors)
    given = {"pixel_values": x.double()} if family == "vit" else {"input_ids": x}
    return exact.with_head(model, tree, lambda: model(**given).logits)


@pytest.mark.parametrize("family", ["vit", "llama", "qwen3", "gpt2", "bert", "roberta"])
def test_outputs_and_gradients_are_those_of_hooks(family: str) -> None:
    net, x = network(family, adapter=IA3), inputs(family, 4, 0)
    tree = exact.double(trained(net, 3))
    exact.check_same(exact.outputs(net, tree, x), hooked(family, tree, x), tree)


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("vit", {"attention.k_proj": 32, "attention.v_proj": 32, "mlp.fc2": 64}),
        ("gpt2", {"attn.c_attn": 96, "mlp.c_proj": 128}),
        ("bert", {"attention.self.key": 32, "attention.self.value": 32, "output.dense": 48}),
        ("mistral", {"self_attn.k_proj": 16, "self_attn.v_proj": 16, "mlp.down_proj": 48}),
    ],
)
def test_keys_values_and_inputs_of_second_layers_have_vectors(family: str, ends: dict[str, int]) -> None:
    net = network(family, adapter=IA3)
    tree = net.initialize(0)
    names = [name for name in tree if name.endswith(".ia3_l")]
    assert net.groups["adapters"] == net.groups["ia3"] == tuple(names) and not net.groups["lora_b"]
    assert len(names) == 2 * len(ends) and ".attention.output." not in "".join(names)
    for end, size in ends.items():
        own = [tree[name] for name in names if name.endswith(f"{end}.ia3_l")]
        shape = (1, size) if end in ("mlp.fc2", "mlp.c_proj", "output.dense", "mlp.down_proj") else (size, 1)
        assert len(own) == 2 and all(leaf.shape == shape and bool((leaf == 1).all()) for leaf in own)


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.two_cases
def test_a_model_begins_as_the_base_to_the_bit(family: str) -> None:
    net, plain, x = network(family, adapter=IA3), network(family), inputs(family, 5, 0)
    assert torch.equal(net.logits(net.initialize(4), x), plain.logits(plain.initialize(4), x))
    for one in (net, plain):
        one.compute_in(torch.bfloat16)
    assert torch.equal(net.logits(net.initialize(4), x), plain.logits(plain.initialize(4), x))


def test_a_language_model_has_vectors_too() -> None:
    net, plain = language_network("qwen2", adapter=IA3), language_network("qwen2")
    x = inputs("qwen2", 3, 0)
    assert torch.equal(net.logits(net.initialize(0), x), plain.logits(plain.initialize(0), x))
    assert net.groups["head"] == () and net.num_parameters == 2 * (16 + 16 + 48)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "bert"])
def test_folded_gradients_are_those_of_one_client_at_a_time(family: str, checkpointing: bool) -> None:
    net = network(family, adapter=IA3, checkpointing=checkpointing)
    check_gradients(net, family, cross_entropy, [trained(net, k) for k in range(3)])


def bare(family: str, net: AdaptedNetwork) -> Any:
    return exact.plain(family, net.head_shape[0]).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_what_is_written_and_a_run_begins_from_what_peft_writes(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net, made = network(family, adapter=IA3), section(family, adapter=IA3)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree)), {})
    model = peft.PeftModel.from_pretrained(bare(family, net), tmp_path / "adapter").eval()
    with torch.no_grad():
        found = model(pixel_values=x) if family == "vit" else model(input_ids=x)
    torch.testing.assert_close(found.logits, net.logits(tree, x), rtol=2e-6, atol=2e-6)
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    begun = section(family, adapter={**IA3, "start": str(tmp_path / "again")})
    assert_equal(begun.network(IMAGES if family == "vit" else TOKENS).initialize(11), tree)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_have_the_same_outputs(family: str) -> None:
    net = network(family, adapter=IA3)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    with torch.no_grad():
        model, expected = merge(net, tree).eval(), net.logits(tree, x)
        found = (model(pixel_values=x) if family == "vit" else model(input_ids=x)).logits
    assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_which_layers_and_which_side() -> None:
    one = network("vit", adapter={**IA3, "targets": ["q_proj", "fc1"], "feedforward": ["fc1"], "layers": [1]})
    shapes = {name: tuple(leaf.shape) for name, leaf in one.initialize(0).items() if name.endswith(".ia3_l")}
    assert shapes == {
        "model.vit.layers.1.attention.q_proj.ia3_l": (32, 1), "model.vit.layers.1.mlp.fc1.ia3_l": (1, 32),
    }  # fmt: skip
    outputs = network("vit", adapter={**IA3, "targets": "all-linear"}).initialize(0)
    assert sum(leaf.shape[0] == 1 for name, leaf in outputs.items() if name.endswith(".ia3_l")) == 2
    inputs_alone = network("vit", adapter={**IA3, "targets": r".*\.fc\d", "feedforward": r".*\.fc\d"}).initialize(0)
    assert all(leaf.shape[0] == 1 for name, leaf in inputs_alone.items() if name.endswith(".ia3_l"))
    with pytest.raises(ModelError, match=r"feedforward names .*fc1, which is none of model\.adapter\.targets"):
        network("vit", adapter={**IA3, "targets": ["fc2"], "feedforward": ["fc1"]})
    with pytest.raises(ModelError, match=r"model\.adapter\.feedforward: no linear layer is called 'fc3'"):
        network("vit", adapter={**IA3, "feedforward": ["fc3"]})


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    tree = trained(network("vit"), 0)
    write_adapter(tmp_path, tree, section("vit").peft_settings(list(tree)), {})
    with pytest.raises(ModelError, match=r"has a LORA, not IA3: set model\.adapter\.name=lora$"):
        section("vit", adapter={**IA3, "start": str(tmp_path)}).network(IMAGES)
