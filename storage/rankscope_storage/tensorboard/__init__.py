"""TensorBoard's file format, for both directions: frames with check sums, messages, and the tags of tensors.

Its modules need the extra `tensorboard` (protobuf, google-crc32c): import them only when they are used.
"""
