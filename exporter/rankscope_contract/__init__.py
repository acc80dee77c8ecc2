"""What every room of Rankscope agrees on: names, labels, record fields, rules. Standard library only.

Imported by all other packages, imports none of them.
"""

__version__ = "0.1.0"

SCHEMA_VERSION = 1
"""Version of the record stream and of the table. Changes only add nullable fields, so readers accept older ones."""
