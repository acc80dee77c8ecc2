"""The façade that a script calls (`Monitor`), and the composition root behind it (`Session`)."""
