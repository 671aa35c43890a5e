"""`merge_call`: rank 0 commands, the other ranks follow."""
