"""The publisher thread, anomaly detection, and the lines that a rank prints."""
