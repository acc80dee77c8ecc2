"""Records on disk that outlive their process: written by a rank, read by the service or by the next rank on the host.

    <folder>/<incarnation>/lock                  held by flock as long as the process lives
                           identity.json         who it was: what it would have registered with
                           plan-<hash>.json      the names behind the numbers
                           <first seq>.arrows    an Arrow IPC stream, one record per message, without gaps in seq

A file stays readable up to its last whole message, whatever moment its writer was killed at.
"""

from rankscope_contract.spool.layout import SpoolError
from rankscope_contract.spool.lock import FolderLock
from rankscope_contract.spool.orphan import Orphan
from rankscope_contract.spool.reader import SpoolReader, Stretch

__all__ = ["FolderLock", "Orphan", "SpoolError", "SpoolReader", "Stretch"]
