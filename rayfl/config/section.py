"""What the sections of the configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rayfl.naming.texts import has_keys


class Section(BaseModel):
    """A section of the configuration: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def without_secrets(path: str) -> str:
    """A path or URI that has no keys: what is in the configuration is in config.yaml, logs and messages."""
    if has_keys(path):
        raise ValueError("keys do not belong here: give them in the environment (AWS_ACCESS_KEY_ID, ...)")
    return path
