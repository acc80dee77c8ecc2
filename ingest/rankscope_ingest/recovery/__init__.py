"""Recovery of records of dead processes from their spools, and the count of records that are lost."""
