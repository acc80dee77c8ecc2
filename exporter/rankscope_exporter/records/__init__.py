"""The data of one step, from the event in training to the record that is published."""
