"""The generated files of dashboards and rules. Several test modules read them while tests are collected."""

from __future__ import annotations

from types import MappingProxyType

from rankscope_dashboards.generate import generated_files

FILES = MappingProxyType(generated_files())
"""The text of each file by its path. It is generated once in a process, which takes a second."""
