"""Measured costs of a service, and the plan that they give."""
