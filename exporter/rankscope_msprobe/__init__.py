"""Everything of msprobe's training monitor: its calls, its configuration, and the files that it writes.

A part of the package is imported when a script, a configuration, an import or an export first uses it.
`docs/migration.md` has the equivalents of all options, calls and files.
"""
