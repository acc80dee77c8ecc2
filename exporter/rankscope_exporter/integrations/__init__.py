"""Callbacks for trainers: Hugging Face Transformers and Lightning."""
