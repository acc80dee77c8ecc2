"""Plugins of apprise, one file each."""
