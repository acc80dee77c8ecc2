"""Records on disk that outlive their process.

A rank writes them. The service, or a process of a rank that starts later on the same host, reads them.

    <folder>/<incarnation>/lock                  locked with flock while the process is alive
                           identity.json         identity of the process: its registration
                           plan-<hash>.json      a plan of the records
                           <first seq>.arrows    an Arrow IPC stream, one record per message, without gaps in seq

A file is readable up to its last complete message, whenever its writer was killed.
"""

from rankscope_contract.wire.spool.orphan import FolderLock, Orphan
from rankscope_contract.wire.spool.reader import SpoolError, SpoolReader, SpoolRecords

__all__ = ["FolderLock", "Orphan", "SpoolError", "SpoolReader", "SpoolRecords"]
