"""Finds the folder in which an older rayfl has begun an experiment, so that none is begun beside it unnoticed.

Default names of folders end in eight digits of the fingerprint, which is another one where an option has come to count
in all of them (``rayfl.config.identity``).
"""

from __future__ import annotations

import logging

from rayfl.config.added import changed_defaults, without
from rayfl.config.identity import Content, fingerprint_of, older_fingerprints
from rayfl.config.schema import ExperimentConfig
from rayfl.experiment.parts import Parts
from rayfl.storage.files import Storage
from rayfl.storage.run_folder import CONFIG

_DIGITS = 8

_log = logging.getLogger("rayfl")


def where_begun(config: ExperimentConfig) -> ExperimentConfig:
    """The configuration, with the name of the folder in which an older rayfl has begun this experiment, if it has.

    A folder that holds what the same options meant then, and mean no more, is named in a warning.
    """
    name, digits = config.run_name, config.fingerprint()[:_DIGITS]
    if not name.endswith(digits) or _folder(config, name).exists(CONFIG):
        return config
    stem, content = name.removesuffix(digits), config.identity()
    for fingerprint, rule in older_fingerprints(content):
        found = _folder(config, older := f"{stem}{fingerprint[:_DIGITS]}")
        if found.exists(CONFIG):
            _log.warning(
                "%s is this experiment, begun by rayfl %s or before: it goes on there", found.uri, rule.release
            )
            return config.model_copy(update={"name": older})
    _name_what_it_meant(config, stem, content)
    return config


def _name_what_it_meant(config: ExperimentConfig, stem: str, content: Content) -> None:
    changed = changed_defaults(config)
    if not changed:
        return
    meant = without(content, changed)
    for fingerprint in (fingerprint_of(meant), *(found for found, _ in older_fingerprints(meant))):
        found = _folder(config, f"{stem}{fingerprint[:_DIGITS]}")
        if found.exists(CONFIG):
            values = ", ".join(f"{path}={before}" for path, before in changed.items())
            _log.warning(
                "%s has what this configuration meant to an older rayfl: to go on with that run set %s. Another one is "
                "begun in %s",
                found.uri,
                values,
                _folder(config, config.run_name).uri,
            )
            return


def _folder(config: ExperimentConfig, name: str) -> Storage:
    return Parts(config.model_copy(update={"name": name})).storage
