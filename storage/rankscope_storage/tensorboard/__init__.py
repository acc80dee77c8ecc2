"""TensorBoard's file format for import and export: records with checksums, messages, and the tags of tensors.

The modules need the extra `tensorboard` (protobuf, google-crc32c). Import them only where they are used.
"""
