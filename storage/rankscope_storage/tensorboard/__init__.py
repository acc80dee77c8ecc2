"""TensorBoard's file format for import and export: frames with checksums, messages, and the tags of tensors.

The modules need the extra `tensorboard` (protobuf, google-crc32c). Import them only when they are used.
"""
