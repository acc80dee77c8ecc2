"""Questions over the history of runs that one SQL view does not answer: comparing, finding the first."""
