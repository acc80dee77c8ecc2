"""Callbacks for trainers that own the training loop. Each module imports its trainer, and nothing here imports them."""
