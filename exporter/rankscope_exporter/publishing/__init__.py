"""The publisher thread, anomaly detection, and the lines on the console."""
