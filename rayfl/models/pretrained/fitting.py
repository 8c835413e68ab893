"""What a base can read, and what it can learn from: said before a run."""

from __future__ import annotations

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.pretrained.families import FAMILIES, family_of
from rayfl.models.pretrained.folder import BaseFolder


def check_inputs(model: Architecture, folder: BaseFolder, spec: InputSpec, trained_head: bool, virtual: int) -> int:
    """Refuses inputs that a base cannot read, or from which it cannot learn.

    Args:
        model: the section of the configuration, for messages.
        folder: the base.
        spec: of the inputs.
        trained_head: whether last layers are to be trained.
        virtual: how many virtual tokens are read with each sample.

    Returns:
        The channels of the images that the base reads; 0 for tokens, and for features of images.

    Raises:
        ModelError: naming what to change.
    """
    config, family = folder.config, family_of(folder.model_type)
    if "quantization_config" in config:
        raise ModelError(
            f"model.folder: config.json of {folder.path} says that its weights are quantised "
            f"({config['quantization_config'].get('quant_method')}), and there are no quantised bases: give the "
            "folder of the whole weights, and set engine.precision=bfloat16 to have them take half the memory"
        )
    if family.kind == "tokens":
        _check_tokens(model, folder, spec, trained_head, virtual)
        return 0
    if spec.target == "tokens":
        raise model.misfit(spec, "images")
    if family.tower and trained_head:
        raise ModelError(
            f"model.head.train: {folder.model_type} has no last layers, since its outputs are made of the classes' "
            "texts (model.prompt): set model.head.train=false"
        )
    if family.tower and is_of_features(spec):
        width = int(config.get("projection_dim", 512))
        if spec.shape != (width,):
            raise model.misfit(spec, f"images, or vectors of the {width} features that the base makes of them")
        return 0
    channels, rows, columns = model.image(spec)
    seen = folder.vision_config
    side, wanted = seen.get("image_size", 224), int(seen.get("num_channels", 3))
    height, width = side if isinstance(side, list) else (side, side)
    if (rows, columns) != (height, width):
        raise model.misfit(spec, f"images of {height} x {width} pixels: set transform.resize={height}")
    if channels not in (1, wanted):
        raise model.misfit(spec, f"images of {wanted} channels")
    return wanted


def is_of_features(spec: InputSpec) -> bool:
    """Returns whether inputs are vectors: for CLIP, features that were made of images before."""
    return spec.kind == "image" and len(spec.shape) == 1


def _check_tokens(model: Architecture, folder: BaseFolder, spec: InputSpec, trained_head: bool, virtual: int) -> None:
    """Refuses texts that the base cannot read, or from which it cannot learn."""
    config, family = folder.config, family_of(folder.model_type)
    if spec.target == "tokens" and not family.causal:
        known = ", ".join(name for name, one in FAMILIES.items() if one.causal)
        raise model.misfit(spec, f"one class, some labels or numbers a sample (a language model needs one of {known})")
    if spec.target == "tokens" and trained_head:
        raise ModelError(
            "model.head.train: the output layer of a language model is the base's own, and is not trained: set "
            "model.head.train=false"
        )
    if spec.kind != "tokens" or len(spec.shape) != 1 or spec.target == "ranking":
        raise model.misfit(spec, f"rows of tokens ({folder.model_type})")
    # A token of the data's own that only fills rows up is never read where the model is causal.
    padded = spec.target == "tokens" and spec.padding == config.get("vocab_size")
    if spec.vocabulary - padded > int(config.get("vocab_size", 0)):
        if spec.padding == config.get("vocab_size"):
            raise model.misfit(
                spec,
                "rows that are filled up with a token of the base, and its tokenizer names none: set pad_token in "
                "tokenizer_config.json beside it, for instance to the token that ends a text",
            )
        raise model.misfit(spec, f"tokens below {config.get('vocab_size')}: use the tokenizer of the base")
    most = config.get("max_position_embeddings", config.get("n_positions"))
    if most is not None and spec.shape[0] > (most := int(most) - family.first_position - virtual):
        beside = f" beside {virtual} virtual ones" if virtual else ""
        raise model.misfit(spec, f"texts of at most {most} tokens{beside}: set dataset.length={most}")
