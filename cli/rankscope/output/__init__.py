"""Rows, texts and progress as the command prints them."""
