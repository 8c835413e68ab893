"""Errors a user can act on: each message names the place (file, field, client) and the fix.

The command line prints these without a traceback; everything else is a defect in rayfl.
"""

from __future__ import annotations


class RayflError(Exception):
    """Base of every error that a user of rayfl can cause and mend."""


class ConfigError(RayflError):
    """A configuration, preset or override that cannot be run; lists every problem at once."""


class DataError(RayflError):
    """A data file or partition that cannot be used; names the file and, where known, the client."""


class ModelError(RayflError):
    """A model that does not fit the data set or the method."""


class ClientError(RayflError):
    """A client's procedure failed or returned non-finite values; names the client, round and phase."""


class DeviceLostError(RayflError):
    """A process can no longer compute on its device; another process can."""


class ResourceError(RayflError):
    """The cluster has too little of something; says what is missing and how much is there."""


class RunError(RayflError):
    """A run folder that cannot be continued, or a run that failed too often."""


class DamageError(RunError):
    """A file of a run is missing, truncated or changed; names it and says what is wrong."""
