"""The sinks `csv`, `anomalies` and `tensorboard`, which write the files of msprobe while training runs."""
