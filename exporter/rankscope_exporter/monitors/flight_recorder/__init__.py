"""A thread that reads torch's flight recorder and publishes each collective as a row."""
