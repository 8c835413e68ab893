"""The release."""

VERSION = "0.2.0"
