"""What is shown to others has no keys in it."""

from __future__ import annotations

import pytest

from rayfl.config.redaction import redact, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/runs", "s3://bucket/runs"),
        ("s3://KEY:SECRET@bucket/runs?region=eu", "s3://***@bucket/runs?region=eu"),
        ("s3://KEY@bucket/runs", "s3://***@bucket/runs"),
        (
            "read s3://b/f?access_key=AKIA&scheme=http&secret_key=s3c now",
            "read s3://b/f?access_key=***&scheme=http&secret_key=*** now",
        ),
        ("http://u:p@host:9000/x and gs://q:r@b", "http://***@host:9000/x and gs://***@b"),
        ("https://host/f?X-Amz-Signature=abc", "https://host/f?X-Amz-Signature=***"),
        ("no address: a@b, x?y=z", "no address: a@b, x?y=z"),
        ("/home/me/runs", "/home/me/runs"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_configurations() -> None:
    config = {
        "seed": 3,
        "storage_path": "s3://K:S@bucket",
        "dataset": {
            "options": {"password": "x", "hf_token": "y", "api_key": "z", "tokens": 5},
            "paths": ["gs://a:b@c"],
        },
    }
    assert redacted(config) == {
        "seed": 3,
        "storage_path": "s3://***@bucket",
        "dataset": {
            "options": {"password": "***", "hf_token": "***", "api_key": "***", "tokens": 5},
            "paths": ["gs://***@c"],
        },
    }
