"""Follow logs of training programs on this machine and over SSH, without a process on the training machine.

The bytes of a log are read by offset and imported by `importers`, so that the store has the same rows as after one
import of the complete log. The rows show whether training is slow, stalled, finished or failed. These states are stored
as incidents and sent as notifications.
"""
