"""Callbacks for trainers, under the name that scripts import everything from: `rankscope.integrations.lightning`."""
