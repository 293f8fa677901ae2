"""State dictionaries and checkpoint files of sharded models. Nothing is imported here: libdc.torch has the public
names."""
