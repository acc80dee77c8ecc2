"""What each step was made of: marks on the training thread, durations on the publisher's. No device is waited for."""
