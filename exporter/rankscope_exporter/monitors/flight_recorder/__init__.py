"""Reads torch's flight recorder.

Each collective is published as a row, and a hang is reported with the latest collectives.
"""
