"""Threads beside training that read hardware, torch's flight recorder, and signs of a hang."""
