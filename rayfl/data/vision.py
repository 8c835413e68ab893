"""Image data sets read through torchvision."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from rayfl.data.federated import InputSpec
from rayfl.data.root import data_root
from rayfl.errors import DataError


class MnistSource(BaseModel):
    """Configuration of MNIST's 60,000 training images (LeCun et al., 1998)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["mnist"] = Field(default="mnist", description="The training images of MNIST.")
    root: Path | None = Field(
        default=None,
        description="The folder that holds `MNIST/raw`, as torchvision lays it out. A relative path that does not "
        "exist in the working directory is looked up in the data root, which is also the default: the folder of the "
        "environment variable RAYFL_DATA, or ~/.cache/rayfl.",
    )

    @property
    def resolved_root(self) -> Path:
        """The folder on this machine."""
        if self.root is None:
            return data_root()
        root = self.root.expanduser()
        return root if root.exists() else data_root() / root

    def arrays(self) -> tuple[np.ndarray, np.ndarray, InputSpec]:
        """All samples: x uint8 of shape (60000, 1, 28, 28), y int64 of shape (60000,), and their spec.

        Raises:
            DataError: the files are missing or damaged, or torchvision cannot be imported.
        """
        datasets = _torchvision_datasets()
        root = self.resolved_root
        # torchvision reports a damaged file by whichever line of its parser stumbles: among others OSError,
        # ValueError, RuntimeError, TypeError, KeyError and AssertionError.
        try:
            mnist = datasets.MNIST(root, train=True, download=False)
            images, labels = mnist.data, mnist.targets
        except Exception as error:
            raise _unreadable(root, str(error) or type(error).__name__) from error
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
            raise _unreadable(root, f"images of shape {tuple(images.shape)}, labels of shape {tuple(labels.shape)}")
        return images.unsqueeze(1).numpy(), labels.numpy(), InputSpec("image", (1, 28, 28), 10)


def _torchvision_datasets() -> ModuleType:
    # A torchvision built for another torch fails on import with RuntimeError ("operator torchvision::nms does not
    # exist") or AttributeError ("partially initialized module 'torchvision' has no attribute 'extension'").
    try:
        return importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError, AttributeError) as error:
        try:
            found = f"torchvision {version('torchvision')}"
        except PackageNotFoundError:
            found = "no torchvision"
        raise DataError(
            f"MNIST is read with torchvision, which cannot be imported ({error}); {found} is installed beside torch "
            f"{torch.__version__}; install matching versions, e.g. `pip install --upgrade torch torchvision`"
        ) from error


def _unreadable(root: Path, problem: str) -> DataError:
    folder = root / "MNIST" / "raw"
    return DataError(
        f"MNIST cannot be read from {folder}: {problem}; get it with "
        f'`torchvision.datasets.MNIST("{root}", download=True)` (delete that folder first if its files are damaged), '
        "or set the source's root or RAYFL_DATA to the folder that holds MNIST/raw"
    )
