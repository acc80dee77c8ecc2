"""The parts of `rankscope demo`: a receiver of alerts, child processes, and the checks at the end."""
