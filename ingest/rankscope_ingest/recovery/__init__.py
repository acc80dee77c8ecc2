"""Recover records of dead processes from their spools, and count the records that are lost."""
