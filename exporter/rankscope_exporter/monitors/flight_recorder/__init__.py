"""Reads torch's flight recorder: each collective becomes a row, and the latest ones explain a hang."""
