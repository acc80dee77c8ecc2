"""Hooks of torch, the step tracker, and the recorder, which together turn training into sampled steps."""
