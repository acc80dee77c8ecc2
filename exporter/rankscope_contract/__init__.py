"""Definitions that all packages of Rankscope share: names, labels, record fields, rules. Standard library only.

All other packages import this package. It imports none of them.
"""

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the record stream and of the tables. A change may only add nullable fields; readers accept older data."""
