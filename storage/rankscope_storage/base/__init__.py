"""Modules that the whole package uses: schemas, errors, fsync. They import no other folder of the package."""
