"""The monitor that a training script uses, and the session that exists between attach and detach."""
