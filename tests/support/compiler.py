"""What tests of ``engine.compile`` need."""

from __future__ import annotations

import os
import shutil

import pytest

NEEDS_COMPILER = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler here: apt-get install g++"
)
