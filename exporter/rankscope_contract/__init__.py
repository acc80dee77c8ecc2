"""Definitions that all packages of Rankscope share: names, labels, record fields and rules.

This package uses only the standard library. All other packages import it; it imports none of them.
"""

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the record stream and of the tables of the store.

A new version may only add nullable fields. Readers accept data of older versions.
"""
