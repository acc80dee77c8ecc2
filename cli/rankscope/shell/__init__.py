"""A command and its shell: options, standard streams, help, exit codes and messages."""
