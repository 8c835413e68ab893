"""Tests compute on CPUs, on every machine; RAYFL_TEST_DEVICE names another device for those that can use one."""

from __future__ import annotations

import os

# Here: before anything asks CUDA for devices, in this process or in those that tests start.
if not os.environ.get("RAYFL_TEST_DEVICE"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
